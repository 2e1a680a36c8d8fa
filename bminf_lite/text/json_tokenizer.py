"""The tokenizer in a ``tokenizer.json``, the file of Hugging Face's ``tokenizers`` library, or in GPT-2's older files.

Its post-processor says which special tokens frame a prompt. The files beside it name special tokens and add others
(:mod:`.tokenizer_settings`). ``chat_template.jinja`` or ``tokenizer_config.json`` holds the chat template, or
``chat_template.json`` in older multimodal folders; a checkpoint may have another one for conversations with tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ..errors import CheckpointError, is_panic, library_errors
from ..files import read_small_file
from .tokenizer import Tokenizer, WholeText, numbered_ids, require_text
from .tokenizer_budget import check_budget, check_tokens
from .tokenizer_classes import GENERIC, LLAMA, TokenizerClass, tokenizer_class
from .tokenizer_pipeline import is_byte_level as has_byte_level
from .tokenizer_pipeline import with_prefix_space, with_tokens, without_added_tokens_beyond
from .tokenizer_settings import TokenizerFiles, TokenizerSettings, read_settings

_NEEDS_SENTENCEPIECE = ("tokenizer.model", "spiece.model")
_NEEDS_CONVERSION = (*_NEEDS_SENTENCEPIECE, "tekken.json", "vocab.json", "vocab.txt")
_BYTE_LEVEL_FILES = ("vocab.json", "merges.txt")
_BYTE_LEVEL_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
_BYTE_LEVEL_MODELS = ("gpt2", "opt")
"""The models whose ``vocab.json`` and ``merges.txt`` are GPT-2's kind where no file names the tokenizer's class."""
_DEFAULT, _TOOL_USE = "default", "tool_use"
_TEMPLATE_FILES = {_DEFAULT: "chat_template.jinja", _TOOL_USE: "additional_chat_templates/tool_use.jinja"}
_PROCESSOR_TEMPLATE = "chat_template.json"
NO_TEXTS: Mapping[str, str] = MappingProxyType({})
_ANY_TEXT = "It has 2 words, or more.\n"
"""What every tokenizer must take without a panic of the library; it need not have tokens for it."""
_QUOTED = 40
"""Characters of a text that a message quotes."""
LONG_TEXT = 4096
"""Characters, or tokens, from which the library is called so that it leaves the interpreter's lock to other threads.

