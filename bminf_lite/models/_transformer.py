"""A decoder with rotary positions, described by a :class:`Config`: LLaMA, its kin, and most decoders after it.

Families differ in how a checkpoint names and stacks its tensors (:class:`TensorNames`), where the norms are and which
(:class:`NormKind`), whether the feed-forward layer has a gate, which layers have windows and rotations, and in
multipliers. Multipliers, interleaved or partial rotations and norms with an offset are folded into the weights when
they are read, so the layers compute the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from ..backend.base import Backend
from ..backend.communicator import shard
from ..backend.values import Array, AttentionSpec, ForwardBatch, LayerCache, LinearBias, Rope
from ..layers.attention import Attention
from ..layers.cache import CacheLayout
from ..layers.embedding import Embedding, NormedEmbedding
from ..layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from ..layers.loading import RowTransform, TransformedWeights, Weights
from ..layers.mlp import MLP, GatedMLP
from ..layers.norm import NormLayer, layer_norm, rms_norm
from ..layers.whole_norms import AttentionWithWholeNorms
from ._config import ConfigReader, ModelConfig
from ._decoder import Output
from ._rotary import Rotary, rotary_pairs
from .spec import (
    Fold,
    GatedProduct,
    KeyHeads,
    ResidualStream,
    Spec,
    StreamNorm,
    Tensors,
    bias,
    embedding,
    head,
    linear,
    norm,
    weights_of,
)


@dataclass(frozen=True)
class TensorNames:
    """Names of a checkpoint's tensors. Those from ``qkv`` on, if they exist, follow ``{layers}.{i}``.

    ``qkv`` has one name where query, key and value are one matrix, else three. ``mlp_in`` has the name of the gate and
    of the layer beside it, one name for both where they are one matrix, or that of the only layer. ``attention_norm``
    and ``mlp_norm`` are read by the two layers, and ``attention_post_norm`` and ``mlp_post_norm`` normalise their
    results. In a parallel block without ``mlp_norm``, both layers read ``attention_norm``.
    """

    embedding: str = "model.embed_tokens"
    embedding_norm: str | None = None
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attention_out: str = "self_attn.o_proj"
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    mlp_out: str = "mlp.down_proj"
    attention_norm: str | None = "input_layernorm"
    mlp_norm: str | None = "post_attention_layernorm"
    attention_post_norm: str | None = None
    mlp_post_norm: str | None = None
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def norms(self) -> list[str]:
        """The norms that a layer has."""
        found = (self.attention_norm, self.mlp_norm, self.attention_post_norm, self.mlp_post_norm)
        return [name for name in found if name is not None]


class NormKind(Enum):
    """RMSNorm, or LayerNorm with or without a bias."""

    RMS = "rms"
    LAYER = "layer"
    LAYER_WITHOUT_BIAS = "layer without bias"


class QueryKeyNorm(Enum):
    """The RMSNorm of queries and keys: none, of each head, or of all heads together."""

    NONE = "none"
    HEAD = "head"
    WHOLE = "whole"


@dataclass(frozen=True)
class Config(ModelConfig):
    """The configuration of such a decoder.

    ``rotary`` and ``windows`` have an entry for each layer: the rotation of queries and keys and the attention window,
    or None. ``gated``: the feed-forward layer has a gate. ``parallel``: attention and feed-forward layer read the same
    residual stream. ``norm_offset`` is added to the weights of norms. ``score_scale`` multiplies attention scores; None
    means one over the root of the head's size. ``embedding_multiplier``, ``residual_multiplier`` and
    ``logits_multiplier`` multiply the embedding, what each layer adds to the residual stream, and the logits.
    ``attention_softcap`` and ``logits_softcap`` limit attention scores and logits. ``alibi_slopes`` has the slope of
    each head in a model with ALiBi (see :class:`~bminf_lite.backend.values.LinearBias`), else it is empty.
    ``fused_rows`` gives the rows of a fused query, key and value matrix, as stored, in the order queries, keys, values;
    None if they are in that order.
    """

    kv_heads: int
    head_dim: int
    rotary: tuple[Rotary | None, ...]
    windows: tuple[int | None, ...]
    names: TensorNames = TensorNames()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    gated: bool = True
    parallel: bool = False
    norm_kind: NormKind = NormKind.RMS
    norm_offset: float = 0.0
    qk_norm: QueryKeyNorm = QueryKeyNorm.NONE
    score_scale: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    alibi_slopes: tuple[float, ...] = ()
    fused_rows: Callable[[Config], np.ndarray] | None = None

    @property
    def cache_layout(self) -> CacheLayout:
        return CacheLayout.uniform(self.layers, self.kv_heads, self.head_dim, self.windows)

    @property
    def shared_norm_vectors(self) -> int:
        if not self.parallel or self.names.mlp_norm is not None:
            return 0
        return self.layers * (1 if self.norm_kind is NormKind.RMS else 2)

    @property
    def max_tp_size(self) -> int:
        return 1 if self.qk_norm is QueryKeyNorm.WHOLE else super().max_tp_size

    def tp_problems(self, tp_size: int) -> list[str]:
        problems = super().tp_problems(tp_size)
        if tp_size > 1 and self.qk_norm is QueryKeyNorm.WHOLE:
            problems.append("queries and keys are normalised over all heads, of which a rank has a part")
        return problems

    @property
    def query_features(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_features(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_features(self) -> tuple[int, int, int]:
        """Widths of query, key and value."""
        return self.query_features, self.kv_features, self.kv_features


FULL, SLIDING = "full_attention", "sliding_attention"


def layer_types(read: ConfigReader, default: list[str]) -> list[str]:
    """``layer_types``: for each layer :data:`FULL`, or :data:`SLIDING` for a layer with a window."""
    types, layers = read.config.get("layer_types"), read.fields["layers"]
    if types is None:
        return default
    if not isinstance(types, list) or len(types) != layers or not all(t in (FULL, SLIDING) for t in types):
        read.problem("layer_types", f"layer_types is {types!r}, not {layers} times one of {FULL}, {SLIDING}")
        return default
    return types


def grouped_rows(config: Config) -> np.ndarray:
    """Rows of a fused matrix that holds, for each key-value head, its query heads, the key and the value."""
    group = config.heads // config.kv_heads
    rows = np.arange(sum(config.qkv_features)).reshape(config.kv_heads, group + 2, config.head_dim)
    return np.concatenate([rows[:, :group].ravel(), rows[:, group].ravel(), rows[:, group + 1].ravel()])


# -- the checkpoint ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerNames:
    """The full names of a layer's tensors, whose ends are in :class:`TensorNames`; ``number`` counts from 0."""

    number: int
    block: str
    qkv: tuple[str, ...]
    attention_out: str
    mlp_in: tuple[str, ...]
    mlp_out: str

    @classmethod
    def of(cls, config: Config, layer: int) -> LayerNames:
        """Those of layer ``layer``."""
        names, block = config.names, f"{config.names.layers}.{layer}"
        qkv, mlp_in = (tuple(f"{block}.{name}" for name in part) for part in (names.qkv, names.mlp_in))
        return cls(layer, block, qkv, f"{block}.{names.attention_out}", mlp_in, f"{block}.{names.mlp_out}")


