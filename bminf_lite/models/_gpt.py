"""What GPT-2 and its kin share: a decoder with LayerNorm, biases and a feed-forward layer without a gate.

They differ in how a checkpoint names and cuts its tensors (:class:`TensorNames`) and in fields of :class:`Config`:
learned positions or rotary ones, the norm before or after a layer, both layers one after the other or side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..backend.base import Backend
from ..backend.values import Array, AttentionSpec, ForwardBatch, LayerCache, Norm, Rope
from ..layers.attention import Attention
from ..layers.cache import CacheShape
from ..layers.embedding import Embedding, PositionEmbedding
from ..layers.linear import Linear, LMHead
from ..layers.loading import PermutedWeights, Weights
from ..layers.mlp import MLP
from ..layers.norm import LayerNorm
from ._decoder import Decoder
from .spec import Fold, Parameter, Role, Spec

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Names in configurations -> names in ``backend.base.ACTIVATIONS``."""


@dataclass(frozen=True)
class TensorNames:
    """Where a checkpoint keeps what. Names from ``attention_norm`` on are those within ``{layers}.{i}``.

    ``qkv`` has one name where query, key and value are one matrix, else three. ``transposed``: its matrices are stored
    ``[in, out]``. ``positions`` is empty for a model without learned positions. ``ignored`` and
    ``aliases`` are those of :class:`~bminf_lite.models.spec.Spec`.
    """

    embedding: str
    positions: str
    layers: str
    final_norm: str
    head: str
    attention_norm: str
    qkv: tuple[str, ...]
    attention_out: str
    mlp_norm: str
    up: str
    down: str
    project_in: str = ""
    project_out: str = ""
    transposed: bool = False
    ignored: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Config:
    """The shape of a model; lengths in tokens, sizes in elements.

    ``embedding_size`` differs from ``hidden_size`` where projections lie between the two. ``first_position`` is the row
    of the table of learned positions that the first token gets. ``norm_first``: layers read a norm of the residual
    stream; otherwise the stream itself is normalised after each layer. ``parallel``: attention and feed-forward layer
    read the same stream. ``scales`` multiply the attention scores of each layer. ``rotary`` holds a frequency for each
    pair of a head's elements, none without rotary positions. ``interleaved_qkv``: the fused matrix holds query, key
    and value of one head after another, and not all queries first.
    """

    vocab_size: int
    hidden_size: int
    embedding_size: int
    intermediate_size: int
    layers: int
    heads: int
    context_length: int
    norm_eps: float
    activation: str
    tied_head: bool
    scales: tuple[float, ...]
    names: TensorNames
    first_position: int = 0
    norm_first: bool = True
    final_norm: bool = True
    affine_norms: bool = True
    parallel: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    rotary: tuple[float, ...] = ()
    rotary_size: int = 0
    rope_scale: float = 1.0
    interleaved_qkv: bool = False

    @property
    def head_dim(self) -> int:
        """Elements of an attention head."""
        return self.hidden_size // self.heads

    @property
    def cache_shape(self) -> CacheShape:
        """What the model keeps per token."""
        return CacheShape(self.layers, self.heads, self.head_dim)


def spec(config: Config) -> Spec:
    """Every tensor of the checkpoint."""
    names = config.names
    hidden, embedding = config.hidden_size, config.embedding_size
    tensors = {
        f"{names.embedding}.weight": Parameter((config.vocab_size, embedding), Role.EMBEDDING),
        f"{names.head}.weight": Parameter((config.vocab_size, embedding), Role.HEAD),
    }
    if names.positions:
        rows = config.context_length + config.first_position
        tensors[f"{names.positions}.weight"] = Parameter((rows, hidden), Role.EMBEDDING)
    if embedding != hidden:
        tensors[f"{names.project_in}.weight"] = Parameter((hidden, embedding), Role.LINEAR)
        tensors[f"{names.project_out}.weight"] = Parameter((embedding, hidden), Role.LINEAR)
    for layer in range(config.layers):
        tensors |= {f"{names.layers}.{layer}.{name}": p for name, p in layer_tensors(config)}
    if config.final_norm:
        tensors |= norm_tensors(names.final_norm, config)
    tied = {f"{names.head}.weight": f"{names.embedding}.weight"} if config.tied_head else {}
    return Spec(tensors, tied, names.ignored, tuple(folds(config)), names.aliases)


