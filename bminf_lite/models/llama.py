"""LLaMA 2 and 3 (https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2407.21783), and what its kin share.

A pre-norm decoder: RMSNorm, grouped-query attention with rotary positions, a gated feed-forward layer. Mistral and
Qwen differ by a window, biases or a norm on queries and keys: fields of :class:`Config` that their files set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend.base import Backend
from ..backend.values import Array, AttentionSpec, ForwardBatch, LayerCache, Rope
from ..layers.attention import Attention
from ..layers.cache import CacheShape
from ..layers.embedding import Embedding
from ..layers.linear import Linear, LMHead
from ..layers.loading import Weights
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm, load_rms_norm
from ..layers.position import rope_frequencies, rope_parameters
from ._config import ConfigReader
from ._decoder import Decoder, Output
from .spec import Fold, Parameter, Role, Spec

DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
"""What transformers takes for a key that is absent, where that is not the same for the whole family."""

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
"""Names in configurations -> names in ``backend.base.ACTIVATIONS``."""


@dataclass(frozen=True)
class Config:
    """The shape of a model; lengths in tokens, sizes in elements.

    ``windows`` has an entry per layer: the attention window, or None. ``frequencies`` are the rotary frequencies and
    ``rope_scale`` the factor on cosine and sine.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float
    activation: str
    tied_head: bool
    frequencies: tuple[float, ...]
    rope_scale: float
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def cache_shape(self) -> CacheShape:
        """What the model keeps per token."""
        return CacheShape(self.layers, self.kv_heads, self.head_dim)


def parse(config: dict[str, Any]) -> Config:
    """LLaMA's configuration. Absent keys mean transformers' defaults for the class."""
    read = ConfigReader(config, DEFAULTS)
    bias = read.flag("attention_bias", False)
    return parse_decoder(read, qkv_bias=bias, o_bias=bias, mlp_bias=read.flag("mlp_bias", False))


