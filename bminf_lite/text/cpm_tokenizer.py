"""The tokenizers of CPM-1, CPM-2 and EVA: jieba cuts Chinese text into words, which the model's vocabulary encodes.

- The vocabularies have no space and no line break. ``▂`` (U+2582) and ``▃`` (U+2583) stand for them.
- CPM-1 gives the words to a sentencepiece model, ``chinese_vocab.model``.
- CPM-2 and EVA have a word list, ``vocab.txt``, and cut a word into the longest entries from left to right. A character
  without an entry is ``<unk>``. Before that, CPM-2 makes full-width characters half-width, except for Chinese
  punctuation, and EVA makes punctuation ASCII.

``decode(encode(text))`` returns the text, except for unknown and normalised characters.
``tokenizer_class`` in ``tokenizer_config.json`` names the tokenizer of a checkpoint. The tokenizers need the packages
of the extra ``cpm``: ``pip install 'bminf-lite[cpm]'``.
"""

from __future__ import annotations

import re
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from ..errors import CheckpointError
from ..files import read_small_file
from .tokenizer import Tokenizer, numbered_ids

SPACES = str.maketrans(" \n", "\u2582\u2583")
SPACES_BACK = str.maketrans("\u2582\u2583", " \n")
WORD_START = "\u2581"
"""Sentencepiece puts it before a word."""

SPECIAL = re.compile(r"<(?:unk|s|/s|cls|sep|pad|mask|go|eod|s_\d+)>")
MAX_WORD = 200
"""A longer word is one ``<unk>``, as in the published tokenizers."""

WIDTH = 0xFEE0
"""A full-width character's code point minus that of its ASCII form."""

KEPT = "，！（）？；："
FULL_WIDTH = {0x3000: " ", **{c: chr(c - WIDTH) for c in range(0xFF01, 0xFF5F) if chr(c) not in KEPT}}
PUNCTUATION = {
    **{c: chr(c - WIDTH) for c in range(0xFF01, 0xFF5F) if not chr(c - WIDTH).isalnum() and chr(c) != "．"},
    **dict.fromkeys(map(ord, "〝〞“”‟"), '"'),
    **dict.fromkeys(map(ord, "‘’‛"), "'"),
    ord("…"): "...",
}


class CpmTokenizer(Tokenizer):
    """The base of the three: words, special tokens and sentinels. ``pieces`` is the vocabulary, in the order of ids."""

    NAME: ClassVar[str]
    FILE: ClassVar[str]
    END: ClassVar[str]

    def __init__(self, pieces: Sequence[str]):
        super().__init__()
        self.pieces = list(pieces)
        self.ids = {piece: i for i, piece in enumerate(pieces)}
        missing = [token for token in ("<unk>", self.END) if token not in self.ids]
        if missing:
            raise CheckpointError(f"the vocabulary has no {' and no '.join(missing)}; it is not that of {self.NAME}")
        self.unk_id = self.ids["<unk>"]
        self.eos_token = self.END
        self.special_tokens = {"eos_token": self.END}
        self.eos_ids = frozenset([self.ids[self.END]])
        self.special_ids = frozenset(i for i, piece in enumerate(self.pieces) if SPECIAL.fullmatch(piece))
        self.sentinels = numbered_ids("<s_{}>", self.ids.get)

    @classmethod
    def load(cls, folder: Path, vocab_size: int) -> CpmTokenizer:
        """See :func:`.checkpoint_files.load_tokenizer`. A missing package is a ``CheckpointError`` too."""
        path = folder / cls.FILE
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
        """Read the vocabulary file :attr:`FILE`."""

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

    def piece_to_id(self, piece: str) -> int | None:
        return self.ids.get(piece)

    def normalize(self, text: str) -> str:
        """The text in the characters of the vocabulary."""
        return text

    @abstractmethod
    def words_to_ids(self, words: Iterable[str]) -> list[int]:
        """The ids of consecutive words."""

    def suffix_token_ids(self) -> tuple[int, ...]:
        """The tokens at the end of a text that the model continues."""
        return ()


class Cpm1Tokenizer(CpmTokenizer):
    """CPM-1: a sentencepiece model encodes the words, joined by spaces."""

    NAME, FILE, END = "CPM-1", "chinese_vocab.model", "<eod>"

    def __init__(self, pieces: Sequence[str], encode: Callable[[str], list[int]]):
        super().__init__(pieces)
        self._sentencepiece = encode

    @classmethod
    def read(cls, path: Path) -> Cpm1Tokenizer:
        sentencepiece = import_extra("sentencepiece")
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=read_small_file(path))
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"is not a sentencepiece model: {error}") from error
        return cls([processor.id_to_piece(i) for i in range(processor.get_piece_size())], processor.encode)

    def words_to_ids(self, words: Iterable[str]) -> list[int]:
        return self._sentencepiece(" ".join(words))

    def _decode(self, ids: list[int]) -> str:
        return super()._decode(ids).replace(WORD_START, "")


class WordListTokenizer(CpmTokenizer):
    """Cuts words into the longest entries of a word list, from left to right."""

    FILE = "vocab.txt"

    def __init__(self, pieces: Sequence[str]):
        super().__init__(pieces)
        self._longest = max(map(len, pieces), default=1)
        if not self.sentinels:
            raise CheckpointError(f"the vocabulary has no <s_0>; it is not that of {self.NAME}")

    @classmethod
    def read(cls, path: Path) -> WordListTokenizer:
        try:
            lines = read_small_file(path).decode("utf-8").replace("\r\n", "\n").removesuffix("\n").split("\n")
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
    """CPM-2: a text to continue ends with the last sentinel, and the continuation begins with it."""

    NAME, END = "CPM-2", "<eod>"

    def __init__(self, pieces: Sequence[str]):
        super().__init__(pieces)
        self.target_ids = (self.sentinels[-1],)

    def normalize(self, text: str) -> str:
        return text.translate(FULL_WIDTH)

    def suffix_token_ids(self) -> tuple[int, ...]:
        return self.target_ids


class EvaTokenizer(WordListTokenizer):
    """EVA: each utterance ends with ``<sep>``, and a dialogue to continue ends with ``<s_0>``."""

    NAME, END = "EVA", "<sep>"
    answers_dialogues = True

    def normalize(self, text: str) -> str:
        return text.translate(PUNCTUATION)

    def suffix_token_ids(self) -> tuple[int, ...]:
        return (self.ids[self.END], self.sentinels[0])

    def encode_turns(self, turns: Sequence[str], longest: int) -> list[int]:
        """The last utterances that fit into ``longest`` tokens together, and one at least."""
        separator = self.ids[self.END]
        ids = self.encode(turns[-1])
        for turn in reversed(turns[:-1]):
            if len(turn) > longest * self._longest:  # it need not be tokenized to tell
                break
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
"""Tokenizers by the ``tokenizer_class`` of ``tokenizer_config.json``."""


def split_words(text: str) -> Iterator[str]:
    """The words of a text, and the spaces and punctuation between them."""
    words: Iterator[str] = segmenter().cut(text)
    return words


@lru_cache(maxsize=1)
def segmenter() -> Any:
    """jieba, with its dictionary read from the package itself.

    By default jieba caches the dictionary in the shared temporary folder, from where it would load a file that another
    user wrote.
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
            warnings.simplefilter("ignore")  # jieba's source has invalid escapes, and it tries to import pkg_resources
            return __import__(package)
    except ImportError as error:
        raise CheckpointError(
            f"this checkpoint's tokenizer needs the package {package}: pip install 'bminf-lite[cpm]'. Token ids work "
            "without it"
        ) from error