def folds(config: Config) -> Iterator[Fold]:
    """Norm to what reads it, values to the output of attention, and up to down where a ReLU lies between.

    Norms whose output is the residual stream itself have other readers, and values in a fused matrix are left out.
    """
    names = config.names
    for layer in range(config.layers):
        name = f"{names.layers}.{layer}"
        if config.norm_first and config.affine_norms:
            yield Fold(_with_bias(f"{name}.{names.attention_norm}"), tuple(f"{name}.{x}.weight" for x in names.qkv))
            yield Fold(_with_bias(f"{name}.{names.mlp_norm}"), (f"{name}.{names.up}.weight",))
        if len(names.qkv) == 3:
            values = _with_bias(f"{name}.{names.qkv[2]}", config.attention_bias)
            yield Fold(values, (f"{name}.{names.attention_out}.weight",))
        if config.activation == "relu":
            yield Fold(_with_bias(f"{name}.{names.up}", config.mlp_bias), (f"{name}.{names.down}.weight",))
    if config.final_norm and config.affine_norms:
        projected = config.embedding_size != config.hidden_size
        reader = names.project_out if projected else "" if config.tied_head else names.head
        if reader:
            yield Fold(_with_bias(names.final_norm), (f"{reader}.weight",))


def _with_bias(name: str, bias: bool = True) -> tuple[str, ...]:
    return (f"{name}.weight", f"{name}.bias") if bias else (f"{name}.weight",)


def layer_tensors(config: Config) -> Iterator[tuple[str, Parameter]]:
    """The tensors of one layer, named within it."""
    names = config.names
    hidden, inner = config.hidden_size, config.intermediate_size
    qkv = 3 * hidden // len(names.qkv)
    linears = [
        *((name, qkv, hidden, config.attention_bias) for name in names.qkv),
        (names.attention_out, hidden, hidden, config.attention_bias),
        (names.up, inner, hidden, config.mlp_bias),
        (names.down, hidden, inner, config.mlp_bias),
    ]
    for name, out_features, in_features, bias in linears:
        shape = (in_features, out_features) if names.transposed else (out_features, in_features)
        yield f"{name}.weight", Parameter(shape, Role.LINEAR, names.transposed)
        if bias:
            yield f"{name}.bias", Parameter((out_features,), Role.VECTOR)
    for name in (names.attention_norm, names.mlp_norm):
        yield from norm_tensors(name, config).items()


def norm_tensors(name: str, config: Config) -> dict[str, Parameter]:
    """Gain and bias of a LayerNorm; nothing where it has neither."""
    parts = ("weight", "bias") if config.affine_norms else ()
    return {f"{name}.{part}": Parameter((config.hidden_size,), Role.VECTOR) for part in parts}