def spec(config: Config) -> Spec:
    """Every tensor of the checkpoint.

    Factors move from a norm to the matrices that read it, from value heads to the output of attention, and from a
    gated layer or one with a ReLU to the matrix after it. Norms with an offset, norms whose output is added to the
    residual stream, and parts of fused matrices are left out.
    """
    names, table = config.names, (config.vocab_size, config.hidden_size)
    layers = [LayerNames.of(config, layer) for layer in range(config.layers)]
    tensors = embedding(names.embedding, table) | norm_tensors(names.final_norm, config) | head(names.head, table)
    if names.embedding_norm is not None:
        tensors |= norm_tensors(names.embedding_norm, config)
    if config.head_bias:
        tensors |= bias(names.head, config.vocab_size)
    for layer in layers:
        tensors |= layer_tensors(config, layer)
    folds = [fold for layer in layers for fold in layer_folds(config, layer)]
    if not config.tied_head and not config.norm_offset:
        folds.append(Fold(tuple(norm_tensors(names.final_norm, config)), weights_of(names.head)))
    separate = [] if len(names.qkv) == 1 else layers
    value_heads = tuple(value_fold(config, layer) for layer in separate)
    scaled_keys = separate if config.qk_norm is QueryKeyNorm.NONE else []
    return Spec(
        tensors,
        tied={f"{names.head}.weight": f"{names.embedding}.weight"} if config.tied_head else {},
        ignored=names.ignored,
        foldable=(*folds, *value_heads),
        aliases=names.aliases,
        rotatable=weights_of(*(layer.mlp_out for layer in layers)),
        stream=residual_stream(config, layers) if has_rotatable_stream(config) else None,
        value_heads=value_heads,
        gated=tuple(product for layer in layers if (product := gated_product(config, layer)) is not None),
        key_heads=tuple(key_heads(config, layer) for layer in scaled_keys),
    )


