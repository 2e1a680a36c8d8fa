"""A LLaMA-family model in float64 and plain loops over tokens and heads, written from the papers and docs/numerics.md.

It takes a ``config.json`` and checkpoint tensors, shares no code with the package, and knows the default rotary
positions only. Quantized, it uses the same codes and scales as docs/numerics.md prescribes; everything else is exact to
float64. It tells how near any activation's code came to a tie: where none is within the reach of fp32 rounding, another
implementation must choose the same codes, and its logits can be compared tightly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class Float64Model:
    """``w8a8``, ``w8a16`` or ``float``. After a call, ``margin`` is the least distance of a code from a tie."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], kind: str):
        self.config = config
        self.tensors = tensors
        self.kind = kind
        self.margin = np.inf
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Logits ``[tokens, vocab]`` of one sequence."""
        self.margin = np.inf
        stream = self.tensors["model.embed_tokens.weight"].astype(np.float64)[tokens]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            stream = stream + self.attention(self.norm(stream, f"{name}.input_layernorm"), f"{name}.self_attn", layer)
            x = self.norm(stream, f"{name}.post_attention_layernorm")
            gate, up = self.linear(x, f"{name}.mlp.gate_proj"), self.linear(x, f"{name}.mlp.up_proj")
            stream = stream + self.linear(gate / (1 + np.exp(-gate)) * up, f"{name}.mlp.down_proj")
        head = "model.embed_tokens" if self.config.get("tie_word_embeddings") else "lm_head"
        return self.linear(self.norm(stream, "model.norm"), head)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean_square = (x**2).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + self.config.get("rms_norm_eps", 1e-6)) * self.tensors[f"{name}.weight"]

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        weight = self.tensors[f"{name}.weight"]
        if self.kind != "float":
            weight = dequantized_weight(weight)
        if self.kind == "w8a8":
            x = np.array([self.quantized_row(row) for row in x])
        return x @ weight.T.astype(np.float64) + self.tensors.get(f"{name}.bias", 0)

    def quantized_row(self, row: np.ndarray) -> np.ndarray:
        """One token's activations as their codes and scale represent them."""
        largest = np.abs(row).max()
        ratio = row * 127 / largest
        self.margin = min(self.margin, np.abs(np.abs(ratio - np.trunc(ratio)) - 0.5).min())
        return np.rint(ratio) * largest / 127

    def attention(self, x: np.ndarray, name: str, layer: int) -> np.ndarray:
        q, k, v = (
            self.linear(x, f"{name}.{p}_proj").reshape(len(x), count, self.head_dim)
            for p, count in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        if f"{name}.q_norm.weight" in self.tensors:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        q, k = self.rotated(q), self.rotated(k)
        window = self.window(layer)
        out = np.empty_like(q)
        for t in range(len(x)):
            first = max(0, t - window + 1)
            for h in range(self.heads):
                group = h * self.kv_heads // self.heads
                scores = k[first : t + 1, group] @ q[t, h] / np.sqrt(self.head_dim)
                weights = np.exp(scores - scores.max())
                out[t, h] = weights @ v[first : t + 1, group] / weights.sum()
        return self.linear(out.reshape(len(x), -1), f"{name}.o_proj")

    def rotated(self, x: np.ndarray) -> np.ndarray:
        """``[tokens, heads, head_dim]`` turned by position, as complex numbers."""
        half = self.head_dim // 2
        theta = self.config.get("rope_theta", 10000.0)
        angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def window(self, layer: int) -> int:
        """How many tokens a token of this layer sees, itself included."""
        window = self.config.get("sliding_window")
        if self.config["model_type"].startswith("qwen"):
            used = self.config.get("use_sliding_window") and layer >= self.config["max_window_layers"]
            window = window if used else None
        return window or 10**9


def dequantized_weight(weight: np.ndarray) -> np.ndarray:
    """What a weight's int8 codes and fp16 scales stand for; none of the tiny models has a scale below fp16's range."""
    rows = []
    for row in weight.astype(np.float32):
        scale = np.float32(np.float16(np.abs(row).max() / np.float32(127)))
        codes = np.clip(np.rint(row / scale), -127, 127)
        rows.append(codes.astype(np.float64) * np.float64(scale))
    return np.array(rows)
