"""Text to token ids and back, by the files beside a checkpoint.

:class:`Tokenizer` is what the engine asks of one, and finds the one that a checkpoint has. Most have a
``tokenizer.json`` for the ``tokenizers`` library (:class:`JsonTokenizer`), whose post-processor says which special
tokens frame a prompt; ``tokenizer_config.json`` and ``special_tokens_map.json`` name the special tokens and hold the
chat template. Chinese models of the CPM family have vocabularies of their own (:mod:`.cpm_tokenizer`). A model runs
without any of them as long as it is given token ids.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import CheckpointError, UsageError

_NEEDS_CONVERSION = ("tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "vocab.txt")


class Tokenizer(ABC):
    """A checkpoint's tokenizer.

    ``bos_token`` and ``eos_token`` are the texts of the special tokens, ``bos_id`` and ``eos_ids`` their ids,
    ``special_ids`` those of all tokens without text, ``chat_template`` the source of the checkpoint's chat template;
    each is ``None`` (or empty) if there is none. ``byte_fallback`` says whether tokens such as ``<0xE2>`` stand for
    single bytes. ``sentinels`` are the tokens that stand for missing parts of a text, in their order, and
    ``target_ids`` those that the decoder of an encoder-decoder begins with, after its start token, to go on with a
    framed text.
    """

    bos_token: str | None = None
    eos_token: str | None = None
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    special_ids: frozenset[int] = frozenset()
    chat_template: str | None = None
    byte_fallback: bool = False
    sentinels: Sequence[int] = ()
    target_ids: tuple[int, ...] = ()

    @classmethod
    def load(cls, folder: str | Path, vocab_size: int) -> Tokenizer:
        """Read the tokenizer of the checkpoint in ``folder``, whose embedding has ``vocab_size`` rows.

        Raises ``CheckpointError`` if files are missing or malformed, if a special token is not in the vocabulary, or if
        the vocabulary does not fit the embedding.
        """
        from . import cpm_tokenizer

        folder = Path(folder)
        own = cpm_tokenizer.find_tokenizer_class(folder)
        return JsonTokenizer.load(folder, vocab_size) if own is None else own.load(folder, vocab_size)

    @staticmethod
    def exists(folder: Path) -> bool:
        """Whether :meth:`load` would find something in ``folder``."""
        from . import cpm_tokenizer

        own = cpm_tokenizer.find_tokenizer_class(folder)
        return (folder / ("tokenizer.json" if own is None else own.FILE)).is_file()

    @abstractmethod
    def __len__(self) -> int:
        """One more than the largest token id."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of ``text``; ``add_special_tokens`` frames it as the checkpoint does (a leading ``<s>``, say).

        Raises ``UsageError`` for what is not text, or cannot be written as UTF-8; ``CheckpointError`` for text that
        a vocabulary without bytes and without an unknown token cannot express.
        """
        if not isinstance(text, str):
            raise UsageError(f"a prompt must be text, but is {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise UsageError(
                f"the prompt cannot be encoded: character {e.start} is {text[e.start]!r}, half of a surrogate pair"
            ) from None
        return self._encode(text, add_special_tokens)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids`` without special tokens. Ids that the vocabulary lacks have no text.

        Bytes that are not UTF-8 become U+FFFD. Raises ``UsageError`` for what is no 32-bit id.
        """
        ids = [int(i) for i in ids]
        wrong = [i for i in ids if not 0 <= i < 2**32]
        if wrong:
            raise UsageError(f"token ids must be from 0 to {2**32 - 1}, but one is {wrong[0]}")
        return self._decode(ids)

    @abstractmethod
    def id_to_piece(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; ``None`` for an id that it lacks."""

    @abstractmethod
    def encode_spans(self, parts: Sequence[str]) -> list[int]:
        """The ids of a text whose ``parts`` are separated by missing ones, each of which is a sentinel."""

    def encode_turns(self, turns: Sequence[str], longest: int) -> list[int] | None:
        """The ids of a dialogue, of ``longest`` at most if that can be, whose last utterance is to be answered.

        None from a tokenizer whose model has a chat template for that.
        """
        return None

    @abstractmethod
    def _encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...


class JsonTokenizer(Tokenizer):
    """The tokenizer in a ``tokenizer.json``."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        bos_token: str | None = None,
        eos_token: str | None = None,
        add_bos_token: bool = False,
        chat_template: str | None = None,
    ):
        # a tokenizer.json may carry the settings of its training, which would cut or pad prompts silently
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.chat_template = chat_template
        self.bos_id = None if bos_token is None else backend.token_to_id(bos_token)
        eos_id = None if eos_token is None else backend.token_to_id(eos_token)
        self.eos_ids = frozenset() if eos_id is None else frozenset([eos_id])
        self._prepends_bos = add_bos_token and backend.post_processor is None and self.bos_id is not None
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._size = max(backend.get_vocab_size(with_added_tokens=True), 1 + max(added, default=-1))
        self.sentinels = list(_numbered(backend, "<extra_id_{}>"))
        self.byte_fallback = '"ByteFallback"' in json.dumps(json.loads(backend.to_str()).get("decoder"))

    @classmethod
    def load(cls, folder: str | Path, vocab_size: int) -> JsonTokenizer:
        """See :meth:`Tokenizer.load`."""
        folder = Path(folder)
        backend = _load_backend(folder)
        config = _read_json(folder / "tokenizer_config.json")
        names = {**_read_json(folder / "special_tokens_map.json"), **config}
        special = {name: _token_text(folder, name, names.get(name)) for name in ("bos_token", "eos_token")}
        problems = [
            f"{name} {text!r} is not in the vocabulary of tokenizer.json"
            for name, text in special.items()
            if text is not None and backend.token_to_id(text) is None
        ]
        tokenizer = cls(
            backend,
            **special,
            add_bos_token=config.get("add_bos_token") is True,
            chat_template=_chat_template(folder, config),
        )
        if len(tokenizer) > vocab_size:
            problems.append(
                f"the tokenizer has ids up to {len(tokenizer) - 1}, but the embedding only {vocab_size} rows; "
                "the tokenizer files must be those of this checkpoint"
            )
        if problems:
            raise CheckpointError(f"{folder}: {'; '.join(problems)}")
        return tokenizer

    def __len__(self) -> int:
        return self._size

    def id_to_piece(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id)

    def encode_spans(self, parts: Sequence[str]) -> list[int]:
        spans = [self.id_to_piece(i) or "" for i in self.sentinels[: len(parts) - 1]]
        return self.encode("".join(text for pair in zip(parts, [*spans, ""], strict=True) for text in pair))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with _library_errors("tokenizer.json has no tokens for this prompt"):
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return [self.bos_id, *ids] if add_special_tokens and self._prepends_bos else ids  # type: ignore[list-item]

    def _decode(self, ids: list[int]) -> str:
        with _library_errors("tokenizer.json cannot turn these tokens into text"):
            return self._backend.decode(ids, skip_special_tokens=True)


