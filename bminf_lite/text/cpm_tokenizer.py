"""The tokenizers of CPM-1, CPM-2 and EVA: Chinese words by jieba, then the model's own vocabulary.

No vocabulary has a token for a space or a line break as such: they are the words ``▂`` (U+2582) and ``▃`` (U+2583).
CPM-1 gives the words to a sentencepiece model, ``chinese_vocab.model``. CPM-2 and EVA have a word list, ``vocab.txt``,
and take the longest entry that a word begins with, again and again; a character that no entry has is ``<unk>``. Before
that, CPM-2 makes full-width characters half-width except for Chinese punctuation, and EVA all punctuation ASCII. What
a vocabulary cannot express, and what was normalised, is lost; everything else comes back from :meth:`decode` as it was.

``tokenizer_class`` in ``tokenizer_config.json`` says which of them a checkpoint has. They need the packages of the
extra ``cpm``: ``pip install 'bminf-lite[cpm]'``.
"""

from __future__ import annotations

import json
import re
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from ..errors import CheckpointError
from .tokenizer import Tokenizer

SPACES = str.maketrans(" \n", "\u2582\u2583")
SPACES_BACK = str.maketrans("\u2582\u2583", " \n")
WORD_START = "\u2581"
"""What sentencepiece puts before a word."""

SPECIAL = re.compile(r"<(?:unk|s|/s|cls|sep|pad|mask|go|eod|s_\d+)>")
MAX_WORD = 200
"""Longer words are one ``<unk>``, as the published tokenizers have it."""

WIDTH = 0xFEE0
"""From a full-width character to its ASCII form."""

KEPT = "，！（）？；："
FULL_WIDTH = {0x3000: " ", **{c: chr(c - WIDTH) for c in range(0xFF01, 0xFF5F) if chr(c) not in KEPT}}
PUNCTUATION = {
    **{c: chr(c - WIDTH) for c in range(0xFF01, 0xFF5F) if not chr(c - WIDTH).isalnum() and chr(c) != "．"},
    **dict.fromkeys(map(ord, "〝〞“”‟"), '"'),
    **dict.fromkeys(map(ord, "‘’‛"), "'"),
    ord("…"): "...",
}


class CpmTokenizer(Tokenizer):
    """What the three share. ``pieces`` are the vocabulary's entries by id."""

    NAME: ClassVar[str]
    FILE: ClassVar[str]
    END: ClassVar[str]

    def __init__(self, pieces: Sequence[str]):
        self.pieces = list(pieces)
        self.ids = {piece: i for i, piece in enumerate(pieces)}
        missing = [token for token in ("<unk>", self.END) if token not in self.ids]
        if missing:
            raise CheckpointError(f"the vocabulary has no {' and no '.join(missing)}; it is not that of {self.NAME}")
        self.unk_id = self.ids["<unk>"]
        self.eos_token = self.END
        self.eos_ids = frozenset([self.ids[self.END]])
        self.special_ids = frozenset(i for i, piece in enumerate(self.pieces) if SPECIAL.fullmatch(piece))
        self.sentinels = list(self._sentinels())

    @classmethod
    def load(cls, folder: str | Path, vocab_size: int) -> CpmTokenizer:
        """See :meth:`.Tokenizer.load`; a package that is not installed is a ``CheckpointError`` too."""
        path = Path(folder) / cls.FILE
        if not path.is_file():
            raise CheckpointError(f"{folder} has no {cls.FILE}, which text needs (token ids work without)")
        try:
            tokenizer = cls.read(path)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        if len(tokenizer) > vocab_size:
            raise CheckpointError(
                f"{path}: has {len(tokenizer):,} entries, but the embedding only {vocab_size:,} rows; "
                "the vocabulary must be that of this checkpoint"
            )
        return tokenizer

    @classmethod
    @abstractmethod
    def read(cls, path: Path) -> CpmTokenizer:
        """Read a vocabulary file."""

    def __len__(self) -> int:
        return len(self.pieces)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = self.words_to_ids(word.translate(SPACES) for word in split_words(self.normalize(text)))
        return [*ids, *self.suffix_token_ids()] if add_special_tokens else ids

    def _decode(self, ids: list[int]) -> str:
        pieces = (self.pieces[i] for i in ids if i < len(self.pieces) and i not in self.special_ids)
        return "".join(pieces).translate(SPACES_BACK)

    def encode_spans(self, parts: Sequence[str]) -> list[int]:
        ids = self.encode(parts[0], add_special_tokens=False)
        for sentinel, part in zip(self.sentinels, parts[1:], strict=False):
            ids += [sentinel, *self.encode(part, add_special_tokens=False)]
        return ids

    def id_to_piece(self, token_id: int) -> str | None:
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else None

    def normalize(self, text: str) -> str:
        """The text as the vocabulary knows it."""
        return text

    @abstractmethod
    def words_to_ids(self, words: Iterable[str]) -> list[int]:
        """The ids of words that follow each other."""

    def suffix_token_ids(self) -> tuple[int, ...]:
        """What follows a text that the model is to go on with."""
        return ()

    def _sentinels(self) -> Iterator[int]:
        """The ids of ``<s_0>``, ``<s_1>``, ..., as far as the vocabulary has them."""
        number = 0
        while f"<s_{number}>" in self.ids:
            yield self.ids[f"<s_{number}>"]
            number += 1


