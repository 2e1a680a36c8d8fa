"""T5, CPM-2, EVA and similar models: an encoder, and a decoder that reads its output.

Both are pre-norm stacks with RMSNorm and a bias on the attention scores that depends on the distance of two tokens
(https://arxiv.org/abs/1910.10683). The encoder's attention is bidirectional, the decoder's causal. The decoder reads
the encoded source through cross-attention, whose keys and values are computed once per source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..backend.base import Backend
from ..backend.values import Array, AttentionSpec, ForwardBatch, LayerCache, RelativeBias
from ..layers.attention import CrossAttention, EncoderAttention
from ..layers.cache import CacheLayout, KVCache
from ..layers.embedding import Embedding
from ..layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from ..layers.loading import Weights
from ..layers.norm import NormLayer, rms_norm
from ..layers.relative_bias import load_relative_bias
from ._config import MAX_HEAD_DIM, MAX_LAYERS, ConfigReader, ModelConfig, integer, number
from .parts.attention import Attention
from .parts.ends import Output
from .parts.feed_forward import FeedForward, GatedFeedForward
from .spec import Fold, GatedProduct, Parameter, Role, Spec, Tensors, embedding, head, linear, norm, weights_of

KEYS = {
    "vocab_size": integer("vocab_size", 32128),
    "hidden_size": integer("d_model", 512),
    "intermediate_size": integer("d_ff", 2048),
    "encoder_layers": integer("num_layers", 6, high=MAX_LAYERS),
    "layers": integer("num_decoder_layers", derive=lambda fields: fields["encoder_layers"], high=MAX_LAYERS),
    "heads": integer("num_heads", 8),
    "head_dim": integer("d_kv", 64, high=MAX_HEAD_DIM),
    "norm_eps": number("layer_norm_epsilon", 1e-6, high=1.0),
    "buckets": integer("relative_attention_num_buckets", 32, low=4, high=65536, required=False),
    "max_distance": integer("relative_attention_max_distance", 128, high=65536, required=False),
}
"""The keys that all of them have; the defaults are T5's."""


@dataclass(frozen=True)
class CrossTensorNames:
    """Names of a layer's cross-attention. The key and value of a source are one matrix or two."""

    norm: str
    q: str
    kv: tuple[str, ...]
    out: str


@dataclass(frozen=True)
class StackTensorNames:
    """Names of the tensors of an encoder or a decoder. Those from ``self_norm`` on follow ``{blocks}.{i}``.

    Query, key and value are one matrix or three. ``mlp`` is the prefix of ``wi_0``, ``wi_1`` and ``wo`` (``wi`` and
    ``wo`` without a gate). An encoder has no cross-attention.
    """

    blocks: str
    final_norm: str
    self_norm: str
    qkv: tuple[str, ...]
    self_out: str
    bias: str
    mlp_norm: str
    mlp: str
    cross: CrossTensorNames | None = None


@dataclass(frozen=True)
class TensorNames:
    """Names of a checkpoint's tensors; ``ignored`` are patterns of copies that some files hold.

    ``embedding_copies`` are names under which a file may hold the embedding.
    """

    embedding: str
    head: str
    encoder: StackTensorNames
    decoder: StackTensorNames
    ignored: tuple[str, ...]
    embedding_copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Config(ModelConfig):
    """The configuration of an encoder-decoder. ``layers`` are the decoder's.

    ``scaled_scores``: attention scores are divided by the root of the head's size. ``biases_per_layer``: every layer
    has a table of relative biases; otherwise the layers of a stack share the first one's. ``head_may_be_absent``: a
    file without a head shares the embedding, although the output is not scaled as with a tied head.
    """

    is_encoder_decoder: ClassVar[bool] = True

    intermediate_size: int
    encoder_layers: int
    layers: int
    heads: int
    head_dim: int
    norm_eps: float
    activation: str
    tied_head: bool
    gated: bool
    buckets: int
    max_distance: int
    decoder_start_token_id: int
    names: TensorNames
    scaled_scores: bool = False
    biases_per_layer: bool = False
    head_may_be_absent: bool = False

    @property
    def decoder_start_token_ids(self) -> tuple[int, ...]:
        return (self.decoder_start_token_id,)

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scaled_scores else 1.0

    @property
    def logit_scale(self) -> float:
        """The factor on the logits, ``1 / sqrt(hidden_size)`` with a tied head."""
        return self.hidden_size**-0.5 if self.tied_head else 1.0

    @property
    def inner(self) -> tuple[str, ...]:
        """The matrices of the feed-forward layer that read its input, after the prefix ``mlp``."""
        return ("wi_0", "wi_1") if self.gated else ("wi",)

    @property
    def num_layers(self) -> int:
        return self.layers

    @property
    def cache_layout(self) -> CacheLayout:
        return CacheLayout.uniform(self.layers, self.heads, self.head_dim)

    @property
    def divided(self) -> dict[str, int]:
        return {"heads": self.heads, "hidden units of a feed-forward layer": self.intermediate_size}