def _numbered(backend: tokenizers.Tokenizer, form: str) -> Iterator[int]:
    """The ids of T5's ``<extra_id_0>``, ``<extra_id_1>``, ..., as far as the vocabulary has them."""
    for number in count():
        token_id = backend.token_to_id(form.format(number))
        if token_id is None:
            return
        yield token_id


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        other = next((name for name in _NEEDS_CONVERSION if (folder / name).is_file()), None)
        if other is None:
            raise CheckpointError(
                f"{folder} has no tokenizer.json, which text needs (token ids work without). Copy tokenizer.json and "
                "tokenizer_config.json from where the checkpoint came from"
            )
        raise CheckpointError(
            f"{folder} has {other} but no tokenizer.json, which text needs (token ids work without). Convert it where "
            'transformers and sentencepiece are installed: python -c "from transformers import AutoTokenizer; '
            f'AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"'
        )
    with _library_errors(f"{path} is not a tokenizer that the tokenizers library can read"):
        return tokenizers.Tokenizer.from_file(str(path))


@contextmanager
def _library_errors(message: str) -> Iterator[None]:
    """Turn what the tokenizers library raises for a faulty file (``Exception``, or a panic of Rust) into our error."""
    try:
        yield
    except BaseException as e:
        if isinstance(e, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        raise CheckpointError(f"{message}: {e}") from e


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} cannot be read as JSON: {e}") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, but holds {type(value).__name__}")
    return value


def _token_text(folder: Path, name: str, value: Any) -> str | None:
    """The text of a special token, which files give as a string or as an object with its ``content``."""
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        raise CheckpointError(f"{folder}: {name} is {value!r}, but must be text or an object whose content is text")
    return text


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """A ``chat_template.jinja`` file, else the configuration's ``chat_template``, the default if it lists several."""
    path = folder / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        template = config.get("chat_template")
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path} cannot be read as text: {e}") from e
    if isinstance(template, list) and all(isinstance(t, dict) for t in template):
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: chat_template must be text or named texts")
    return template
