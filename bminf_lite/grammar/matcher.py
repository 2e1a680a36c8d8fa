"""Grammars compiled for a model's vocabulary, and the bit masks of the tokens that they allow next.

A vocabulary is the text of each token. llguidance reads it from a ``tokenizer.json`` whose tokens are bytes (GPT-2's
byte level, SentencePiece's BPE with byte tokens). For vocabularies like T5's and CPM's, this module lists the texts.
Special tokens have no text, so a grammar of text never allows them.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from ..errors import UsageError, library_errors
from ..files import thread_count
from ..text.cpm_tokenizer import CpmTokenizer
from ..text.json_tokenizer import JsonTokenizer
from ..text.tokenizer import Tokenizer
from .value import LIMITS, Grammar, specification

MAX_CACHED = 64
"""Lexers of compiled grammars that are kept."""
MAX_VOCABULARIES = 4
"""Vocabularies that are kept: one for each set of tokens that end a completion, which requests may choose."""
MATCHERS_PER_LEXER = 8
"""A grammar gets another lexer when each of its lexers serves ``MATCHERS_PER_LEXER`` completions."""
QUICK_SECONDS = 0.2
"""A grammar that takes longer to compile is compiled once: it must not keep others waiting, or take much memory."""
_UNSUPPORTED = (
    "cannot be constrained by a grammar (supported are byte-level and SentencePiece vocabularies, and those of CPM)"
)


class Matcher:
    """The state of one completion: what its grammar allows after the tokens so far. ``eos_ids`` end it.

    ``library_matcher`` has taken all tokens but ``newest``, which it takes when the next mask is computed. ``lexer`` is
    a number that it has in common with the matchers whose lexer it shares.
    """

    def __init__(self, grammar: Grammar, library_matcher: Any, eos_ids: Collection[int], lexer: int = 0):
        self.grammar = grammar
        self.library_matcher = library_matcher
        self.lexer = lexer
        self.newest: int | None = None
        self._eos_ids = eos_ids
        self._end_bits: dict[int, int] = {}  # by word of the mask
        for token in eos_ids:
            self._end_bits[token // 32] = self._end_bits.get(token // 32, 0) | 1 << token % 32

    def accept(self, token: int) -> None:
        """Take the next token, which the last mask allows.

        Raises ``UsageError`` for an end that the grammar does not allow. A mask allows one where no token can come
        next, or if a limit was reached.
        """
        self.take_newest()  # several drafts may have been accepted
        if token not in self._eos_ids:
            self.newest = token
        elif not self.library_matcher.consume_token(token):
            raise UsageError(_message(self.grammar, self.library_matcher))

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of the leading ``tokens``, none of which ends the completion, may follow those taken."""
        self.take_newest()
        allowed: int = self.library_matcher.validate_tokens(list(tokens))
        return allowed

    def take_newest(self) -> None:
        """Let the library's matcher take the newest token."""
        if self.newest is not None:
            self.library_matcher.consume_token(self.newest)
            self.newest = None

    def fill_masks_behind(self, tokens: Sequence[int], masks: np.ndarray) -> None:
        """Write the mask behind each of ``tokens``, which may follow those taken, to ``masks`` uint32 ``[n, words]``.

        The state stays: the tokens are not taken.
        """
        self.take_newest()
        nbytes = masks.strides[0]
        for i, token in enumerate(tokens):
            self.library_matcher.consume_token(token)
            self.library_matcher.unsafe_compute_mask_ptr(masks.ctypes.data + i * nbytes, nbytes)
        self.library_matcher.rollback(len(tokens))

    def hold_back_end(self, mask: np.ndarray) -> None:
        """Forbid the end in a mask uint32 ``[words]``, unless nothing else is allowed."""
        before = [(word, mask[word]) for word in self._end_bits]
        for word, bits in self._end_bits.items():
            mask[word] &= ~np.uint32(bits)
        if not mask.any():
            for word, value in before:
                mask[word] = value


class MaskRow(NamedTuple):
    """A matcher whose mask is wanted, and the row for it. ``holds_back_end`` as :meth:`Matcher.hold_back_end`."""

    matcher: Matcher
    row: int
    holds_back_end: bool = False


