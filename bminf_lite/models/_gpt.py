"""GPT-2, GPT-BigCode, OPT, GPT-NeoX and CPM-1: a decoder with LayerNorm, biases and no gate in the feed-forward layer.

They differ in how a checkpoint names and cuts its tensors (:class:`TensorNames`) and in fields of :class:`Config`:
learned positions or rotary ones, the norm before or after a layer, both layers one after the other or side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend.base import Backend
from ..backend.values import Array, AttentionSpec, ForwardBatch, LayerCache, Norm, Rope
from ..layers.attention import Attention
from ..layers.cache import CacheLayout
from ..layers.embedding import Embedding, PositionEmbedding
from ..layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from ..layers.loading import RowTransform, TransformedWeights, Weights
from ..layers.mlp import MLP
from ..layers.norm import NormLayer, layer_norm
from ._architecture import Architecture
from ._config import ModelConfig
from ._decoder import Decoder, Output
from ._rotary import Rotary, rotary_pairs
from .spec import Fold, KeyHeads, Spec, Tensors, embedding, head, linear, norm, weights_of


@dataclass(frozen=True)
class TensorNames:
    """Names of a checkpoint's tensors. Those from ``attention_norm`` to ``down`` follow ``{layers}.{i}``.

    ``qkv`` has one name where query, key and value are one matrix, else three. ``transposed``: matrices are stored
    ``[in, out]``. ``positions`` is the table of learned positions, and ``project_in`` and ``project_out`` lie between
    the embedding and the layers where their sizes differ. ``ignored`` and ``aliases`` are those of
    :class:`~bminf_lite.models.spec.Spec`.
    """

    embedding: str
    layers: str
    final_norm: str
    head: str
    attention_norm: str
    qkv: tuple[str, ...]
    attention_out: str
    mlp_norm: str
    up: str
    down: str
    positions: str | None = None
    project_in: str = ""
    project_out: str = ""
    transposed: bool = False
    ignored: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Config(ModelConfig):
    """The configuration of such a decoder.

    ``embedding_size`` differs from ``hidden_size`` where projections lie between the two. ``first_position`` is the
    first token's row in the table of learned positions. ``norm_first``: layers read a norm of the residual stream;
    otherwise the stream itself is normalised after each layer. ``parallel``: attention and feed-forward layer read the
    same stream. ``scale_scores``: attention scores are divided by the root of the head's size, and with
    ``scale_by_layer`` by the layer's number too. ``interleaved_qkv``: the fused matrix holds query, key and value head
    by head; otherwise it holds all queries, then all keys, then all values. ``multi_query``: there is one key-value
    head.
    """

    embedding_size: int
    names: TensorNames
    first_position: int = 0
    norm_first: bool = True
    final_norm: bool = True
    affine_norms: bool = True
    parallel: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    scale_scores: bool = True
    scale_by_layer: bool = False
    rotary: Rotary | None = None
    interleaved_qkv: bool = False
    multi_query: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    @property
    def kv_heads(self) -> int:
        return 1 if self.multi_query else self.heads

    @property
    def qkv_features(self) -> tuple[int, int, int]:
        """Widths of query, key and value."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim

    @property
    def is_projected(self) -> bool:
        """Whether projections lie between the embedding and the layers."""
        return self.embedding_size != self.hidden_size

    @property
    def cache_layout(self) -> CacheLayout:
        return CacheLayout.uniform(self.layers, self.kv_heads, self.head_dim)

    def score_scale(self, layer: int) -> float:
        scale = self.head_dim**-0.5 if self.scale_scores else 1.0
        return scale / (layer + 1) if self.scale_by_layer else scale


