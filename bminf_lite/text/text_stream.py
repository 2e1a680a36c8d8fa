"""The text of one completion while its tokens arrive, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from .detokenizer import Detokenizer
from .stop_strings import StopMatcher
from .tokenizer import Tokenizer


class TextStream:
    """Turns the tokens of one completion into text; the text is empty without a tokenizer.

    ``prompt`` holds the tokens that the text continues; it is empty for an answer. ``text`` is all text that
    :meth:`push` has returned.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = (), prompt: Sequence[int] = ()):
        self.text = ""
        self._detokenizer = Detokenizer(tokenizer, prompt) if tokenizer else None
        self._matcher = StopMatcher(stop)

    def push(self, tokens: Sequence[int], last: bool) -> tuple[str, bool]:
        """The text that ``tokens`` add, and whether a stop string ends it.

        Text is held back while it may be part of a character or of a stop string, unless the tokens are the ``last``.
        """
        if self._detokenizer is None:
            return "", False
        text = "".join(map(self._detokenizer.push, tokens))
        if last:
            text += self._detokenizer.flush()
        text, stopped = self._matcher.push(text)
        if last and not stopped:
            text += self._matcher.flush()
        self.text += text
        return text, stopped