For a single text it keeps the lock, 5 s for 4 MB; for a list of texts it does not.
"""


class JsonTokenizer(Tokenizer):
    """A tokenizer of the ``tokenizers`` library.

    ``special_tokens`` are the texts of its special tokens by name, of which ``bos_token`` and ``eos_token`` mean the
    same everywhere. ``adds_bos`` and ``adds_eos`` frame a prompt if the library's tokenizer adds no tokens itself.
    ``repeated`` are ids of tokens that the backend does not have, each with the id of the token that has its text.
    ``source`` is the file of the backend.
    """

    FILE: ClassVar[str] = "tokenizer.json"

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] = NO_TEXTS,
        chat_templates: Mapping[str, str] = NO_TEXTS,
        adds_bos: bool = False,
        adds_eos: bool = False,
        repeated: Mapping[int, int] = MappingProxyType({}),
        source: object = FILE,
    ):
        super().__init__()
        # The settings of training, which a tokenizer.json may carry, would silently cut or pad prompts.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.source = source
        self.special_tokens = special_tokens
        self.bos_token = special_tokens.get("bos_token") or None
        self.eos_token = special_tokens.get("eos_token") or None
        self.chat_template = chat_templates.get(_DEFAULT)
        self.tool_chat_template = chat_templates.get(_TOOL_USE, self.chat_template)
        self.bos_id = None if self.bos_token is None else backend.token_to_id(self.bos_token)
        eos_id = None if self.eos_token is None else backend.token_to_id(self.eos_token)
        self.eos_ids = frozenset() if eos_id is None else frozenset([eos_id])
        frames = backend.num_special_tokens_to_add(is_pair=False) == 0
        self._prefix_ids = [self.bos_id] if frames and adds_bos and self.bos_id is not None else []
        self._suffix_ids = [eos_id] if frames and adds_eos and eos_id is not None else []
        added = backend.get_added_tokens_decoder()
        special_ids = {i for i, token in added.items() if token.special}
        self.special_ids = frozenset(special_ids | {i for i, same in repeated.items() if same in special_ids})
        self.added_texts = frozenset(token.content for token in added.values())
        self._repeated = repeated
        vocabulary = backend.get_vocab(with_added_tokens=True)
        check_tokens(vocabulary, source)
        self._size = 1 + max([*vocabulary.values(), *repeated], default=-1)
        self.sentinels = numbered_ids("<extra_id_{}>", backend.token_to_id)  # T5's
        decoder = backend.decoder
        decoder_json = b"" if decoder is None else decoder.__getstate__()
        self.byte_fallback = b'"ByteFallback"' in decoder_json
        self.byte_level = b'"ByteLevel"' in decoder_json

    @classmethod
    def load(cls, folder: Path, vocab_size: int) -> JsonTokenizer:
        """See :func:`.checkpoint_files.load_tokenizer`."""
        files = _read_files(folder)
        backend, has_pipeline = _load_backend(folder), (folder / cls.FILE).is_file()
        config = _read_json(folder / "config.json")
        declared = files.config.get("tokenizer_class") or config.get("tokenizer_class")
        kind = tokenizer_class(config.get("model_type"), declared)
        if kind is GENERIC and not has_pipeline:
            kind = tokenizer_class(None, _BYTE_LEVEL_CLASSES[0])
        settings = _settings(files, backend, kind, has_pipeline)
        source = folder / (cls.FILE if has_pipeline else _BYTE_LEVEL_FILES[0])
        return cls._make(backend, settings, _chat_templates(folder, files.config), source, vocab_size)

    @classmethod
    def from_texts(cls, texts: Mapping[str, str], path: Path, vocab_size: int) -> JsonTokenizer:
        """A tokenizer from the texts of ``tokenizer.json`` and ``tokenizer_config.json``, which came from ``path``."""
        check_budget(texts["tokenizer.json"].encode(errors="replace"), path)
        with library_errors(f"{path}: holds a vocabulary that the tokenizers library cannot read"):
            backend = tokenizers.Tokenizer.from_str(texts["tokenizer.json"])
        config = json.loads(texts["tokenizer_config.json"])
        settings = _settings(TokenizerFiles(path, config, {}, {}), backend, GENERIC, has_pipeline=True)
        return cls._make(backend, settings, _named_templates(config, path), path, vocab_size)

    @classmethod
    def _make(
        cls,
        backend: tokenizers.Tokenizer,
        settings: TokenizerSettings,
        templates: Mapping[str, str],
        source: Path,
        vocab_size: int,
    ) -> JsonTokenizer:
        """Apply the settings, and check that special tokens are in the vocabulary, and that it fits the embedding.

        Added tokens without a row in the embedding are left out: a text model may have the tokenizer of a multimodal
        one (Gemma 3 1B), or a token for padding that was added later.
        """
        special = settings.special_tokens
        with library_errors(f"{source} cannot be used with the files beside it"):
            backend = with_tokens(backend, settings.stated, settings.further, vocab_size)
            if settings.prefix_space is not None:
                backend = with_prefix_space(backend, settings.prefix_space, settings.is_legacy)
        framing = {name: text for name in ("bos_token", "eos_token") if (text := special.get(name))}
        problems = [
            f"{name} {text!r} is not in the tokenizer's vocabulary"
            for name, text in framing.items()
            if backend.token_to_id(text) is None
        ]
        used = max(backend.get_vocab(with_added_tokens=False).values(), default=-1)
        if used < vocab_size <= max(backend.get_added_tokens_decoder(), default=-1):
            with library_errors(f"{source} cannot be used without the tokens that have no row in the embedding"):
                backend = without_added_tokens_beyond(backend, vocab_size, framing.values())
        backend.encode_special_tokens = settings.splits_special_tokens
        repeated = settings.repeated_tokens
        tokenizer = cls(backend, special, templates, settings.adds_bos, settings.adds_eos, repeated, source)
        if len(tokenizer) > vocab_size:
            problems.append(
                f"the tokenizer has ids up to {len(tokenizer) - 1}, but the embedding only {vocab_size} rows; "
                "the tokenizer files must be those of this checkpoint"
            )
        if problems:
            raise CheckpointError(f"{source}: {'; '.join(problems)}")
        try:
            tokenizer.encode(_ANY_TEXT)
        except CheckpointError as error:
            if is_panic(error.__cause__):
                raise
        return tokenizer

    def __len__(self) -> int:
        return self._size

    def id_to_piece(self, token_id: int) -> str | None:
        return self._backend.id_to_token(self._repeated.get(token_id, token_id))

    def piece_to_id(self, piece: str) -> int | None:
        return self._backend.token_to_id(piece)

    def to_json(self) -> str:
        """The tokenizer as the text of a ``tokenizer.json``."""
        return self._backend.to_str()

    def encode_spans(self, parts: Sequence[str]) -> list[int]:
        spans = [self.id_to_piece(i) or "" for i in self.sentinels[: len(parts) - 1]]
        return self.encode("".join(text for pair in zip(parts, [*spans, ""], strict=True) for text in pair))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with library_errors(f"{self.source} cannot turn {_quoted(text)} into tokens"):
            if len(text) > LONG_TEXT:
                [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            else:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
        return [*self._prefix_ids, *ids, *self._suffix_ids] if add_special_tokens else ids

    def encode_whole(self, texts: Sequence[tuple[str, ...]], longest: int) -> list[WholeText]:
        for text in (text for parts in texts for text in parts):
            require_text(text, "text")
        with library_errors(f"{self.source} cannot turn the texts into tokens"):
            if len(texts) == 1 and (whole := self._framed_at_once(texts[0], longest)) is not None:
                return [whole]
            flat = [text for parts in texts for text in parts]
            encodings = iter(self._backend.encode_batch(flat, add_special_tokens=False))
            return [self._framed([next(encodings) for _ in parts], longest) for parts in texts]

    def _framed_at_once(self, parts: tuple[str, ...], longest: int) -> WholeText | None:
        """One text or a pair of texts, framed, by one call of the library; None for what has to be cut.

        A single short text gets its tokens in half the time.
        """
        if sum(map(len, parts)) > LONG_TEXT:
            return None
        framed = self._backend.encode(parts[0], parts[1] if len(parts) == 2 else None)
        own = len(self._prefix_ids) + len(self._suffix_ids)
        return None if len(framed) + own > longest else self._whole(framed)

    def _framed(self, encodings: list[Any], longest: int) -> WholeText:
        """One text or a pair of texts, cut and framed."""
        is_pair = len(encodings) == 2
        own = len(self._prefix_ids) + len(self._suffix_ids)
        room = max(longest - own - self._backend.num_special_tokens_to_add(is_pair), 1)
        lengths = kept_lengths([len(encoding) for encoding in encodings], room)
        num_cut = sum(len(encoding) for encoding in encodings) - sum(lengths)
        for encoding, length in zip(encodings, lengths, strict=True):
            encoding.truncate(length)
        return self._whole(self._backend.post_process(encodings[0], encodings[1] if is_pair else None), num_cut)

    def _whole(self, framed: Any, num_cut: int = 0) -> WholeText:
        """What the library has framed, with the tokens that it does not put around a text."""
        types = framed.type_ids if any(framed.type_ids) else None
        if not self._prefix_ids and not self._suffix_ids:
            return WholeText(framed.ids, types, framed.offsets, num_cut)
        empty = (0, 0)
        offsets = [empty] * len(self._prefix_ids) + framed.offsets + [empty] * len(self._suffix_ids)
        types = types and [0] * len(self._prefix_ids) + types + types[-1:] * len(self._suffix_ids)
        return WholeText([*self._prefix_ids, *framed.ids, *self._suffix_ids], types, offsets, num_cut)

    def _decode(self, ids: list[int]) -> str:
        # Not the library's own skipping: from version 0.23.1 on it leaves out added tokens that are normalized.
        visible = [i for i in ids if i not in self.special_ids]
        if self._repeated:
            visible = [self._repeated.get(i, i) for i in visible]
        try:  # entering a context manager takes as long as decoding a token
            if len(visible) > LONG_TEXT:
                return self._backend.decode_batch([visible], skip_special_tokens=False)[0]
            return self._backend.decode(visible, skip_special_tokens=False)
        except BaseException:
            with library_errors(f"{self.source} cannot turn these tokens into text"):
                raise


def kept_lengths(lengths: Sequence[int], room: int) -> list[int]:
    """How many tokens of each text stay, so that all have ``room``: the longest is cut first."""
    kept = list(lengths)
    while (excess := sum(kept) - room) > 0:
        longest = max(range(len(kept)), key=lambda i: kept[i])
        others = [n for i, n in enumerate(kept) if i != longest]
        step = max(min(excess, kept[longest] - max(others, default=0)), 1)
        kept[longest] -= step
    return kept


def _quoted(text: str) -> str:
    return repr(text) if len(text) <= _QUOTED else f"{text[:_QUOTED]!r}..."


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / JsonTokenizer.FILE
    if not path.is_file() and is_byte_level(folder):
        return _byte_level_backend(folder)
    if not path.is_file():
        other = next((name for name in _NEEDS_CONVERSION if (folder / name).is_file()), None)
        if other is None:
            raise CheckpointError(
                f"{folder} has no tokenizer.json, which text needs (token ids work without). Copy tokenizer.json and "
                "tokenizer_config.json from where the checkpoint came from"
            )
        if other == "vocab.json" and not (folder / "merges.txt").is_file():
            raise CheckpointError(
                f"{folder} has vocab.json but neither merges.txt nor tokenizer.json, which text needs (token ids work "
                "without). Copy tokenizer.json, or merges.txt, from where the checkpoint came from"
            )
        needed = "transformers and sentencepiece are" if other in _NEEDS_SENTENCEPIECE else "transformers is"
        raise CheckpointError(
            f"{folder} has {other} but no tokenizer.json, which text needs (token ids work without). Convert it where "
            f'{needed} installed: python -c "from transformers import AutoTokenizer; '
            f'AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"'
        )
    try:
        content = read_small_file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    check_budget(content, path)
    with library_errors(f"{path} is not a tokenizer that the tokenizers library can read"):
        return tokenizers.Tokenizer.from_buffer(content)  # not from_file: its paths must be UTF-8


def is_byte_level(folder: Path) -> bool:
    """Whether ``folder`` has ``vocab.json`` and ``merges.txt`` of GPT-2's tokenizer, and says that they are."""
    if not all((folder / name).is_file() for name in _BYTE_LEVEL_FILES):
        return False
    name = _read_json(folder / "tokenizer_config.json").get("tokenizer_class")
    if name is None:
        return _read_json(folder / "config.json").get("model_type") in _BYTE_LEVEL_MODELS
    return name in _BYTE_LEVEL_CLASSES


