"""The special tokens of a GGUF file: those that have a name, and those that end a text, as llama.cpp finds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from types import MappingProxyType
from typing import Any

from ..errors import CheckpointError, checkpoint_error
from .header import GgufHeader

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "bos": "bos_token",
        "eos": "eos_token",
        "unknown": "unk_token",
        "padding": "pad_token",
        "seperator": "sep_token",
        "mask": "mask_token",
    }
)
"""``tokenizer.ggml.{name}_token_id`` and what Hugging Face calls that token. llama.cpp spells ``seperator``."""
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""The names of tokens that end a text."""
_SENTENCEPIECE = {"bos": 1, "eos": 2, "unknown": 0}
"""Ids in a SentencePiece vocabulary whose file names none."""
CONTROL = 3
"""The type of tokens without text."""
_END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<turn|>",
        "<|tool_response>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
    }
)
"""Texts of tokens that end a text or a turn, whatever their type is in the file."""
_END_CONTROL_TEXTS = frozenset({"</s>", "<eos>", "[EOT]", "[EOS]"})
"""Texts of control tokens that do so; a vocabulary may have them as ordinary text too."""
_TURNS = (("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>"))
"""In a vocabulary with both tokens of a pair, ``<|end|>`` ends a message within a turn."""


def is_control(token: str, token_type: int | None) -> bool:
    """Whether a token has no text."""
    return token_type == CONTROL or token in _END_TEXTS


def named_ids(header: GgufHeader) -> dict[str, int]:
    """The ids of special tokens by the names in the file, such as ``bos`` and ``eot``.

    Raises ``CheckpointError`` for ids outside of the vocabulary.
    """
    metadata, count = header.metadata, len(header.metadata.get("tokenizer.ggml.tokens") or ())
    defaults = _SENTENCEPIECE if metadata.get("tokenizer.ggml.model") == "llama" else {}
    found: dict[str, int] = {}
    problems = []
    for name in (*NAMES, *_ENDS):
        key = f"tokenizer.ggml.{name}_token_id"
        index = metadata.get(key, defaults.get(name))
        if index is None or (key not in metadata and index >= count):
            continue
        if not isinstance(index, int) or isinstance(index, bool) or index < 0 or (0 < count <= index):
            problems.append(f"{key} is {index!r}, but the vocabulary has {count:,} tokens")
        else:
            found[name] = index
    if problems:
        raise checkpoint_error(header.path, problems, "export the model again")
    return found


def end_ids(header: GgufHeader) -> list[int]:
    """The ids of the tokens that end a text or a turn in a dialogue, that of the text first."""
    named = named_ids(header)
    tokens, types = vocabulary(header)
    by_text = {token: i for i, token in enumerate(tokens)}
    found = [named[name] for name in _ENDS if name in named]
    for i, token in enumerate(tokens):
        if token in _END_TEXTS or (token in _END_CONTROL_TEXTS and types and types[i] == CONTROL):
            found.append(i)
    within = {by_text["<|end|>"]} if "<|end|>" in by_text and _has_pair(by_text) else set()
    if "<|tool_response>" in by_text and "</s>" in by_text:
        within.add(by_text["</s>"])
    return [i for i in dict.fromkeys(found) if i not in within or i == named.get("eos")]


def _has_pair(by_text: Mapping[str, int]) -> bool:
    return any(first in by_text and second in by_text for first, second in _TURNS)


def vocabulary(header: GgufHeader) -> tuple[Sequence[str], Sequence[int]]:
    """The tokens and their types, which may be absent. Raises ``CheckpointError`` if they do not fit each other."""
    tokens = header.metadata.get("tokenizer.ggml.tokens") or []
    types = header.metadata.get("tokenizer.ggml.token_type") or []
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(f"{header.path}: tokenizer.ggml.tokens must be a list of texts; export the model again")
    if types and (not isinstance(types, list) or len(types) != len(tokens)):
        problem = f"tokenizer.ggml.token_type does not have a number for each of {len(tokens):,} tokens"
        raise CheckpointError(f"{header.path}: {problem}; export the model again")
    return tokens, types


def scores_of(header: GgufHeader, tokens: Sequence[str]) -> list[float]:
    """The scores of the tokens of SentencePiece. Raises :class:`CheckpointError` if a token has no number."""
    scores = header.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not all(map(_is_score, scores)):
        raise CheckpointError(f"{header.path}: tokenizer.ggml.scores does not have a number for each token")
    return scores


def _is_score(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not isnan(value)
