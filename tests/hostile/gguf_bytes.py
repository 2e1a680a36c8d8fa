"""GGUF files of a tiny Llama as bytes, in which every field can be wrong."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tiny_checkpoint

UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
"""Types of metadata."""
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


def string(value: str | bytes) -> bytes:
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value_bytes(value: Any) -> bytes:
    """A type and a value: of Python's types, or bytes that stand for both."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return struct.pack("<IB", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + string(value)
    kind = {str: STRING, int: UINT32, float: FLOAT32}[type(value[0])]
    return array(kind, len(value), b"".join(value_bytes(item)[4:] for item in value))


def array(kind: int, length: int, data: bytes = b"") -> bytes:
    """An array that claims to have ``length`` elements."""
    return struct.pack("<IIQ", ARRAY, kind, length) + data


def metadata() -> dict[str, Any]:
    """What a tiny Llama says of itself, with a vocabulary of single bytes."""
    config = tiny_checkpoint.CONFIG
    alphabet = sorted(tiny_checkpoint.byte_tokenizer().get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in alphabet] + ["ab", "<y>"]
    return {
        "general.architecture": "llama",
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in ("<s>", "</s>") else 1 for token in tokens],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 257,
    }


def tensors() -> dict[str, np.ndarray]:
    found = {}
    for name, values in tiny_checkpoint.tensors(tiny_checkpoint.CONFIG).items():
        for theirs, ggufs in NAMES.items():
            name = name.replace(theirs, ggufs)
        found[name] = values
    return found


def file_bytes(
    changes: Mapping[str, Any] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int | None, int | None] = (None, None),
    shapes: Mapping[str, Sequence[int]] | None = None,
    kinds: Mapping[str, int] | None = None,
    offsets: Mapping[str, int] | None = None,
    values: Mapping[str, float] | None = None,
) -> bytes:
    """The file, with metadata and descriptions of tensors replaced; metadata that is None is left out."""
    entries = {key: value for key, value in (metadata() | dict(changes or {})).items() if value is not None}
    head, data, infos = b"", b"", b""
    weights = tensors()
    for key, value in entries.items():
        head += string(key) + value_bytes(value)
    for name, tensor in weights.items():
        if name in (values or {}):
            tensor.flat[0] = values[name]
        sizes = (shapes or {}).get(name, tensor.shape[::-1])
        infos += string(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        infos += struct.pack("<IQ", (kinds or {}).get(name, 0), (offsets or {}).get(name, len(data)))
        data += tensor.astype("<f4").tobytes()
        data += bytes(-len(data) % 32)
    num_tensors = len(weights) if counts[0] is None else counts[0]
    num_entries = len(entries) if counts[1] is None else counts[1]
    head = magic + struct.pack("<IQQ", version, num_tensors, num_entries) + head + infos
    return head + bytes(-len(head) % 32) + data