def check_buckets(read: ConfigReader) -> None:
    """Record problems with the buckets of relative distances."""
    buckets, max_distance = read.fields["buckets"], read.fields["max_distance"]
    names = KEYS["buckets"].name, KEYS["max_distance"].name
    read.require(buckets % 4 == 0, f"{names[0]} ({buckets}) is not a multiple of 4", names[0])
    text = f"{names[1]} ({max_distance}) is not larger than half of {names[0]} ({buckets})"
    read.require(max_distance > buckets // 2, text, *names)


def spec(config: Config) -> Spec:
    """Every tensor of the checkpoint.

    Factors move from a norm to the matrices that read it (all layers of the decoder read the encoder's last norm), from
    values to the output of attention, and from the last linear step before ``wo`` to ``wo``. Values in a fused matrix
    are left out.
    """
    names, hidden, table = config.names, config.hidden_size, (config.vocab_size, config.hidden_size)
    tensors = embedding(names.embedding, table) | head(names.head, table)
    folds: list[Fold] = []
    gated: list[GatedProduct] = []
    rotatable: list[str] = []
    source_readers: list[str] = []
    for stack, layers in ((names.encoder, config.encoder_layers), (names.decoder, config.layers)):
        for layer in range(layers):
            block = f"{stack.blocks}.{layer}"
            tensors |= _block_tensors(config, stack, block)
            if layer == 0 or config.biases_per_layer:
                bias = Parameter((config.buckets, config.heads), Role.EMBEDDING)
                tensors[f"{block}.{stack.bias}.weight"] = bias
            folds += _block_folds(config, stack, block)
            rotatable += weights_of(f"{block}.{stack.mlp}.wo")
            if config.gated and config.activation != "relu_squared":
                gate, up, down = weights_of(*(f"{block}.{stack.mlp}.{name}" for name in (*config.inner, "wo")))
                gated.append(GatedProduct(gate, up, down, f"{block}.{stack.mlp_norm}.weight"))
            if stack.cross:
                source_readers += [f"{block}.{name}" for name in stack.cross.kv]
        tensors |= norm(stack.final_norm, hidden)
    folds.append(Fold(weights_of(names.encoder.final_norm), weights_of(*source_readers)))
    if not config.tied_head:
        folds.append(Fold(weights_of(names.decoder.final_norm), weights_of(names.head)))
    tied = {f"{names.head}.weight": f"{names.embedding}.weight"} if config.tied_head else {}
    tied_if_absent = {f"{names.head}.weight": f"{names.embedding}.weight"} if config.head_may_be_absent else {}
    copies = {f"{names.embedding}.weight": names.embedding_copies}
    return Spec(
        tensors, tied, names.ignored, tuple(folds), copies=copies, tied_if_absent=tied_if_absent,
        rotatable=tuple(rotatable), value_heads=tuple(fold for fold in folds if fold.block > 1),
        gated=tuple(gated), source_readers=weights_of(*source_readers),
    )  # fmt: skip


def _block_tensors(config: Config, stack: StackTensorNames, block: str) -> Tensors:
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.heads * config.head_dim
    shapes = dict.fromkeys(stack.qkv, (3 * heads // len(stack.qkv), hidden)) | {stack.self_out: (hidden, heads)}
    norms = [stack.self_norm, stack.mlp_norm]
    if cross := stack.cross:
        shapes |= {cross.q: (heads, hidden), cross.out: (hidden, heads)}
        shapes |= dict.fromkeys(cross.kv, (2 * heads // len(cross.kv), hidden))
        norms.insert(1, cross.norm)
    shapes |= {f"{stack.mlp}.{part}": (inner, hidden) for part in config.inner}
    shapes |= {f"{stack.mlp}.wo": (hidden, inner)}
    tensors: Tensors = {}
    for name, shape in shapes.items():
        tensors |= linear(f"{block}.{name}", shape)
    for name in norms:
        tensors |= norm(f"{block}.{name}", hidden)
    return tensors


def _block_folds(config: Config, stack: StackTensorNames, block: str) -> list[Fold]:
    readers = {stack.self_norm: stack.qkv, stack.mlp_norm: tuple(f"{stack.mlp}.{part}" for part in config.inner)}
    if cross := stack.cross:
        readers[cross.norm] = (cross.q,)
    values = {}
    if len(stack.qkv) == 3:
        values[stack.qkv[2]] = (stack.self_out,)
    if cross and len(cross.kv) == 2:
        values[cross.kv[1]] = (cross.out,)
    if config.gated or config.activation == "relu":
        readers[f"{stack.mlp}.{config.inner[-1]}"] = (f"{stack.mlp}.wo",)
    return [
        Fold(
            weights_of(f"{block}.{producer}"), weights_of(*(f"{block}.{name}" for name in consumers)),
            config.head_dim if producer in values else 1,
        )
        for producer, consumers in (readers | values).items()
    ]  # fmt: skip


@dataclass(frozen=True)
class BlockParts:
    """Makes the parts of the layer ``block`` of either stack."""

    config: Config
    weights: Weights
    ops: Backend
    block: str

    def heads_of(self, *names: str, count: int) -> Linear:
        """The matrices, or the one, of ``count`` kinds of heads, such as those of queries, keys and values."""
        width = self.config.heads * self.config.head_dim
        return ColumnParallelLinear(self.ops, self.weights, self._named(names), [width] * count)

    def row_parallel(self, name: str) -> RowParallelLinear:
        return RowParallelLinear(self.ops, self.weights, f"{self.block}.{name}")

    def _named(self, names: Sequence[str]) -> list[str]:
        return [f"{self.block}.{name}" for name in names]

    def norm(self, name: str) -> NormLayer:
        return rms_norm(self.ops, self.weights, f"{self.block}.{name}", self.config.norm_eps)

    def attention(self, bias: RelativeBias | None) -> AttentionSpec:
        """Attention with a key and value head for each query head."""
        config = self.config
        spec = AttentionSpec(config.heads, config.heads, config.head_dim, config.score_scale, bias=bias)
        return spec.shard(self.ops.communicator.tp_size)

    def mlp(self, name: str) -> FeedForward:
        kind = GatedFeedForward if self.config.gated else FeedForward
        names = self._named([f"{name}.{part}" for part in self.config.inner])
        inner = ColumnParallelLinear(self.ops, self.weights, names, [self.config.intermediate_size] * len(names))
        return kind(self.ops, self.config.activation, inner, self.row_parallel(f"{name}.wo"))


class EncoderBlock:
    """``r = r + attention(norm(r))``, ``r = r + mlp(norm(r))``."""

    def __init__(self, config: Config, weights: Weights, ops: Backend, layer: int, bias: RelativeBias):
        stack = config.names.encoder
        parts = BlockParts(config, weights, ops, f"{stack.blocks}.{layer}")
        self.self_norm = parts.norm(stack.self_norm)
        self.attention = EncoderAttention(
            ops, parts.attention(bias), parts.heads_of(*stack.qkv, count=3), parts.row_parallel(stack.self_out)
        )
        self.mlp_norm = parts.norm(stack.mlp_norm)
        self.mlp = parts.mlp(stack.mlp)

    def __call__(self, residual: Array, batch: ForwardBatch) -> Array:
        residual = self.attention.add_to(residual, self.self_norm(residual), batch)
        return self.mlp.add_to(residual, self.mlp.hidden(self.mlp_norm(residual)))


class DecoderBlock:
    """``r = r + attention(norm(r))``, ``r = r + cross_attention(norm(r))``, ``r = r + mlp(norm(r))``."""

    def __init__(self, config: Config, weights: Weights, ops: Backend, layer: int, bias: RelativeBias):
        stack, cross = config.names.decoder, config.names.decoder.cross
        assert cross is not None
        parts = BlockParts(config, weights, ops, f"{stack.blocks}.{layer}")
        self.self_norm = parts.norm(stack.self_norm)
        self.attention = Attention(
            ops, parts.attention(bias), parts.heads_of(*stack.qkv, count=3), parts.row_parallel(stack.self_out)
        )
        self.cross_norm = parts.norm(cross.norm)
        self.cross_attention = CrossAttention(
            ops, parts.attention(None), parts.heads_of(cross.q, count=1), parts.heads_of(*cross.kv, count=2),
            parts.row_parallel(cross.out),
        )  # fmt: skip
        self.mlp_norm = parts.norm(stack.mlp_norm)
        self.mlp = parts.mlp(stack.mlp)

    def __call__(self, residual: Array, cache: LayerCache, source: LayerCache, batch: ForwardBatch) -> Array:
        residual = self.attention.add_to(residual, self.attention.hidden(self.self_norm(residual), cache, batch))
        residual = self.cross_attention.add_to(residual, self.cross_norm(residual), source, batch)
        return self.mlp.add_to(residual, self.mlp.hidden(self.mlp_norm(residual)))


class ModelBuilder:
    """Makes the parts of a model one at a time; see :class:`._decoder.DecoderBuilder`."""

    def __init__(self, config: Config, weights: Weights, ops: Backend):
        self.config = config
        self.weights = weights
        self.ops = ops
        self._biases: dict[str, RelativeBias] = {}

    def embed(self) -> Embedding:
        """The embedding that encoder and decoder share."""
        return Embedding(self.ops, self.weights, self.config.names.embedding)

    def encoder_block(self, layer: int) -> EncoderBlock:
        """Layer ``layer`` of the encoder, counted from 0."""
        bias = self._bias(self.config.names.encoder, layer, bidirectional=True)
        return EncoderBlock(self.config, self.weights, self.ops, layer, bias)

    def encoder_norm(self) -> NormLayer:
        return rms_norm(self.ops, self.weights, self.config.names.encoder.final_norm, self.config.norm_eps)

    def block(self, layer: int) -> DecoderBlock:
        """Layer ``layer`` of the decoder, counted from 0."""
        bias = self._bias(self.config.names.decoder, layer, bidirectional=False)
        return DecoderBlock(self.config, self.weights, self.ops, layer, bias)

    def output(self) -> Output:
        """The decoder's residual stream to logits; their scale is part of the norm's weight."""
        config = self.config
        name = config.names.decoder.final_norm
        final_norm = rms_norm(self.ops, self.weights, name, config.norm_eps, config.logit_scale)
        return Output(final_norm, None, Linear(self.ops, self.weights, [config.names.head]))

    def _bias(self, stack: StackTensorNames, layer: int, bidirectional: bool) -> RelativeBias:
        """The relative bias of a layer: its own, or that of its stack's first layer. Each is loaded once."""
        name = f"{stack.blocks}.{layer if self.config.biases_per_layer else 0}.{stack.bias}"
        if name not in self._biases:
            max_distance = self.config.max_distance
            self._biases[name] = load_relative_bias(self.ops, self.weights, name, bidirectional, max_distance)
        return self._biases[name]


class EncoderDecoder:
    """A source in, then tokens in, logits out."""

    def __init__(self, builder: ModelBuilder):
        self.ops = builder.ops
        self.config = builder.config
        self.embed = builder.embed()
        self.encoder = self.ops.blocks(builder.encoder_block, self.config.encoder_layers)
        self.encoder_norm = builder.encoder_norm()
        self.decoder = self.ops.blocks(builder.block, self.config.layers)
        self.output = builder.output()

    def encode(self, batch: ForwardBatch) -> Array:
        """The encoder's normalised output for whole sources, ``[T, features]``."""
        residual = self.embed(batch)
        for block in self.encoder:
            residual = block(residual, batch)
        return self.encoder_norm(residual)

    def encode_to_cache(self, batch: ForwardBatch, source: KVCache) -> None:
        """Encode whole sources, and store their keys and values for each layer of the decoder in their blocks."""
        with self.ops.step(batch):
            output = self.encode(batch)
            for block, cache in zip(self.decoder, source.layers, strict=True):
                block.cross_attention.fill_cache(output, cache, batch)

    def __call__(self, batch: ForwardBatch, cache: KVCache, all_logits: bool = False) -> Array:
        """fp32 logits ``[L, vocab]`` of the step's ``logit_rows``, or with ``all_logits`` of all, ``[T, vocab]``.

        ``cache.source`` must hold the sources of the batch's sequences; see :meth:`encode_to_cache`.
        """
        source = cache.source
        assert source is not None
        with self.ops.step(batch):
            residual = self.embed(batch)
            for block, layer, source_layer in zip(self.decoder, cache.layers, source.layers, strict=True):
                residual = block(residual, layer, source_layer, batch)
            if not all_logits:
                residual = self.ops.last_tokens(residual, batch)
            return self.output(residual)