def matrices(config: Config, layer: LayerNames) -> dict[str, Tensors]:
    """The matrices of a layer, each with its bias if it has one."""
    hidden, inner = config.hidden_size, config.intermediate_size
    widths = config.qkv_features if len(layer.qkv) == 3 else (sum(config.qkv_features),)
    inner_width = (2 if config.gated else 1) * inner // len(layer.mlp_in)
    shapes = [(name, (width, hidden), config.qkv_bias) for name, width in zip(layer.qkv, widths, strict=True)]
    shapes.append((layer.attention_out, (hidden, config.query_features), config.o_bias))
    shapes += [(name, (inner_width, hidden), config.mlp_bias) for name in layer.mlp_in]
    shapes.append((layer.mlp_out, (hidden, inner), config.mlp_bias))
    return {name: linear(name, shape, has_bias) for name, shape, has_bias in shapes}


def layer_tensors(config: Config, layer: LayerNames) -> Tensors:
    """All tensors of a layer: matrices, norms of the residual stream, norms of queries and keys."""
    tensors: Tensors = {}
    for part in matrices(config, layer).values():
        tensors |= part
    for name in config.names.norms:
        tensors |= norm_tensors(f"{layer.block}.{name}", config)
    if config.qk_norm is not QueryKeyNorm.NONE:
        heads = (config.heads, config.kv_heads) if config.qk_norm is QueryKeyNorm.WHOLE else (1, 1)
        for name, count in zip((config.names.q_norm, config.names.k_norm), heads, strict=True):
            tensors |= norm(f"{layer.block}.{name}", count * config.head_dim)
    return tensors


def layer_folds(config: Config, layer: LayerNames) -> list[Fold]:
    """From norms to the matrices that read them, and into the second matrix of the feed-forward layer."""
    readers = [] if config.norm_offset else norm_readers(config, layer)
    folds = [Fold(tuple(norm_tensors(name, config)), weights_of(*read)) for name, read in readers]
    is_separate = len(layer.mlp_in) == (2 if config.gated else 1)
    if is_separate and (config.gated or config.activation == "relu"):
        folds.append(Fold(tuple(matrices(config, layer)[layer.mlp_in[-1]]), weights_of(layer.mlp_out)))
    return folds