class Cpm1Tokenizer(CpmTokenizer):
    """CPM-1: the words, each after a space, go to a sentencepiece model."""

    NAME, FILE, END = "CPM-1", "chinese_vocab.model", "<eod>"

    def __init__(self, pieces: Sequence[str], encode: Callable[[str], list[int]]):
        super().__init__(pieces)
        self._sentencepiece = encode

    @classmethod
    def read(cls, path: Path) -> Cpm1Tokenizer:
        sentencepiece = import_extra("sentencepiece")
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"is not a sentencepiece model: {error}") from error
        return cls([processor.id_to_piece(i) for i in range(processor.get_piece_size())], processor.encode)

    def words_to_ids(self, words: Iterable[str]) -> list[int]:
        return self._sentencepiece(" ".join(words))

    def _decode(self, ids: list[int]) -> str:
        return super()._decode(ids).replace(WORD_START, "")


class WordListTokenizer(CpmTokenizer):
    """Words are cut into the longest entries of a word list, from left to right."""

    FILE = "vocab.txt"

    def __init__(self, pieces: Sequence[str]):
        super().__init__(pieces)
        self._longest = max(map(len, pieces), default=1)
        if not self.sentinels:
            raise CheckpointError(f"the vocabulary has no <s_0>; it is not that of {self.NAME}")

    @classmethod
    def read(cls, path: Path) -> WordListTokenizer:
        try:
            lines = path.read_bytes().decode("utf-8").replace("\r\n", "\n").removesuffix("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot be read: {error}") from error
        return cls([line.strip() for line in lines])

    def words_to_ids(self, words: Iterable[str]) -> list[int]:
        return [i for word in words for i in (self._longest_entries(word) if len(word) <= MAX_WORD else [self.unk_id])]

    def _longest_entries(self, word: str) -> Iterator[int]:
        start = 0
        while start < len(word):
            for end in range(min(len(word), start + self._longest), start, -1):
                if (found := self.ids.get(word[start:end])) is not None:
                    yield found
                    start = end
                    break
            else:
                yield self.unk_id
                start += 1


class Cpm2Tokenizer(WordListTokenizer):
    """CPM-2. A text to go on with ends in the last sentinel, and its continuation begins with that."""

    NAME, END = "CPM-2", "<eod>"

    def __init__(self, pieces: Sequence[str]):
        super().__init__(pieces)
        self.target_ids = (self.sentinels[-1],)

    def normalize(self, text: str) -> str:
        return text.translate(FULL_WIDTH)

    def suffix_token_ids(self) -> tuple[int, ...]:
        return self.target_ids


class EvaTokenizer(WordListTokenizer):
    """EVA. Each utterance ends in ``<sep>``, and a dialogue to go on with in ``<s_0>``."""

    NAME, END = "EVA", "<sep>"

    def normalize(self, text: str) -> str:
        return text.translate(PUNCTUATION)

    def suffix_token_ids(self) -> tuple[int, ...]:
        return (self.ids[self.END], self.sentinels[0])

    def encode_turns(self, turns: Sequence[str], longest: int) -> list[int]:
        """The last of the utterances that fit into ``longest`` tokens, one at least."""
        separator = self.ids[self.END]
        ids = self.encode(turns[-1])
        for turn in reversed(turns[:-1]):
            before = [*self.encode(turn, add_special_tokens=False), separator]
            if len(before) + len(ids) > longest:
                break
            ids = before + ids
        return ids


CLASSES: dict[str, type[CpmTokenizer]] = {
    "CPM1Tokenizer": Cpm1Tokenizer,
    "CPM2Tokenizer": Cpm2Tokenizer,
    "EVATokenizer": EvaTokenizer,
}
"""By the ``tokenizer_class`` of ``tokenizer_config.json``."""


def find_tokenizer_class(folder: Path) -> type[CpmTokenizer] | None:
    """The tokenizer that the checkpoint in ``folder`` says it has, if it is one of these."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    name = config.get("tokenizer_class") if isinstance(config, dict) else None
    return CLASSES.get(name) if isinstance(name, str) else None


def split_words(text: str) -> Iterator[str]:
    """The words of a text, with the spaces and punctuation between them."""
    return segmenter().cut(text)


@lru_cache(maxsize=1)
def segmenter() -> Any:
    """jieba, with its dictionary read from the package itself.

    By default it keeps the dictionary in a file of the common temporary folder, and would run what another user put
    there.
    """
    jieba = import_extra("jieba")
    result = jieba.Tokenizer()
    result.FREQ, result.total = result.gen_pfdict(result.get_dict_file())
    result.initialized = True
    return result


def import_extra(package: str) -> Any:
    """A package of the extra ``cpm``; ``CheckpointError`` if it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in jieba's source, and about the pkg_resources it looks for
            return __import__(package)
    except ImportError as error:
        raise CheckpointError(
            f"this checkpoint's tokenizer needs the package {package}: pip install 'bminf-lite[cpm]'. Token ids work "
            "without it"
        ) from error