def _byte_level_backend(folder: Path) -> tokenizers.Tokenizer:
    """GPT-2's tokenizer, whose pieces are strings of bytes, from ``vocab.json`` and ``merges.txt``."""
    with library_errors(f"{folder}: vocab.json and merges.txt are no tokenizer that the tokenizers library can read"):
        backend = tokenizers.Tokenizer(models.BPE.from_file(*(str(folder / name) for name in _BYTE_LEVEL_FILES)))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    return backend


def _read_files(folder: Path) -> TokenizerFiles:
    """The files beside ``tokenizer.json``."""
    names = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    return TokenizerFiles(folder, *(_read_json(folder / name) for name in names))


def _settings(
    files: TokenizerFiles, backend: tokenizers.Tokenizer, kind: TokenizerClass, has_pipeline: bool
) -> TokenizerSettings:
    """The settings in the files for a backend. A byte-level pipeline is never that of LLaMA's class."""
    if kind is LLAMA and has_byte_level(backend):
        kind = TokenizerClass(frames=True)
    with library_errors(f"{files.folder}: a special token cannot be used"):
        return read_settings(files, backend, kind, has_pipeline)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file does not exist."""
    try:
        value = json.loads(read_small_file(path).decode())
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} cannot be read as JSON: {e}") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, but holds {type(value).__name__}")
    return value


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by name: those in files of their own, else those in the configuration, else a processor's."""
    files = {name: _read_text(folder / file) for name, file in _TEMPLATE_FILES.items()}
    templates = {name: text for name, text in files.items() if text is not None}
    if templates or config.get("chat_template") is not None:
        return templates or _named_templates(config, folder / "tokenizer_config.json")
    return _named_templates(_read_json(folder / _PROCESSOR_TEMPLATE), folder / _PROCESSOR_TEMPLATE)


def _read_text(path: Path) -> str | None:
    """The text of a file; ``None`` if it does not exist."""
    try:
        return read_small_file(path).decode()
    except FileNotFoundError:
        return None
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise CheckpointError(f"{path} cannot be read as text: {e}") from e


def _named_templates(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """The configuration's ``chat_template``, which is a text or a list of named texts."""
    value = config.get("chat_template")
    if isinstance(value, list) and all(isinstance(t, dict) for t in value):
        templates = {t.get("name"): t.get("template") for t in value}
        templates = {name: templates.get(name) for name in (_DEFAULT, _TOOL_USE)}
    else:
        templates = {_DEFAULT: value}
    wrong = [text for text in templates.values() if text is not None and not isinstance(text, str)]
    if wrong:
        raise CheckpointError(f"{path}: chat_template must be text or named texts")
    return {name: text for name, text in templates.items() if text is not None}
