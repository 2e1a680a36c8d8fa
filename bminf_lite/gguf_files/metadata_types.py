"""The types of metadata that a GGUF file must have: what reads them later takes them for granted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import is_whole

_MAX_SIZE, _MAX_LAYERS = 1 << 32, 1 << 16
"""Sizes that llama.cpp reads are of 32 bits. A list is made of the layers, so there must not be 4 billion."""


def _is_size(value: Any) -> bool:
    return is_whole(value) and 0 < value < _MAX_SIZE


def _is_number_of_layers(value: Any) -> bool:
    return is_whole(value) and 0 < value < _MAX_LAYERS


def _is_size_or_0(value: Any) -> bool:
    return is_whole(value) and 0 <= value < _MAX_SIZE


def _by_layer(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """One value, or a list of one for each layer."""

    def holds(value: Any) -> bool:
        return all(map(is_valid, value)) and len(value) > 0 if isinstance(value, list) else is_valid(value)

    return holds


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_OF_MODEL: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "block_count": (f"a number of layers, below {_MAX_LAYERS:,}", _is_number_of_layers),
    "embedding_length": ("a size", _is_size),
    "context_length": ("a size", _is_size),
    "attention.key_length": ("a size", _is_size),
    "attention.value_length": ("a size", _is_size),
    "rope.dimension_count": ("a size or 0", _is_size_or_0),
    "attention.head_count": ("a size, or one for each layer", _by_layer(_is_size)),
    "attention.head_count_kv": ("a size, 0, or one for each layer", _by_layer(_is_size_or_0)),
    "feed_forward_length": ("a size, 0, or one for each layer", _by_layer(_is_size_or_0)),
}
_OF_FILE: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "general.architecture": ("a text", _is_text),
    "tokenizer.ggml.model": ("a text", _is_text),
    "tokenizer.ggml.tokens": ("a list of texts", _are_texts),
}


def metadata_problems(metadata: Mapping[str, Any]) -> list[str]:
    """What is wrong with the types of the metadata that are there."""
    prefix = metadata.get("general.architecture")
    wanted = {**{f"{prefix}.{key}": want for key, want in _OF_MODEL.items()}, **_OF_FILE}
    found = []
    for key, (what, is_valid) in wanted.items():
        if key in metadata and not is_valid(metadata[key]):
            found.append(f"{key} is {repr(metadata[key])[:60]}, not {what}")
    return found