def parse_decoder(
    read: ConfigReader,
    *,
    windows: tuple[int | None, ...] | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> Config:
    """The keys that the family shares. ``windows`` has an entry per layer; without it no layer has a window."""
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    layers = read.layers()
    kv_heads = read.integer("num_key_value_heads", heads)
    head_dim = read.integer("head_dim", max(hidden // heads, 1), high=1024)
    read.require(
        hidden % heads == 0 or read.config.get("head_dim") is not None,
        f"hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads})",
        "hidden_size", "num_attention_heads",
    )  # fmt: skip
    read.require(
        heads % kv_heads == 0,
        f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})",
        "num_attention_heads", "num_key_value_heads",
    )  # fmt: skip
    read.require(
        head_dim % 2 == 0,
        f"head_dim ({head_dim}) is odd, which rotary positions do not allow",
        "head_dim", "hidden_size", "num_attention_heads",
    )  # fmt: skip
    context = read.integer("max_position_embeddings")
    try:
        frequencies, rope_scale = rope_frequencies(rope_parameters(read.config), head_dim + head_dim % 2, context)
    except ValueError as error:
        read.problem("rope_parameters", str(error))
        frequencies, rope_scale = np.ones(1, np.float32), 1.0
    result = Config(
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context,
        norm_eps=read.number("rms_norm_eps", 1e-6, high=1.0),
        activation=read.choice("hidden_act", "silu", ACTIVATIONS),
        tied_head=read.flag("tie_word_embeddings", False),
        frequencies=tuple(map(float, frequencies)),
        rope_scale=rope_scale,
        windows=windows or (None,) * layers,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )
    read.raise_problems()
    return result


def spec(config: Config) -> Spec:
    """Every tensor of the checkpoint."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    tensors = {
        "model.embed_tokens.weight": Parameter((config.vocab_size, hidden), Role.EMBEDDING),
        "model.norm.weight": Parameter((hidden,), Role.VECTOR),
        "lm_head.weight": Parameter((config.vocab_size, hidden), Role.HEAD),
    }
    linears = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    vectors = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        vectors |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        for name, (out_features, in_features, bias) in linears.items():
            tensors[f"{prefix}.{name}.weight"] = Parameter((out_features, in_features), Role.LINEAR)
            if bias:
                tensors[f"{prefix}.{name}.bias"] = Parameter((out_features,), Role.VECTOR)
        for name, width in vectors.items():
            tensors[f"{prefix}.{name}.weight"] = Parameter((width,), Role.VECTOR)
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tied_head else {}
    folds = [fold for layer in range(config.layers) for fold in _folds(config, f"model.layers.{layer}")]
    if not config.tied_head:
        folds.append(Fold(("model.norm.weight",), ("lm_head.weight",)))
    return Spec(tensors, tied, ignored=(r".*rotary_emb\.inv_freq",), foldable=tuple(folds))


def _folds(config: Config, prefix: str) -> list[Fold]:
    """Norm to what reads it, value heads to the query heads that share them, and up to down."""
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    v = (f"{attention}.v_proj.weight", *([f"{attention}.v_proj.bias"] if config.qkv_bias else []))
    up = (f"{mlp}.up_proj.weight", *([f"{mlp}.up_proj.bias"] if config.mlp_bias else []))
    qkv = tuple(f"{attention}.{x}_proj.weight" for x in "qkv")
    return [
        Fold((f"{prefix}.input_layernorm.weight",), qkv),
        Fold(v, (f"{attention}.o_proj.weight",), config.head_dim, config.heads // config.kv_heads),
        Fold((f"{prefix}.post_attention_layernorm.weight",), (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")),
        Fold(up, (f"{mlp}.down_proj.weight",)),
    ]


class Block:
    """``r = r + attention(norm(r))``, ``r = r + mlp(norm(r))``."""

    def __init__(self, config: Config, weights: Weights, ops: Backend, layer: int, rope: Rope):
        name = f"model.layers.{layer}"
        q_norm, k_norm = (
            load_rms_norm(ops, weights, f"{name}.self_attn.{x}_norm", config.norm_eps) if config.qk_norm else None
            for x in "qk"
        )
        attention = AttentionSpec(
            config.heads, config.kv_heads, config.head_dim, config.head_dim**-0.5, config.windows[layer], rope,
            q_norm, k_norm,
        )  # fmt: skip
        self.input_norm = RMSNorm(ops, weights, f"{name}.input_layernorm", config.norm_eps)
        self.attention = Attention(
            ops,
            attention,
            Linear(ops, weights, [f"{name}.self_attn.{x}_proj" for x in "qkv"], config.qkv_bias),
            Linear(ops, weights, [f"{name}.self_attn.o_proj"], config.o_bias),
        )
        self.post_norm = RMSNorm(ops, weights, f"{name}.post_attention_layernorm", config.norm_eps)
        self.mlp = GatedMLP(ops, weights, f"{name}.mlp", config.activation, config.mlp_bias)

    def __call__(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        residual = self.attention.add_to(residual, self.input_norm(residual), cache, batch)
        return self.mlp.add_to(residual, self.post_norm(residual))


class ModelBuilder:
    """The model's parts, each made when it is asked for: run one after another, they need memory for one."""

    def __init__(self, config: Config, weights: Weights, ops: Backend):
        self.config = config
        self.weights = weights
        self.ops = ops
        self.rope = Rope(ops.vector(np.array(config.frequencies, np.float32)), config.rope_scale)

    def embed(self) -> Callable[[ForwardBatch], Array]:
        """A step's tokens to the residual stream."""
        embedding = Embedding(self.ops, self.weights, "model.embed_tokens")
        return lambda batch: embedding(batch.tokens)

    def block(self, layer: int) -> Block:
        """The layer of that number, from 0 on."""
        return Block(self.config, self.weights, self.ops, layer, self.rope)

    def output(self) -> Output:
        """What follows the last layer."""
        norm = RMSNorm(self.ops, self.weights, "model.norm", self.config.norm_eps)
        return Output(norm, LMHead(self.ops, self.weights, ["lm_head"]))


class Model(Decoder):
    """Tokens in, logits out."""

    def __init__(self, config: Config, weights: Weights, ops: Backend):
        super().__init__(config, ModelBuilder(config, weights, ops), ops)