def fill_masks(masks: np.ndarray, wanted: Sequence[MaskRow]) -> None:
    """Write the masks of the next tokens into rows of ``masks``, uint32 ``[M, words]``, on several threads.

    Token ``t`` is allowed if bit ``t % 32`` of word ``t // 32`` is set. A matcher for which no token can come next, or
    that has reached a limit, allows the end alone, and then refuses it with the reason.
    """
    assert masks.flags.c_contiguous and masks.dtype == np.uint32, masks.dtype
    # A thread gets neighbours: matchers of one lexer, which would wait for each other in different threads.
    wanted = sorted(wanted, key=lambda w: w.matcher.lexer)
    address, nbytes = masks.ctypes.data, masks.strides[0]
    newest = [(w.matcher.library_matcher, w.matcher.newest) for w in wanted if w.matcher.newest is not None]
    rows = [(w.matcher.library_matcher, w.row) for w in wanted]
    if len(wanted) == 1:  # without the time that it takes to wake a thread
        for matcher, token in newest:
            matcher.consume_token(token)
        for matcher, row in rows:
            matcher.unsafe_compute_mask_ptr(address + row * nbytes, nbytes)
    else:
        if newest:
            _executor().consume_token_par(newest)
        _executor().unsafe_compute_mask_ptr(rows, address, nbytes, len(masks))
    for w in wanted:
        w.matcher.newest = None
    for w in wanted:
        if w.holds_back_end:
            w.matcher.hold_back_end(masks[w.row])


class _Lexer:
    """A grammar compiled by itself: an ``LLMatcher`` at its start, of which completions get copies.

    Copies share what the lexer has learned, behind a lock: their masks are computed one after another. ``matchers`` are
    the copies in use. ``seconds`` is what compiling took.
    """

    def __init__(self, library_matcher: Any, number: int, seconds: float):
        self.seconds = seconds
        self._library_matcher = library_matcher
        self._number = number
        self.matchers: WeakSet[Matcher] = WeakSet()

    def matcher(self, grammar: Grammar, eos_ids: Collection[int]) -> Matcher:
        """A copy for a completion."""
        found = Matcher(grammar, self._library_matcher.deep_copy(), eos_ids, self._number)
        self.matchers.add(found)
        return found


class GrammarCompiler:
    """Compiles grammars for a tokenizer and a model with ``vocab_size`` tokens, and keeps them. Thread-safe.

    A grammar that many completions follow at a time is compiled several times, so that threads can compute their masks.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabularies: dict[frozenset[int], Any] = {}
        self._compiled: OrderedDict[tuple[Grammar, frozenset[int]], list[_Lexer]] = OrderedDict()
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._num_lexers = 0

    def matcher(self, grammar: Grammar, eos_ids: frozenset[int]) -> Matcher:
        """A matcher at its start. Raises ``UsageError`` for a grammar, or a vocabulary, that cannot be used.

        Takes microseconds for a grammar that is kept, else up to seconds (:data:`.value.CHECK_SECONDS`); the first call
        also reads the vocabulary. Call it in a thread that may wait.
        """
        if not eos_ids:
            raise UsageError(
                f"a {grammar.name} for the output needs a model with an end-of-sequence token, and this one has none"
            )
        key = grammar, eos_ids
        with self._lock:
            lexer = self._least_used(self._compiled.get(key, []))
        if lexer is None:
            lexer = self._compile(grammar, specification(grammar), eos_ids)
        with self._lock:
            lexers = self._compiled.setdefault(key, [])
            if lexer not in lexers:
                lexers.append(lexer)
            self._compiled.move_to_end(key)
            while len(self._compiled) > 1 and sum(map(len, self._compiled.values())) > MAX_CACHED:
                self._compiled.popitem(last=False)
            return lexer.matcher(grammar, eos_ids)

    def kept_matcher(self, grammar: Grammar, eos_ids: frozenset[int]) -> Matcher | None:
        """A matcher of a grammar that is compiled, however many completions follow it; None if it is not.

        Takes microseconds.
        """
        with self._lock:
            lexers = self._compiled.get((grammar, eos_ids))
            if not lexers:
                return None
            self._compiled.move_to_end((grammar, eos_ids))
            return min(lexers, key=lambda lexer: len(lexer.matchers)).matcher(grammar, eos_ids)

    @staticmethod
    def _least_used(lexers: Sequence[_Lexer]) -> _Lexer | None:
        """The lexer for another completion; None if a new one is wanted."""
        found = min(lexers, key=lambda lexer: len(lexer.matchers), default=None)
        if found is None or len(found.matchers) < MATCHERS_PER_LEXER:
            return found
        may_have_more = len(lexers) < thread_count() and found.seconds < QUICK_SECONDS
        return None if may_have_more else found

    def _compile(self, grammar: Grammar, text: str, eos_ids: frozenset[int]) -> _Lexer:
        """A lexer whose ``LLMatcher`` has computed its first mask, so that its copies share that work."""
        import llguidance

        with self._reading:
            vocabulary = self._vocabularies.get(eos_ids)
            if vocabulary is None:
                vocabulary = _vocabulary(self._tokenizer, self._vocab_size, eos_ids)
                if len(self._vocabularies) >= MAX_VOCABULARIES:
                    self._drop_vocabulary(next(iter(self._vocabularies)))
                self._vocabularies[eos_ids] = vocabulary
            self._num_lexers += 1
            number = self._num_lexers
        limits, start = llguidance.LLParserLimits(**LIMITS), time.perf_counter()
        with library_errors(f"the {grammar.name} cannot be followed by this model", UsageError):
            matcher = llguidance.LLMatcher(vocabulary, text, log_level=0, limits=limits)
            if not matcher.is_error() and not _can_begin(matcher, eos_ids):
                raise UsageError(_message(grammar, None))
        if matcher.is_error():
            raise UsageError(_message(grammar, matcher))
        return _Lexer(matcher, number, time.perf_counter() - start)

    def _drop_vocabulary(self, eos_ids: frozenset[int]) -> None:
        """Drop a vocabulary, and the lexers that hold it."""
        del self._vocabularies[eos_ids]
        with self._lock:
            for key in [key for key in self._compiled if key[1] == eos_ids]:
                del self._compiled[key]


def _can_begin(matcher: Any, eos_ids: Collection[int]) -> bool:
    """Whether a grammar allows a first token; computes its mask."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
    return matcher.is_accepting() or not set(allowed.tolist()) <= set(eos_ids)


