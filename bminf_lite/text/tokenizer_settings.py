"""What the files beside ``tokenizer.json`` say of a tokenizer, read as transformers 5 reads them.

- ``tokenizer_config.json`` names special tokens, and ``added_tokens_decoder`` in it lists added tokens with their ids
  and flags. With that list the two older files do not count.
- ``special_tokens_map.json`` names special tokens, before ``tokenizer_config.json``.
- ``added_tokens.json`` maps added tokens to ids. Flags of a token are those in ``tokenizer.json`` if it is there.

transformers gives an added token the next free id, whatever the files say. Here it gets the id that a file states,
because the rows of the embedding follow the files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ..errors import CheckpointError
from ..gguf_files.tokenizer import REPEATED_TOKENS
from .tokenizer_classes import TokenizerClass

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that any tokenizer may have, by the names of their keys."""
MAX_ID = 2**31 - 1
_CONFIG, _ADDED = "tokenizer_config.json", "added_tokens.json"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class TokenizerSettings:
    """What the files say, except for chat templates.

    - ``special_tokens``: texts by name (``bos_token``, ``image_token``, ...). Chat templates may use them.
    - ``stated``: added tokens by the ids that a file states for them.
    - ``further``: special tokens for which no file states an id.
    - ``prefix_space``: begin a text with a space, or None to do as ``tokenizer.json`` says. ``is_legacy``: a pipeline
      of SentencePiece begins each part of a text between special tokens with it, not only the first.
    - ``splits_special_tokens``: text that spells a special token is plain text.
    - ``adds_bos``, ``adds_eos``: frame a prompt where the post-processor does not.
    - ``repeated_tokens``: ids of tokens whose text another token has too, each with the id of that one. A vocabulary of
      GGUF may have such tokens.
    """

    special_tokens: Mapping[str, str]
    stated: Mapping[int, AddedToken]
    further: Sequence[AddedToken]
    prefix_space: bool | None
    is_legacy: bool
    splits_special_tokens: bool
    adds_bos: bool
    adds_eos: bool
    repeated_tokens: Mapping[int, int]


@dataclass(frozen=True)
class TokenizerFiles:
    """The JSON objects in the files of ``folder``; empty for a file that does not exist."""

    folder: Path
    config: Mapping[str, Any]
    special_tokens_map: Mapping[str, Any]
    added_tokens: Mapping[str, Any]


def read_settings(
    files: TokenizerFiles, backend: tokenizers.Tokenizer, kind: TokenizerClass, has_pipeline: bool = True
) -> TokenizerSettings:
    """The settings in ``files``. ``backend`` holds the tokens of ``tokenizer.json``.

    Without ``has_pipeline`` the backend was made of a vocabulary alone, so that nothing but the configuration frames a
    prompt. Raises ``CheckpointError`` that names the file and lists all values that are wrong.
    """
    problems: list[str] = []
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    has_list = "added_tokens_decoder" in files.config
    config = files.config if has_list else _merged(files.config, files.special_tokens_map)
    named = _named_tokens(config, problems)
    named |= {
        name: AddedToken(text, special=True)
        for name, text in kind.special_tokens.items()
        if name not in config and backend.token_to_id(text) is not None
    }
    extra = _extra_tokens(config, problems)
    names = {token.content for token in named.values()}
    if has_list:
        stated = _added_tokens_decoder(config["added_tokens_decoder"], problems)
    else:
        special = {token.content for token in extra} | {named[name].content for name in NAMES if name in named}
        stated = _added_tokens(files.added_tokens, known, special, problems)
        stated |= {i: t for i, t in backend.get_added_tokens_decoder().items() if t.content in names and not t.special}
    flags = {
        name: _flag(config, name, problems)
        for name in ("add_prefix_space", "legacy", "split_special_tokens", "add_bos_token", "add_eos_token")
    }
    repeated = _repeated_tokens(config.get(REPEATED_TOKENS), problems)
    if problems:
        raise CheckpointError(f"{files.folder}: {'; '.join(problems)}")
    kept = names | {token.content for token in known.values() if token.special}  # what is special remains so
    for token in stated.values():
        token.special = token.special or token.content in kept
    listed = known.keys() | {token.content for token in stated.values()}
    further = {t.content: t for t in (*named.values(), *extra) if t.content and t.content not in listed}
    prefix = flags["add_prefix_space"] if kind.has_prefix_option else None
    frames = kind.frames or not has_pipeline
    return TokenizerSettings(
        special_tokens={name: token.content for name, token in named.items()},
        stated=stated,
        further=tuple(further.values()),
        prefix_space=kind.prefix_space if prefix is None else prefix,
        is_legacy=flags["legacy"] is True,
        splits_special_tokens=flags["split_special_tokens"] is True,
        adds_bos=frames and flags["add_bos_token"] is True,
        adds_eos=frames and flags["add_eos_token"] is True,
        repeated_tokens=repeated,
    )


