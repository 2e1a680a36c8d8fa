"""LLaMA with int8 weights in PyTorch, to be compiled: a peer of :mod:`bench_peers`.

It is built as gpt-fast (https://github.com/pytorch-labs/gpt-fast) is: weights are int8 codes with a scale for each
output, activations and products bf16, the cache has a fixed size, and a decode step and a prompt are each one graph of
``torch.compile``. Its weights are random.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Int8Linear(nn.Module):
    """``x @ (codes * scale).T`` without a bias. ``codes`` is int8 ``[out, in]``, ``scale`` ``[out]``."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype):
        super().__init__()
        self.register_buffer("codes", torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8))
        self.register_buffer("scale", torch.full((outputs,), 1 / (73.3 * inputs**0.5), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.codes.to(x.dtype)) * self.scale


class RmsNorm(nn.Module):
    """An RMSNorm, computed in fp32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of ``x`` ``[B, heads, T, head_dim]``; ``cos`` and ``sin`` are fp32 ``[T, head_dim / 2]``."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Block(nn.Module):
    """One layer. Its cache is ``[B, kv_heads, capacity, head_dim]`` for keys and for values."""

    def __init__(self, config: dict[str, Any], dtype: torch.dtype):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or hidden // self.heads
        self.attention_norm = RmsNorm(hidden, config["rms_norm_eps"], dtype)
        self.mlp_norm = RmsNorm(hidden, config["rms_norm_eps"], dtype)
        self.qkv = Int8Linear(hidden, (self.heads + 2 * self.kv_heads) * self.head_dim, dtype)
        self.out = Int8Linear(self.heads * self.head_dim, hidden, dtype)
        self.gate, self.up = Int8Linear(hidden, inner, dtype), Int8Linear(hidden, inner, dtype)
        self.down = Int8Linear(inner, hidden, dtype)
        self.keys: Tensor
        self.values: Tensor

    def make_cache(self, batch: int, capacity: int) -> None:
        """Replace the cache by one with room for ``capacity`` tokens."""
        shape = (batch, self.kv_heads, capacity, self.head_dim)
        for name in ("keys", "values"):
            cache = torch.zeros(shape, dtype=self.attention_norm.weight.dtype, device=self.attention_norm.weight.device)
            self.register_buffer(name, cache, persistent=False)

    def forward(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, count, _ = x.shape
        sizes = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        parts = self.qkv(self.attention_norm(x)).split(sizes, -1)
        query, key, value = (part.view(batch, count, -1, self.head_dim).transpose(1, 2) for part in parts)
        self.keys[:, :, positions] = rotate(key, cos, sin)
        self.values[:, :, positions] = value
        repeats = self.heads // self.kv_heads
        keys, values = (cache.repeat_interleave(repeats, 1) for cache in (self.keys, self.values))
        y = F.scaled_dot_product_attention(rotate(query, cos, sin), keys, values, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(batch, count, -1))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Int8Llama(nn.Module):
    """A LLaMA of the configuration ``config`` (that of ``config.json``) with random weights.

    Call :meth:`make_cache` before :meth:`forward`. Rotary frequencies are those of ``rope_theta``, not scaled.
    """

    def __init__(self, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        hidden, vocab = config["hidden_size"], config["vocab_size"]
        self.embedding = nn.Embedding(vocab, hidden, dtype=dtype)
        self.layers = nn.ModuleList([Block(config, dtype) for _ in range(config["num_hidden_layers"])])
        self.norm = RmsNorm(hidden, config["rms_norm_eps"], dtype)
        self.head = Int8Linear(hidden, vocab, dtype)
        head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
        exponents = torch.arange(0, head_dim, 2) / head_dim
        self.register_buffer("frequencies", 1 / config["rope_theta"] ** exponents)
        self.register_buffer("mask", torch.ones(0, 0, dtype=torch.bool), persistent=False)

    def make_cache(self, batch: int, capacity: int) -> None:
        """Make the cache of ``batch`` sequences of up to ``capacity`` tokens."""
        for layer in self.layers:
            layer.make_cache(batch, capacity)
        self.mask = torch.ones(capacity, capacity, dtype=torch.bool, device=self.frequencies.device).tril()

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits ``[B, V]`` of the last of ``tokens`` ``[B, T]`` at ``positions`` ``[T]``."""
        angles = positions[:, None] * self.frequencies
        cos, sin, mask = angles.cos(), angles.sin(), self.mask[positions]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, cos, sin, mask)
        return self.head(self.norm(x[:, -1]))