def spec(config: Config) -> Spec:
    """Every tensor of the checkpoint.

    Factors move from a norm to the matrices that read it, from values to the output of attention, and from ``up`` to
    ``down`` if a ReLU lies between. Norms whose output is the residual stream itself, which has other readers, and
    values in a fused matrix are left out.
    """
    names, hidden, inner = config.names, config.hidden_size, config.intermediate_size
    table = (config.vocab_size, config.embedding_size)
    tensors = embedding(names.embedding, table) | head(names.head, table)
    if names.positions is not None:
        tensors |= embedding(names.positions, (config.context_length + config.first_position, hidden))
    if config.is_projected:
        tensors |= linear(names.project_in, (hidden, config.embedding_size))
        tensors |= linear(names.project_out, (config.embedding_size, hidden))
    folds: list[Fold] = []
    value_heads: list[Fold] = []
    key_heads: list[KeyHeads] = []
    rotatable: list[str] = []
    for layer in range(config.layers):
        block = f"{names.layers}.{layer}"
        attention_out, up, down = (f"{block}.{name}" for name in (names.attention_out, names.up, names.down))
        qkv = [f"{block}.{name}" for name in names.qkv]
        qkv_width = sum(config.qkv_features) // len(qkv)
        qkv_tensors = [linear(name, (qkv_width, hidden), config.attention_bias, names.transposed) for name in qkv]
        up_tensors = linear(up, (inner, hidden), config.mlp_bias, names.transposed)
        norms = [norm_tensors(f"{block}.{name}", config) for name in (names.attention_norm, names.mlp_norm)]
        for part in qkv_tensors:
            tensors |= part
        tensors |= linear(attention_out, (hidden, hidden), config.attention_bias, names.transposed)
        tensors |= up_tensors | linear(down, (hidden, inner), config.mlp_bias, names.transposed)
        tensors |= norms[0] | norms[1]
        if config.norm_first and config.affine_norms:
            folds.append(Fold(tuple(norms[0]), weights_of(*qkv)))
            folds.append(Fold(tuple(norms[1]), weights_of(up)))
        if len(qkv) == 3:
            value_heads.append(Fold(tuple(qkv_tensors[2]), weights_of(attention_out), config.head_dim))
            pairs = rotary_pairs(config.rotary, config.head_dim)
            key_heads.append(KeyHeads(tuple(qkv_tensors[0]), tuple(qkv_tensors[1]), pairs))
        if config.activation == "relu":
            folds.append(Fold(tuple(up_tensors), weights_of(down)))
        rotatable += weights_of(down)
    if config.final_norm:
        final_norm = norm_tensors(names.final_norm, config)
        tensors |= final_norm
        if config.affine_norms and (config.is_projected or not config.tied_head):
            folds.append(Fold(tuple(final_norm), weights_of(names.project_out if config.is_projected else names.head)))
    tied = {f"{names.head}.weight": f"{names.embedding}.weight"} if config.tied_head else {}
    return Spec(
        tensors, tied, names.ignored, tuple(folds + value_heads), names.aliases, rotatable=tuple(rotatable),
        value_heads=tuple(value_heads), key_heads=tuple(key_heads),
    )  # fmt: skip


def norm_tensors(name: str, config: Config) -> Tensors:
    """Weight and bias of a LayerNorm; empty if norms have neither."""
    return norm(name, config.hidden_size, bias=True) if config.affine_norms else {}


def qkv_rows(config: Config) -> np.ndarray | None:
    """The rows of the fused matrix in the order that attention reads: queries, keys, values, head after head.

    None if they are in that order. The elements of query and key heads are in the order in which they are rotated.
    """
    if not config.interleaved_qkv:
        return None
    query, key, value = np.arange(3 * config.hidden_size).reshape(config.heads, 3, config.head_dim).swapaxes(0, 1)
    if config.rotary and (changed := config.rotary.head_transform(config.head_dim)):
        query, key = query[:, changed.order], key[:, changed.order]
    return np.concatenate([query.ravel(), key.ravel(), value.ravel()])