def qkv_rows(config: Config) -> np.ndarray | None:
    """The rows of the fused matrix in the order that attention takes them: queries, keys, values, head after head.

    None where they are in that order. Where only the first ``rotary_size`` elements of a head are rotated, a head's
    elements get another order, with the rotated ones at the start of either half. Queries and keys get the same, so
    their products stay what they are; and rotation with a frequency of zero leaves the others as they are.
    """
    if not config.interleaved_qkv:
        return None
    heads, head_dim, rotated = config.heads, config.head_dim, config.rotary_size
    query, key, value = np.arange(3 * config.hidden_size).reshape(heads, 3, head_dim).swapaxes(0, 1)
    if rotated < head_dim:
        quarters = np.split(np.arange(head_dim), [rotated // 2, rotated, (head_dim + rotated) // 2])
        order = np.concatenate([quarters[i] for i in (0, 2, 1, 3)])
        query, key = query[:, order], key[:, order]
    return np.concatenate([query.ravel(), key.ravel(), value.ravel()])


class Block:
    """``r = r + attention(norm(r))``, ``r = r + mlp(norm(r))``; see :class:`Config` for the other two forms."""

    def __init__(self, config: Config, weights: Weights, ops: Backend, layer: int, rope: Rope | None):
        names, name = config.names, f"{config.names.layers}.{layer}"
        self.norm_first, self.parallel = config.norm_first, config.parallel
        rows = qkv_rows(config)
        self.attention = Attention(
            ops,
            AttentionSpec(config.heads, config.heads, config.head_dim, config.scales[layer], rope=rope),
            Linear(ops, weights if rows is None else PermutedWeights(weights, rows), [f"{name}.{n}" for n in names.qkv],
                   config.attention_bias),
            Linear(ops, weights, [f"{name}.{names.attention_out}"], config.attention_bias),
        )  # fmt: skip
        self.mlp = MLP(
            ops,
            config.activation,
            Linear(ops, weights, [f"{name}.{names.up}"], config.mlp_bias),
            Linear(ops, weights, [f"{name}.{names.down}"], config.mlp_bias),
        )
        self.attention_norm = make_norm(config, weights, ops, f"{name}.{names.attention_norm}")
        self.mlp_norm = make_norm(config, weights, ops, f"{name}.{names.mlp_norm}")

    def __call__(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        if self.parallel:
            hidden = self.mlp.hidden(self.mlp_norm(residual))
            residual = self.attention.add_to(residual, self.attention_norm(residual), cache, batch)
            return self.mlp.down.add_to(residual, hidden)
        if self.norm_first:
            residual = self.attention.add_to(residual, self.attention_norm(residual), cache, batch)
            return self.mlp.add_to(residual, self.mlp_norm(residual))
        residual = self.attention_norm(self.attention.add_to(residual, residual, cache, batch))
        return self.mlp_norm(self.mlp.add_to(residual, residual))


def make_norm(config: Config, weights: Weights, ops: Backend, name: str) -> LayerNorm:
    """The LayerNorm ``name``."""
    if config.affine_norms:
        return LayerNorm.load(ops, weights, name, config.norm_eps)
    return LayerNorm(ops, Norm(ops.vector(np.ones(config.hidden_size, np.float32)), config.norm_eps, center=True))


@dataclass(frozen=True)
class Input:
    """A step's tokens to the residual stream: the embedding, projected where it has another size, and positions."""

    embedding: Embedding
    project: Linear | None
    positions: PositionEmbedding | None

    def __call__(self, batch: ForwardBatch) -> Array:
        residual = self.embedding(batch.tokens)
        if self.project is not None:
            residual = self.project.fp32(residual)
        return residual if self.positions is None else self.positions.add_to(residual, batch)


@dataclass(frozen=True)
class Output:
    """The residual stream to logits."""

    norm: LayerNorm | None
    project: Linear | None
    head: LMHead

    def __call__(self, residual: Array) -> Array:
        x = residual if self.norm is None else self.norm(residual)
        return self.head(x if self.project is None else self.project(x))


class ModelBuilder:
    """The model's parts, each made when it is asked for: run one after another, they need memory for one."""

    def __init__(self, config: Config, weights: Weights, ops: Backend):
        self.config = config
        self.weights = weights
        self.ops = ops
        self.rope = None
        if config.rotary:
            self.rope = Rope(ops.vector(np.array(config.rotary, np.float32)), config.rope_scale)

    def embed(self) -> Input:
        """A step's tokens to the residual stream."""
        config, names = self.config, self.config.names
        positions = None
        if names.positions:
            positions = PositionEmbedding(self.ops, self.weights, names.positions, config.first_position)
        return Input(Embedding(self.ops, self.weights, names.embedding), self._projection(names.project_in), positions)

    def block(self, layer: int) -> Block:
        """The layer of that number, from 0 on."""
        return Block(self.config, self.weights, self.ops, layer, self.rope)

    def output(self) -> Output:
        """What follows the last layer."""
        config, names = self.config, self.config.names
        norm = make_norm(config, self.weights, self.ops, names.final_norm) if config.final_norm else None
        return Output(norm, self._projection(names.project_out), LMHead(self.ops, self.weights, [names.head]))

    def _projection(self, name: str) -> Linear | None:
        return Linear(self.ops, self.weights, [name]) if self.config.embedding_size != self.config.hidden_size else None


class Model(Decoder):
    """Tokens in, logits out."""

    def __init__(self, config: Config, weights: Weights, ops: Backend):
        super().__init__(config, ModelBuilder(config, weights, ops), ops)
