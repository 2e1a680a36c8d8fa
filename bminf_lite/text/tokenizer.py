"""The interface of all tokenizers: text to token ids and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import UsageError

_MAX_STOP_TEXTS = 64
"""Sets of stop strings whose special tokens are remembered."""
_MAX_TOKEN_TEXTS = 1 << 18
"""Tokens whose texts are remembered."""


@dataclass(frozen=True)
class WholeText:
    """A text, or a pair of texts, in tokens, as a model reads it that sees all of it at once.

    ``token_types`` say to which text a token belongs; None stands for zeros. ``offsets`` are the first character of
    each token in its text, and the one behind the last; equal numbers for a token of the frame. ``num_cut`` tokens were
    left out at the end of the texts.
    """

    token_ids: Sequence[int]
    token_types: Sequence[int] | None = None
    offsets: Sequence[tuple[int, int]] = ()
    num_cut: int = 0


class Tokenizer(ABC):
    """A checkpoint's tokenizer. Attributes that a vocabulary does not have are ``None`` or empty.

    - ``bos_token``, ``eos_token``: the special tokens as text; ``bos_id``, ``eos_ids``: their ids.
    - ``special_tokens``: the texts of special tokens by name, such as ``pad_token``, for chat templates.
    - ``special_ids``: all tokens without text. ``added_texts``: the texts that become one token wherever they stand.
    - ``answers_dialogues``: :meth:`encode_turns` makes a prompt of a dialogue, without a chat template.
    - ``chat_template``: the source of the checkpoint's chat template; ``tool_chat_template``: of that for conversations
      with tools, which may be the same.
    - ``byte_fallback``: tokens such as ``<0xE2>`` stand for single bytes. ``byte_level``: each character of a token as
      the vocabulary spells it stands for a byte, in GPT-2's way.
    - ``sentinels``: the tokens that stand for missing parts of a text, in order.
    - ``target_ids``: for an encoder-decoder, the tokens after the start token with which its decoder continues a text.
    """

    bos_token: str | None = None
    eos_token: str | None = None
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    special_tokens: Mapping[str, str] = MappingProxyType({})
    special_ids: frozenset[int] = frozenset()
    added_texts: frozenset[str] = frozenset()
    answers_dialogues: bool = False
    chat_template: str | None = None
    tool_chat_template: str | None = None
    byte_fallback: bool = False
    byte_level: bool = False
    sentinels: Sequence[int] = ()
    target_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._token_texts: dict[int, str] = {}
        self._special_within: dict[tuple[str, ...], dict[int, str]] = {}

    @abstractmethod
    def __len__(self) -> int:
        """One more than the largest token id."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of ``text``. ``add_special_tokens`` frames it as the checkpoint does, for example with ``<s>``.

        Raises ``UsageError`` for a value that is not text or cannot be written as UTF-8, ``CheckpointError`` for text
        that a vocabulary without bytes and without an unknown token cannot express.
        """
        require_text(text)
        return self._encode(text, add_special_tokens)

    def encode_whole(self, texts: Sequence[tuple[str, ...]], longest: int) -> list[WholeText]:
        """Texts, or pairs of texts, framed as the checkpoint does, of ``longest`` tokens each at most.

        What is too much is cut off at the end; of a pair, from the longer text. Raises ``UsageError`` as
        :meth:`encode`, and for a pair if the vocabulary has no form for it.
        """
        if any(len(parts) > 1 for parts in texts):
            raise UsageError("this tokenizer has no form for a pair of texts")
        found = (self.encode(text) for (text,) in texts)
        return [WholeText(ids[:longest], num_cut=max(len(ids) - longest, 0)) for ids in found]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``. Special tokens and ids outside the vocabulary have no text.

        Bytes that are not UTF-8 become U+FFFD. Raises ``UsageError`` for ids that do not fit 32 bits.
        """
        ids = [int(i) for i in ids]
        if ids and not 0 <= min(ids) <= max(ids) < 2**32:
            wrong = next(i for i in ids if not 0 <= i < 2**32)
            raise UsageError(f"token ids must be from 0 to {2**32 - 1}, but one is {wrong}")
        return self._decode(ids)

    def token_text(self, token_id: int) -> str:
        """The text of one token alone, as :meth:`decode` gives it; remembered, because streams ask for each again."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self.decode([token_id])
            if len(self._token_texts) < _MAX_TOKEN_TEXTS:
                self._token_texts[token_id] = text
        return text

    @abstractmethod
    def id_to_piece(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; ``None`` for an id outside the vocabulary."""

    @abstractmethod
    def piece_to_id(self, piece: str) -> int | None:
        """The id of a token as the vocabulary spells it; ``None`` if it has none."""

    def showing(self, tokens: Collection[str]) -> Tokenizer:
        """This tokenizer, but decoding keeps the special tokens that are spelled as in ``tokens``."""
        shown = copy(self)
        shown._token_texts = {}
        shown._special_within = {}
        shown.special_ids = frozenset(i for i in self.special_ids if self.id_to_piece(i) not in tokens)
        return shown

    def special_within(self, texts: Sequence[str]) -> Mapping[int, str]:
        """The special tokens whose spelling is in one of some texts, by id. The last texts are remembered."""
        key = tuple(texts)
        found = self._special_within.get(key)
        if found is None:
            pieces = ((i, self.id_to_piece(i)) for i in self.special_ids)
            found = {i: piece for i, piece in pieces if piece and any(piece in text for text in key)}
            if len(self._special_within) >= _MAX_STOP_TEXTS:
                self._special_within.clear()
            self._special_within[key] = found
        return found

    @abstractmethod
    def encode_spans(self, parts: Sequence[str]) -> list[int]:
        """The ids of ``parts`` with a sentinel between each two, for the part of the text that is missing there."""

    def encode_turns(self, turns: Sequence[str], longest: int) -> list[int] | None:
        """The ids of a dialogue whose last utterance is to be answered; ``None`` if a chat template renders dialogues.

        Drops the first utterances of a dialogue that is longer than ``longest`` tokens.
        """
        return None

    @abstractmethod
    def _encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...


def require_text(text: object, what: str = "prompt") -> None:
    """Raise ``UsageError`` for a value, called ``what``, that is not text or cannot be written as UTF-8."""
    if not isinstance(text, str):
        raise UsageError(f"a {what} must be text, but is {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        code = ord(text[e.start])
        wrong = f"{text[e.start]!r}, half of a surrogate pair"
        if 0xDC80 <= code <= 0xDCFF:  # what Python makes of an argument's byte that is not UTF-8
            wrong = f"byte {code - 0xDC00:#x} of text that is not UTF-8; convert it to UTF-8"
        raise UsageError(f"the {what} cannot be encoded: character {e.start} is {wrong}") from None


def numbered_ids(form: str, id_of: Callable[[str], int | None]) -> list[int]:
    """The ids of ``form.format(0)``, ``form.format(1)``, ..., up to the first token without an id."""
    ids: list[int] = []
    while (token_id := id_of(form.format(len(ids)))) is not None:
        ids.append(token_id)
    return ids