def value_fold(config: Config, layer: LayerNames) -> Fold:
    """From the matrix of values, which is one of three, to the output of attention."""
    value = matrices(config, layer)[layer.qkv[2]]
    return Fold(tuple(value), weights_of(layer.attention_out), config.head_dim, config.heads // config.kv_heads)


def key_heads(config: Config, layer: LayerNames) -> KeyHeads:
    """The heads of queries and keys, which have matrices of their own and no norm."""
    query, key = (tuple(matrices(config, layer)[name]) for name in layer.qkv[:2])
    pairs = rotary_pairs(config.rotary[layer.number], config.head_dim)
    return KeyHeads(query, key, pairs, config.heads // config.kv_heads)


def gated_product(config: Config, layer: LayerNames) -> GatedProduct | None:
    """The feed-forward layer, if it is one that a norm feeds."""
    norms = [name for name, read in norm_readers(config, layer) if layer.mlp_in[0] in read]
    if not norms or not has_bounded_gate(config):
        return None
    gate, up, down = weights_of(layer.mlp_in[0], layer.mlp_in[-1], layer.mlp_out)
    return GatedProduct(gate, up, down, f"{norms[0]}.weight", config.norm_offset)


def residual_stream(config: Config, layers: list[LayerNames]) -> ResidualStream:
    """The tensors around the residual stream."""
    readers = [reader for layer in layers for reader in norm_readers(config, layer)]
    readers.append((config.names.final_norm, (config.names.head,)))
    norms = (StreamNorm(f"{name}.weight", weights_of(*read), config.norm_offset) for name, read in readers)
    written = (
        name
        for layer in layers
        for last in (layer.attention_out, layer.mlp_out)
        for name in matrices(config, layer)[last]
    )
    return ResidualStream(weights_of(config.names.embedding), tuple(norms), tuple(written))


def has_rotatable_stream(config: Config) -> bool:
    """Whether the residual stream starts at the embedding, and layers read RMSNorms of it and add to it directly."""
    names = config.names
    has_norms = names.attention_norm is not None and (names.mlp_norm is not None or config.parallel)
    has_others = names.embedding_norm or names.attention_post_norm or names.mlp_post_norm
    return config.norm_kind is NormKind.RMS and has_norms and not has_others


def has_bounded_gate(config: Config) -> bool:
    """Whether the feed-forward layer is a :class:`.spec.GatedProduct`."""
    is_bounded = config.gated and config.activation != "relu_squared"
    return is_bounded and not config.mlp_bias and config.norm_kind is not NormKind.LAYER


def norm_readers(config: Config, layer: LayerNames) -> list[tuple[str, tuple[str, ...]]]:
    """The norms of the residual stream in a layer, and the matrices that read each."""
    names = config.names
    readers = [(names.attention_norm, layer.qkv), (names.mlp_norm, layer.mlp_in)]
    if config.parallel and names.mlp_norm is None:
        readers = [(names.attention_norm, (*layer.qkv, *layer.mlp_in))]
    return [(f"{layer.block}.{name}", read) for name, read in readers if name is not None]


def norm_tensors(name: str, config: Config) -> Tensors:
    """The weight of a norm, and its bias if it has one."""
    return norm(name, config.hidden_size, bias=config.norm_kind is NormKind.LAYER)


# -- the layers -------------------------------------------------------------------------------------------------------


def row_transforms(config: Config, layer: int) -> dict[str, RowTransform]:
    """The changes of a layer's tensors as they are read, by name."""
    names, block, rotary = config.names, f"{config.names.layers}.{layer}", config.rotary[layer]
    changes: dict[str, RowTransform] = {}
    if config.residual_multiplier != 1:
        for name in (names.attention_out, names.mlp_out):
            changes[f"{block}.{name}"] = RowTransform(factors=config.residual_multiplier)
    of_head = rotary.head_transform(config.head_dim) if rotary else None
    if of_head is None and config.fused_rows is None:
        return changes
    rows = np.arange(sum(config.qkv_features)) if config.fused_rows is None else config.fused_rows(config)
    parts = [part.reshape(-1, config.head_dim) for part in np.split(rows, np.cumsum(config.qkv_features)[:-1])]
    factors = [np.ones(part.shape, np.float32) for part in parts]
    if of_head is not None:
        for i in range(2):
            parts[i] = parts[i][:, of_head.order]
            factors[i] *= 1 if of_head.factors is None else of_head.factors
    has_factors = of_head is not None and of_head.factors is not None
    if len(names.qkv) == 1:
        order, all_factors = (np.concatenate([part.ravel() for part in x]) for x in (parts, factors))
        changes[f"{block}.{names.qkv[0]}"] = RowTransform(order, all_factors if has_factors else None)
        return changes
    for name, norm_name, part, factor in zip(names.qkv, (names.q_norm, names.k_norm), parts, factors, strict=False):
        order = part.ravel() - part.min()
        changes[f"{block}.{name}"] = RowTransform(order, factor.ravel() if has_factors else None)
        whole = config.qk_norm is QueryKeyNorm.WHOLE
        changes[f"{block}.{norm_name}"] = RowTransform(order if whole else order[: config.head_dim])
    return changes


class Block:
    """``r = r + attention(norm(r))``, ``r = r + mlp(norm(r))``; see :class:`TensorNames` and :class:`Config`."""

    def __init__(
        self, config: Config, weights: Weights, ops: Backend, layer: int, rope: Rope | None, alibi: LinearBias | None
    ):
        names, block = config.names, f"{config.names.layers}.{layer}"
        self.ops = ops
        self.parallel = config.parallel
        self.attention_norm, self.mlp_norm, self.attention_post_norm, self.mlp_post_norm = (
            None if name is None else make_norm(config, weights, ops, f"{block}.{name}")
            for name in (names.attention_norm, names.mlp_norm, names.attention_post_norm, names.mlp_post_norm)
        )
        changed = TransformedWeights(weights, row_transforms(config, layer))
        q_norm, k_norm = (
            None
            if config.qk_norm is QueryKeyNorm.NONE
            else rms_norm(ops, changed, f"{block}.{n}", config.norm_eps, offset=config.norm_offset)
            for n in (names.q_norm, names.k_norm)
        )
        of_head = config.qk_norm is QueryKeyNorm.HEAD
        scale = config.head_dim**-0.5 if config.score_scale is None else config.score_scale
        attention_spec = AttentionSpec(
            config.heads,
            config.kv_heads,
            config.head_dim,
            scale,
            window=config.windows[layer],
            rope=rope,
            q_norm=q_norm.norm if q_norm and of_head else None,
            k_norm=k_norm.norm if k_norm and of_head else None,
            bias=alibi,
            softcap=config.attention_softcap,
        ).shard(ops.communicator.tp_size)
        qkv_names, mlp_names = ([f"{block}.{name}" for name in part] for part in (names.qkv, names.mlp_in))
        inner = (config.intermediate_size,) * (2 if config.gated else 1)
        o = RowParallelLinear(ops, changed, f"{block}.{names.attention_out}", config.o_bias)
        qkv = ColumnParallelLinear(ops, changed, qkv_names, config.qkv_features, config.qkv_bias)
        self.attention: Attention | AttentionWithWholeNorms
        if config.qk_norm is QueryKeyNorm.WHOLE and q_norm and k_norm:
            self.attention = AttentionWithWholeNorms(ops, attention_spec, qkv, o, q_norm.norm, k_norm.norm)
        else:
            self.attention = Attention(ops, attention_spec, qkv, o)
        mlp_in = ColumnParallelLinear(ops, changed, mlp_names, inner, config.mlp_bias)
        mlp_out = RowParallelLinear(ops, changed, f"{block}.{names.mlp_out}", config.mlp_bias)
        self.mlp = (GatedMLP if config.gated else MLP)(ops, config.activation, mlp_in, mlp_out)

    def __call__(self, residual: Array, cache: LayerCache, batch: ForwardBatch, only_last: bool = False) -> Array:
        if self.parallel:
            return self._parallel(residual, cache, batch, only_last)
        x = self.attention_norm(residual) if self.attention_norm else residual
        heads = self.attention.attend(x, cache, batch, only_last)
        if only_last:
            residual = self.ops.last_tokens(residual, batch)
        if self.attention_post_norm:
            residual = self.ops.norm_add(self.attention.o.fp32(heads), self.attention_post_norm.norm, residual)
        else:
            residual = self.attention.o.add_to(residual, heads)
        x = self.mlp_norm(residual) if self.mlp_norm else residual
        if self.mlp_post_norm:
            return self.ops.norm_add(self.mlp.down.fp32(self.mlp.hidden(x)), self.mlp_post_norm.norm, residual)
        return self.mlp.add_to(residual, x)

    def _parallel(self, residual: Array, cache: LayerCache, batch: ForwardBatch, only_last: bool) -> Array:
        assert self.attention_norm is not None
        x = self.attention_norm(residual)
        heads = self.attention.attend(x, cache, batch, only_last)
        if only_last:
            residual = self.ops.last_tokens(residual, batch)
            x = self.attention_norm(residual)
        hidden = self.mlp.hidden(self.mlp_norm(residual) if self.mlp_norm else x)  # computed beside attention
        return self.mlp.down.add_to(self.attention.o.add_to(residual, heads), hidden)


def make_norm(config: Config, weights: Weights, ops: Backend, name: str, scale: float = 1.0) -> NormLayer:
    """The norm ``name``, its result multiplied by ``scale``."""
    if config.norm_kind is NormKind.RMS:
        return rms_norm(ops, weights, name, config.norm_eps, scale, config.norm_offset)
    has_bias = config.norm_kind is NormKind.LAYER
    return layer_norm(ops, weights, name, config.norm_eps, scale, config.norm_offset, has_bias)


class ModelBuilder:
    """Makes the parts of a model one at a time; see :class:`._decoder.DecoderBuilder`."""

    def __init__(self, config: Config, weights: Weights, ops: Backend):
        self.config = config
        self.weights = weights
        self.ops = ops
        self.ropes = {rotary: rotary.rope(ops, config.head_dim) for rotary in dict.fromkeys(config.rotary) if rotary}
        slopes = np.array(config.alibi_slopes)[shard(len(config.alibi_slopes), ops.communicator)]
        self.alibi = LinearBias(ops.vector(slopes)) if config.alibi_slopes else None

    def embed(self) -> Embedding | NormedEmbedding:
        names = self.config.names
        embedding = Embedding(self.ops, self.weights, names.embedding, self.config.embedding_multiplier)
        if names.embedding_norm is None:
            return embedding
        return NormedEmbedding(embedding, make_norm(self.config, self.weights, self.ops, names.embedding_norm))

    def block(self, layer: int) -> Block:
        rotary = self.config.rotary[layer]
        return Block(self.config, self.weights, self.ops, layer, self.ropes[rotary] if rotary else None, self.alibi)

    def output(self) -> Output:
        config, names = self.config, self.config.names
        final_norm = make_norm(config, self.weights, self.ops, names.final_norm, config.logits_multiplier)
        lm_head = Linear(self.ops, self.weights, [names.head], config.head_bias)
        return Output(final_norm, None, lm_head, config.logits_softcap)
