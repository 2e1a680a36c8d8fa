"""Changes to a tokenizer of the ``tokenizers`` library: further tokens, and the space before a text."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, pre_tokenizers

_SPACE = "▁"
"""SentencePiece's space."""


def with_tokens(
    backend: tokenizers.Tokenizer,
    stated: Mapping[int, AddedToken],
    further: Sequence[AddedToken],
    vocab_size: int,
) -> tokenizers.Tokenizer:
    """``backend`` with more added tokens, or with other flags of those that it has. May change ``backend``.

    A token of ``stated`` that is new gets its id there; one of ``further`` gets the next free id. New tokens without a
    row among the ``vocab_size`` of the embedding are left out. Raises ``ValueError`` for an id that cannot be given to
    its token.
    """
    tokens = [*(token for _, token in sorted(stated.items())), *further]
    new = {t.content: i for i, t in sorted(stated.items()) if t.content and backend.token_to_id(t.content) is None}
    unnumbered = [t.content for t in further if backend.token_to_id(t.content) is None]
    if new or unnumbered:
        largest = max([*backend.get_vocab(with_added_tokens=True).values(), *new.values()], default=-1)
        new |= {text: largest + 1 + i for i, text in enumerate(unnumbered)}
        placed = {text: index for text, index in new.items() if index < vocab_size}
        first = _next_id(backend)
        if list(placed.values()) != list(range(first, first + len(placed))):
            backend = _with_vocabulary(backend, placed)
        tokens = [token for token in tokens if token.content not in new or token.content in placed]
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}  # with their flags
    backend.add_tokens([token for token in tokens if repr(token) not in known])
    return backend


def without_added_tokens_beyond(
    backend: tokenizers.Tokenizer, rows: int, kept: Collection[str | None]
) -> tokenizers.Tokenizer:
    """``backend`` without the added tokens whose ids are ``rows`` or more, but for those in ``kept``."""
    content = json.loads(backend.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["id"] < rows or t["content"] in kept]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def with_prefix_space(backend: tokenizers.Tokenizer, adds: bool, is_legacy: bool) -> tokenizers.Tokenizer:
    """``backend`` with or without a space before a text. May change ``backend``.

    A byte-level pipeline has a switch for it. Of one with SentencePiece's spaces, the steps that add the space and
    take it from a decoded text are changed. It precedes each part between added tokens if ``is_legacy``, else only the
    first.
    """
    byte_level = [step for step in _steps(backend.pre_tokenizer) if isinstance(step, pre_tokenizers.ByteLevel)]
    for step in byte_level:
        step.add_prefix_space = adds
    if byte_level:
        return backend
    content = json.loads(backend.to_str())
    if _has_prefix(content) == adds:
        return backend
    _set_prefix(content, adds, "always" if is_legacy else "first")
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether the pieces of the vocabulary are strings of bytes, as GPT-2's."""
    return any(isinstance(step, pre_tokenizers.ByteLevel) for step in _steps(backend.pre_tokenizer))


def _next_id(backend: tokenizers.Tokenizer) -> int:
    """The id that the library gives to the next new token."""
    added = max(backend.get_added_tokens_decoder(), default=-1)
    return 1 + max(added, backend.get_vocab_size(with_added_tokens=False) - 1)


def _with_vocabulary(backend: tokenizers.Tokenizer, placed: Mapping[str, int]) -> tokenizers.Tokenizer:
    """``backend`` with more entries in its vocabulary: the library gives an added token that is there its id."""
    content = json.loads(backend.to_str())
    vocabulary = content["model"].get("vocab")
    taken = {index: backend.id_to_token(index) for index in placed.values()}
    problems = [
        f"{text!r} has the id {index} in one file, and {taken[index]!r} has it in tokenizer.json"
        for text, index in placed.items()
        if taken[index] is not None
    ]
    if not problems and not isinstance(vocabulary, dict):
        first, free = next(iter(placed.items())), _next_id(backend)
        problems = [f"the added token {first[0]!r} has the id {first[1]}, but the vocabulary's next is {free}"]
    if problems:
        raise ValueError("; ".join([*problems, "get the tokenizer's files anew from one place"]))
    vocabulary |= placed
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def _steps(pre_tokenizer: Any) -> Iterator[Any]:
    """The steps of a pre-tokenizer."""
    if isinstance(pre_tokenizer, pre_tokenizers.Sequence):
        count = len(json.loads(pre_tokenizer.__getstate__())["pretokenizers"])
        for i in range(count):
            yield from _steps(pre_tokenizer[i])
    elif pre_tokenizer is not None:
        yield pre_tokenizer


def _parts(content: Mapping[str, Any], key: str, members: str) -> list[dict[str, Any]]:
    """The steps of a stage of the pipeline in JSON."""
    stage = content.get(key)
    if stage is None:
        return []
    return list(stage[members]) if stage["type"] == "Sequence" else [stage]


def _has_prefix(content: Mapping[str, Any]) -> bool:
    """Whether a pipeline with SentencePiece's spaces adds one before a text."""
    return any(
        step["type"] == "Prepend" and step["prepend"] == _SPACE for step in _parts(content, "normalizer", "normalizers")
    ) or any(
        step["type"] == "Metaspace" and step.get("prepend_scheme") != "never"
        for step in _parts(content, "pre_tokenizer", "pretokenizers")
    )


def _set_prefix(content: dict[str, Any], adds: bool, scheme: str) -> None:
    steps = [
        step
        for step in _parts(content, "normalizer", "normalizers")
        if not (step["type"] == "Prepend" and step["prepend"] == _SPACE)
    ]
    content["normalizer"] = {"type": "Sequence", "normalizers": steps} if steps else None
    spaces = [s for s in _parts(content, "pre_tokenizer", "pretokenizers") if s["type"] == "Metaspace"]
    for space in spaces:
        space["prepend_scheme"] = scheme if adds else "never"
    if adds and not spaces:
        first = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": False}
        others = _parts(content, "pre_tokenizer", "pretokenizers")
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [first, *others]}
    ends = [s for s in _parts(content, "decoder", "decoders") if not _strips_prefix(s)]
    for end in ends:
        if end["type"] == "Metaspace":
            end["prepend_scheme"] = scheme if adds else "never"
    if adds and not any(end["type"] == "Metaspace" for end in ends):
        ends.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    content["decoder"] = {"type": "Sequence", "decoders": ends} if ends else None


def _strips_prefix(step: Mapping[str, Any]) -> bool:
    return (step["type"], step.get("content"), step.get("start"), step.get("stop")) == ("Strip", " ", 1, 0)