def _merged(config: Mapping[str, Any], special_tokens_map: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with what ``special_tokens_map.json`` says in its place."""
    merged = {**config, **special_tokens_map, **{name: v for name, v in config.items() if _is_own_name(name, v)}}
    first, second = config.get("extra_special_tokens"), special_tokens_map.get("extra_special_tokens")
    if isinstance(first, list) and isinstance(second, list):
        merged["extra_special_tokens"] = [*first, *second]
    if config.get("additional_special_tokens"):
        merged["additional_special_tokens"] = config["additional_special_tokens"]
    return merged


def _added_tokens_decoder(value: Any, problems: list[str]) -> dict[int, AddedToken]:
    if not isinstance(value, dict):
        problems.append(f"{_CONFIG}: added_tokens_decoder must be an object, but is {type(value).__name__}")
        return {}
    tokens: dict[int, AddedToken] = {}
    for key, content in value.items():
        where = f"{_CONFIG}: added_tokens_decoder[{key[:40]!r}]"
        if not (key.isascii() and key.isdigit() and len(key) < 11 and int(key) <= MAX_ID):
            problems.append(f"{where} is for no token id")
        elif not isinstance(content, dict):
            problems.append(f"{where} is {content!r}, but must be an object")
        elif (token := _token(content, where, problems)) is not None:
            tokens[int(key)] = token
    return tokens


def _added_tokens(
    value: Mapping[str, Any], known: Collection[str], special: Collection[str], problems: list[str]
) -> dict[int, AddedToken]:
    """The tokens of ``added_tokens.json`` that ``tokenizer.json`` does not have as added tokens."""
    tokens: dict[int, AddedToken] = {}
    for text, index in value.items():
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index <= MAX_ID:
            problems.append(f"{_ADDED}: {text!r} has the id {index!r}, but must have one from 0 to {MAX_ID}")
        elif text not in known and _is_utf8(text, f"{_ADDED}: a token", problems):
            tokens[index] = AddedToken(text, normalized=text not in special, special=text in special)
    return tokens


def _named_tokens(config: Mapping[str, Any], problems: list[str]) -> dict[str, AddedToken]:
    """The special tokens by name: those that any tokenizer may have, and the model's own (``image_token``, ...)."""
    own = config.get("extra_special_tokens")
    values: dict[str, Any] = {name: config[name] for name in NAMES if config.get(name) is not None}
    values |= {name: value for name, value in config.items() if _is_own_name(name, value)}
    values |= own if isinstance(own, dict) else {}
    found = {name: _special_token(value, name, problems) for name, value in values.items()}
    return {name: token for name, token in found.items() if token is not None}


def _extra_tokens(config: Mapping[str, Any], problems: list[str]) -> list[AddedToken]:
    """The special tokens without a name."""
    field = "extra_special_tokens" if config.get("extra_special_tokens") else "additional_special_tokens"
    value = config.get(field)
    if not isinstance(value, (list, dict, type(None))):
        problems.append(f"{field} must be a list of texts, but is {value!r}")
    tokens = value if isinstance(value, list) else []
    found = [_special_token(token, f"{field}[{i}]", problems) for i, token in enumerate(tokens)]
    return [token for token in found if token is not None]


def _is_own_name(name: str, value: Any) -> bool:
    """Whether a key is the model's own name of a special token. Flags such as ``add_bos_token`` end like it."""
    text = value.get("content") if isinstance(value, dict) else value
    return name.endswith("_token") and name not in NAMES and isinstance(text, str)


def _special_token(value: Any, where: str, problems: list[str]) -> AddedToken | None:
    """A special token, which is a text or an object with a ``content`` and flags."""
    return _token({"special": True} | (value if isinstance(value, dict) else {"content": value}), where, problems)


def _token(value: Mapping[str, Any], where: str, problems: list[str]) -> AddedToken | None:
    flags = {name: flag for name, flag in value.items() if name not in ("content", "id", "__type")}
    text = value.get("content")
    wrong = [f"{name} {flag!r}" for name, flag in flags.items() if name not in _FLAGS or not isinstance(flag, bool)]
    if not isinstance(text, str):
        problems.append(f"{where} is {text!r}, but must be text or an object whose content is text")
    elif wrong:
        problems.append(f"{where} has {', '.join(wrong)}, but may have true or false for {', '.join(_FLAGS)}")
    elif _is_utf8(text, where, problems):
        return AddedToken(text, **flags)
    return None


def _is_utf8(text: str, where: str, problems: list[str]) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        problems.append(f"{where} is {text!r}, which cannot be written as UTF-8")
        return False
    return True


def _repeated_tokens(value: Any, problems: list[str]) -> dict[int, int]:
    if value is None:
        return {}
    is_valid = isinstance(value, dict) and all(
        key.isascii() and key.isdigit() and isinstance(i, int) and 0 <= i <= MAX_ID >= int(key[:11])
        for key, i in value.items()
    )
    if not is_valid:
        problems.append(f"{_CONFIG}: {REPEATED_TOKENS} must map token ids to token ids")
        return {}
    return {int(key): index for key, index in value.items()}


def _flag(config: Mapping[str, Any], name: str, problems: list[str]) -> bool | None:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        problems.append(f"{_CONFIG}: {name} is {value!r}, but must be true or false")
    return value if isinstance(value, bool) else None
