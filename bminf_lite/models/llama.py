"""LLaMA 2 and 3 (https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2407.21783), the base of Mistral and Qwen.

A pre-norm decoder: RMSNorm, grouped-query attention with rotary positions, a gated feed-forward layer. Mistral and
Qwen differ by a window, biases or a norm on queries and keys: fields of :class:`Config` that their files set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend.base import Backend
from ..backend.values import Array, AttentionSpec, ForwardBatch, LayerCache, Rope
from ..layers.attention import Attention
from ..layers.cache import CacheShape
from ..layers.embedding import Embedding
from ..layers.linear import Linear
from ..layers.loading import Weights
from ..layers.mlp import GatedMLP
from ..layers.norm import rms_norm
from ..layers.position import rope_frequencies, rope_parameters
from ._architecture import Architecture
from ._config import ACTIVATIONS, MAX_HEAD_DIM, MAX_LAYERS, ConfigReader, ModelConfig, choice, flag, integer, number
from ._decoder import Decoder, Output
from .spec import Fold, Spec, embedding, head, linear, norm, weights_of

KEYS = {
    "vocab_size": integer("vocab_size", 32000),
    "hidden_size": integer("hidden_size", 4096),
    "intermediate_size": integer("intermediate_size", 11008),
    "layers": integer("num_hidden_layers", 32, high=MAX_LAYERS),
    "heads": integer("num_attention_heads", 32),
    "kv_heads": integer("num_key_value_heads", derive=lambda fields: fields["heads"]),
    "head_dim": integer(
        "head_dim", derive=lambda fields: max(fields["hidden_size"] // fields["heads"], 1), high=MAX_HEAD_DIM
    ),
    "context_length": integer("max_position_embeddings", 2048),
    "norm_eps": number("rms_norm_eps", 1e-6, high=1.0),
    "activation": choice("hidden_act", "silu", ACTIVATIONS),
    "tied_head": flag("tie_word_embeddings", False),
}
"""The keys that the whole family has."""

ATTENTION_BIAS = flag("attention_bias", False)
BIASES = {"qkv_bias": ATTENTION_BIAS, "o_bias": ATTENTION_BIAS, "mlp_bias": flag("mlp_bias", False)}


@dataclass(frozen=True)
class Config(ModelConfig):
    """The configuration of a model of the family.

    ``frequencies`` are the rotary frequencies and ``rope_scale`` the factor on cosine and sine. ``windows`` has an
    entry per layer: the attention window, or None.
    """

    kv_heads: int
    head_dim: int
    frequencies: tuple[float, ...]
    rope_scale: float
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(self.layers, self.kv_heads, self.head_dim)


def parse(config: Mapping[str, Any]) -> Config:
    return parse_family(ConfigReader(config, KEYS | BIASES))


def parse_family(read: ConfigReader) -> Config:
    """The configuration of a model of the family, without windows."""
    head_dim = read.fields["head_dim"]
    if read.is_null(read.keys["head_dim"]):
        read.require_divisible("hidden_size", "heads")
    read.require_divisible("heads", "kv_heads")
    text = f"head_dim ({head_dim}) is odd, which rotary positions do not allow"
    read.require(head_dim % 2 == 0, text, "head_dim", "hidden_size", "num_attention_heads")
    try:
        parameters = rope_parameters(read.config)
        frequencies, scale = rope_frequencies(parameters, head_dim + head_dim % 2, read.fields["context_length"])
    except ValueError as error:
        read.problem("rope_parameters", str(error))
    fields = read.checked_fields()
    return Config(
        **fields, frequencies=tuple(map(float, frequencies)), rope_scale=scale, windows=(None,) * fields["layers"]
    )


def spec(config: Config) -> Spec:
    """Every tensor of the checkpoint. Factors move from norms, value heads and ``up`` into the matrices after them."""
    hidden, inner, table = config.hidden_size, config.intermediate_size, (config.vocab_size, config.hidden_size)
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    tensors = embedding("model.embed_tokens", table) | norm("model.norm", hidden) | head("lm_head", table)
    folds: list[Fold] = []
    rotatable: list[str] = []
    for layer in range(config.layers):
        name = f"model.layers.{layer}"
        *qkv, o = (f"{name}.self_attn.{x}_proj" for x in "qkvo")
        gate, up, down = (f"{name}.mlp.{x}_proj" for x in ("gate", "up", "down"))
        value_tensors = linear(qkv[2], (kv, hidden), config.qkv_bias)
        up_tensors = linear(up, (inner, hidden), config.mlp_bias)
        tensors |= linear(qkv[0], (q, hidden), config.qkv_bias) | linear(qkv[1], (kv, hidden), config.qkv_bias)
        tensors |= value_tensors | linear(o, (hidden, q), config.o_bias)
        tensors |= linear(gate, (inner, hidden), config.mlp_bias) | up_tensors
        tensors |= linear(down, (hidden, inner), config.mlp_bias)
        tensors |= norm(f"{name}.input_layernorm", hidden) | norm(f"{name}.post_attention_layernorm", hidden)
        if config.qk_norm:
            tensors |= norm(f"{name}.self_attn.q_norm", config.head_dim)
            tensors |= norm(f"{name}.self_attn.k_norm", config.head_dim)
        folds += [
            Fold(weights_of(f"{name}.input_layernorm"), weights_of(*qkv)),
            Fold(tuple(value_tensors), weights_of(o), block=config.head_dim, repeat=config.heads // config.kv_heads),
            Fold(weights_of(f"{name}.post_attention_layernorm"), weights_of(gate, up)),
            Fold(tuple(up_tensors), weights_of(down)),
        ]
        rotatable += weights_of(down)
    if not config.tied_head:
        folds.append(Fold(weights_of("model.norm"), weights_of("lm_head")))
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tied_head else {}
    ignored = (r".*rotary_emb\.inv_freq",)
    return Spec(tensors, tied, ignored, foldable=tuple(folds), rotatable=tuple(rotatable))


class Block:
    """``r = r + attention(norm(r))``, ``r = r + mlp(norm(r))``."""

    def __init__(self, config: Config, weights: Weights, ops: Backend, layer: int, rope: Rope):
        name = f"model.layers.{layer}"
        q_norm, k_norm = (
            rms_norm(ops, weights, f"{name}.self_attn.{x}_norm", config.norm_eps).norm if config.qk_norm else None
            for x in "qk"
        )
        scale, window = config.head_dim**-0.5, config.windows[layer]
        self.input_norm = rms_norm(ops, weights, f"{name}.input_layernorm", config.norm_eps)
        self.attention = Attention(
            ops,
            AttentionSpec(config.heads, config.kv_heads, config.head_dim, scale, window, rope, q_norm, k_norm),
            Linear(ops, weights, [f"{name}.self_attn.{x}_proj" for x in "qkv"], config.qkv_bias),
            Linear(ops, weights, [f"{name}.self_attn.o_proj"], config.o_bias),
        )
        self.post_norm = rms_norm(ops, weights, f"{name}.post_attention_layernorm", config.norm_eps)
        self.mlp = GatedMLP(
            ops,
            config.activation,
            Linear(ops, weights, [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"], config.mlp_bias),
            Linear(ops, weights, [f"{name}.mlp.down_proj"], config.mlp_bias),
        )

    def __call__(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        residual = self.attention.add_to(residual, self.input_norm(residual), cache, batch)
        return self.mlp.add_to(residual, self.post_norm(residual))


class ModelBuilder:
    """Makes the parts of a model one at a time; see :class:`._decoder.DecoderBuilder`."""

    def __init__(self, config: Config, weights: Weights, ops: Backend):
        self.config = config
        self.weights = weights
        self.ops = ops
        self.rope = Rope(ops.vector(np.array(config.frequencies, np.float32)), config.rope_scale)

    def embed(self) -> Embedding:
        return Embedding(self.ops, self.weights, "model.embed_tokens")

    def block(self, layer: int) -> Block:
        return Block(self.config, self.weights, self.ops, layer, self.rope)

    def output(self) -> Output:
        final_norm = rms_norm(self.ops, self.weights, "model.norm", self.config.norm_eps)
        return Output(final_norm, None, Linear(self.ops, self.weights, ["lm_head"]))


architecture = Architecture(parse, spec, ModelBuilder, Decoder)