class _TokenTexts:
    """A vocabulary in the form in which llguidance takes one from Python."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], eos_ids: Collection[int]):
        self.tokens = tokens
        self.eos_token_id = min(eos_ids)
        self.special_token_ids = list(eos_ids)
        self._ids = {text: token for token, text in enumerate(tokens) if text}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, prescribed: str) -> list[int]:
        """The longest tokens from left to right, for text that a grammar prescribes.

        The end of the sequence stands for a rest that the vocabulary cannot express.
        """
        text, start = prescribed.encode(), 0
        tokens: list[int] = []
        while start < len(text):
            ends = range(min(start + self._longest, len(text)), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:
                return [*tokens, self.eos_token_id]
            tokens.append(self._ids[text[start:end]])
            start = end
        return tokens


def _vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> Any:
    """An ``LLTokenizer`` of ``vocab_size`` tokens."""
    import llguidance

    ends = sorted(eos_ids)
    if isinstance(tokenizer, CpmTokenizer):  # its decoder joins the texts of single tokens
        texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    elif isinstance(tokenizer, JsonTokenizer):
        with library_errors(f"{tokenizer.source} {_UNSUPPORTED}", UsageError):
            source = tokenizer.to_json()
            decoder = json.loads(source).get("decoder") or {}
            if decoder.get("type") != "Metaspace":
                return llguidance.LLTokenizer(source, n_vocab=vocab_size, eos_token=ends)
        space, special = decoder.get("replacement", "▁"), tokenizer.special_ids
        pieces = [None if token in special else tokenizer.id_to_piece(token) for token in range(len(tokenizer))]
        texts = [(piece or "").replace(space, " ") for piece in pieces]
    else:
        raise UsageError(f"{type(tokenizer).__name__} {_UNSUPPORTED}")
    tokens = [b"" if token in eos_ids else text.encode() for token, text in enumerate(texts)]
    tokens += [b""] * (vocab_size - len(tokens))
    texts_only: Any = _TokenTexts(tokens, eos_ids)
    return llguidance.LLTokenizer(texts_only, eos_token=ends)


def _message(grammar: Grammar, matcher: Any) -> str:
    """Why a matcher takes no more tokens. Where no token is right, the sampler has chosen the end."""
    problem = "" if matcher is None else str(matcher.get_error()).split("\n<")[0].strip()
    if problem in ("", "NoExtensionBias") or "doesn't satisfy the grammar" in problem:
        problem = "no token of the vocabulary can come next: it lacks a character that the output needs"
    return f"the {grammar.name} cannot be followed by this model: {problem}"


@cache
def _executor() -> Any:
    """The threads that compute masks."""
    import llguidance

    return llguidance.LLExecutor(thread_count())