class Block:
    """``r = r + attention(norm(r))``, ``r = r + mlp(norm(r))``; see :class:`Config` for the other two forms."""

    def __init__(self, config: Config, weights: Weights, ops: Backend, layer: int, rope: Rope | None):
        names, name = config.names, f"{config.names.layers}.{layer}"
        self.ops = ops
        self.norm_first, self.parallel = config.norm_first, config.parallel
        rows, qkv = qkv_rows(config), [f"{name}.{n}" for n in names.qkv]
        qkv_weights = weights if rows is None else TransformedWeights(weights, {qkv[0]: RowTransform(rows)})
        attention_spec = AttentionSpec(
            config.heads, config.kv_heads, config.head_dim, config.score_scale(layer), rope=rope
        )
        self.attention = Attention(
            ops,
            attention_spec.shard(ops.communicator.tp_size),
            ColumnParallelLinear(ops, qkv_weights, qkv, config.qkv_features, config.attention_bias),
            RowParallelLinear(ops, weights, f"{name}.{names.attention_out}", config.attention_bias),
        )
        self.mlp = MLP(
            ops,
            config.activation,
            ColumnParallelLinear(ops, weights, [f"{name}.{names.up}"], [config.intermediate_size], config.mlp_bias),
            RowParallelLinear(ops, weights, f"{name}.{names.down}", config.mlp_bias),
        )
        self.attention_norm = make_norm(config, weights, ops, f"{name}.{names.attention_norm}")
        self.mlp_norm = make_norm(config, weights, ops, f"{name}.{names.mlp_norm}")

    def __call__(self, residual: Array, cache: LayerCache, batch: ForwardBatch, only_last: bool = False) -> Array:
        x = self.attention_norm(residual) if self.norm_first or self.parallel else residual
        heads = self.attention.attend(x, cache, batch, only_last)
        if only_last:
            residual = self.ops.last_tokens(residual, batch)
        if self.parallel:
            hidden = self.mlp.hidden(self.mlp_norm(residual))  # computed beside attention
            return self.mlp.down.add_to(self.attention.o.add_to(residual, heads), hidden)
        residual = self.attention.o.add_to(residual, heads)
        if self.norm_first:
            return self.mlp.add_to(residual, self.mlp_norm(residual))
        residual = self.attention_norm(residual)
        return self.mlp_norm(self.mlp.add_to(residual, residual))


def make_norm(config: Config, weights: Weights, ops: Backend, name: str) -> NormLayer:
    if config.affine_norms:
        return layer_norm(ops, weights, name, config.norm_eps)
    return NormLayer(ops, Norm(ops.vector(np.ones(config.hidden_size, np.float32)), config.norm_eps, center=True))


@dataclass(frozen=True)
class Input:
    """Tokens to the residual stream: the embedding, projected where it has another size, and positions."""

    embedding: Embedding
    project: Linear | None
    positions: PositionEmbedding | None

    def __call__(self, batch: ForwardBatch) -> Array:
        residual = self.embedding(batch)
        if self.project is not None:
            residual = self.project.fp32(residual)
        return residual if self.positions is None else self.positions.add_to(residual, batch)


class ModelBuilder:
    """Makes the parts of a model one at a time; see :class:`._decoder.DecoderBuilder`."""

    def __init__(self, config: Config, weights: Weights, ops: Backend):
        self.config = config
        self.weights = weights
        self.ops = ops
        self.rope = config.rotary.rope(ops, config.head_dim) if config.rotary else None

    def embed(self) -> Input:
        config, names = self.config, self.config.names
        positions = None
        if names.positions is not None:
            positions = PositionEmbedding(self.ops, self.weights, names.positions, config.first_position)
        return Input(Embedding(self.ops, self.weights, names.embedding), self._projection(names.project_in), positions)

    def block(self, layer: int) -> Block:
        return Block(self.config, self.weights, self.ops, layer, self.rope)

    def output(self) -> Output:
        config, names = self.config, self.config.names
        norm = make_norm(config, self.weights, self.ops, names.final_norm) if config.final_norm else None
        return Output(norm, self._projection(names.project_out), Linear(self.ops, self.weights, [names.head]))

    def _projection(self, name: str) -> Linear | None:
        return Linear(self.ops, self.weights, [name]) if self.config.is_projected else None


def gpt_architecture(parse: Callable[[Mapping[str, Any]], Config]) -> Architecture:
    return Architecture(parse, spec, ModelBuilder, Decoder)
