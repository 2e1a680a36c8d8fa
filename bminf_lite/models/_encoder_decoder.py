"""T5, CPM-2, EVA and similar models: an encoder, and a decoder that reads its output.

Both are pre-norm stacks with RMSNorm and a bias on the attention scores that depends on the distance of two tokens
(https://arxiv.org/abs/1910.10683). The encoder's attention is bidirectional, the decoder's causal. The decoder reads
the encoded source through cross-attention, whose keys and values are computed once per source.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from ..backend.base import Backend
from ..backend.cache_values import LayerCache
from ..backend.values import Array, ForwardBatch
from ..layers.cache import CacheLayout, KVCache
from ..layers.loading import Weights
from ..layers.norm import NormLayer, rms_norm
from ._config import MAX_HEAD_DIM, MAX_LAYERS, ConfigReader, ModelConfig, common_divisors, integer, number
from .parts.attention import AttentionPart
from .parts.cross_attention import CrossAttention, CrossAttentionPart, EncoderAttentionPart
from .parts.ends import InputLayer, InputPart, OutputLayer, OutputPart
from .parts.feed_forward import FeedForwardPart
from .parts.norms import NormPart
from .parts.part import Layer, LayerParts, LayerSource, RelativeBiasTable, SharedValues, Sublayer
from .spec import Fold, Spec, norm, weights_of

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

    @cached_property
    def encoder_parts(self) -> tuple[LayerParts, ...]:
        """The parts of each layer of the encoder."""
        return tuple(layer_parts(self, self.names.encoder, layer) for layer in range(self.encoder_layers))

    @cached_property
    def decoder_parts(self) -> tuple[LayerParts, ...]:
        """The parts of each layer of the decoder."""
        return tuple(layer_parts(self, self.names.decoder, layer) for layer in range(self.layers))

    @property
    def input(self) -> InputPart:
        """The embedding that encoder and decoder share."""
        return InputPart(self.vocab_size, self.hidden_size, self.names.embedding)

    @property
    def output(self) -> OutputPart:
        """What lies behind the decoder's layers; the logits' scale is folded into the norm."""
        norm = NormPart(self.names.decoder.final_norm, self.hidden_size, self.norm_eps)
        return OutputPart(self.vocab_size, self.hidden_size, norm, self.names.head, multiplier=self.logit_scale)

    @property
    def num_layers(self) -> int:
        return self.layers

    @property
    def cache_layout(self) -> CacheLayout:
        return CacheLayout(tuple(layout for layer in self.decoder_parts for layout in layer.layouts))

    @property
    def divided(self) -> dict[str, int]:
        return common_divisors(layer.divided for layer in (*self.encoder_parts, *self.decoder_parts))

    @property
    def shared_heads(self) -> frozenset[int]:
        return frozenset[int]().union(*(layer.shared_heads for layer in (*self.encoder_parts, *self.decoder_parts)))


def check_buckets(read: ConfigReader) -> None:
    """Record problems with the buckets of relative distances."""
    buckets, max_distance = read.fields["buckets"], read.fields["max_distance"]
    names = KEYS["buckets"].name, KEYS["max_distance"].name
    read.require(buckets % 4 == 0, f"{names[0]} ({buckets}) is not a multiple of 4", names[0])
    text = f"{names[1]} ({max_distance}) is not larger than half of {names[0]} ({buckets})"
    read.require(max_distance > buckets // 2, text, *names)


def layer_parts(config: Config, stack: StackTensorNames, layer: int) -> LayerParts:
    """The parts of a layer of either stack; an encoder's has no cross-attention."""

    def norm(name: str) -> NormPart:
        return NormPart(name, config.hidden_size, config.norm_eps)

    is_encoder = stack.cross is None
    holder = layer if config.biases_per_layer else 0
    bias = f"{stack.blocks}.{holder}.{stack.bias}"
    attention = (EncoderAttentionPart if is_encoder else AttentionPart)(
        config.hidden_size,
        config.heads,
        config.heads,
        config.head_dim,
        qkv=stack.qkv,
        out=stack.self_out,
        score_scale=config.score_scale,
        relative=RelativeBiasTable(bias, config.buckets, config.heads, config.max_distance, bidirectional=is_encoder),
    )
    inner = tuple(f"{stack.mlp}.{name}" for name in config.inner)
    sizes = config.hidden_size, config.intermediate_size
    mlp = FeedForwardPart(*sizes, config.activation, config.gated, inner, down=f"{stack.mlp}.wo")
    sublayers = [Sublayer(attention, norm(stack.self_norm)), Sublayer(mlp, norm(stack.mlp_norm))]
    if cross := stack.cross:
        heads = config.hidden_size, config.heads, config.head_dim
        part = CrossAttentionPart(*heads, cross.q, cross.kv, cross.out, config.score_scale)
        sublayers.insert(1, Sublayer(part, norm(cross.norm)))
    return LayerParts(tuple(sublayers))


def spec(config: Config) -> Spec:
    """Every tensor of the checkpoint.

    Factors move from a norm to the matrices that read it (all layers of the decoder read the encoder's last norm), and
    inside of parts. Keys are not scaled.
    """
    names = config.names
    stated = [
        layer.stated(f"{stack.blocks}.{number}")
        for stack, layers in ((names.encoder, config.encoder_parts), (names.decoder, config.decoder_parts))
        for number, layer in enumerate(layers)
    ]
    parts = [part for layer in stated for part in layer.parts]
    encoder_norm, decoder_norm = (
        norm(stack.final_norm, config.hidden_size) for stack in (names.encoder, names.decoder)
    )
    tensors = config.input.tensors() | config.output.tensors() | encoder_norm | decoder_norm
    for layer in stated:
        tensors |= layer.tensors
    source_readers = tuple(name for part in parts for name in part.source_readers)
    folds = [fold for layer in stated for fold in layer.folds]
    folds.append(Fold(tuple(encoder_norm), source_readers))
    if not config.tied_head:
        folds.append(Fold(tuple(decoder_norm), weights_of(names.head)))
    value_heads = tuple(fold for part in parts for fold in part.value_heads)
    same = {f"{names.head}.weight": f"{names.embedding}.weight"}
    return Spec(
        tensors,
        same if config.tied_head else {},
        names.ignored,
        (*folds, *value_heads),
        copies={f"{names.embedding}.weight": names.embedding_copies},
        tied_if_absent=same if config.head_may_be_absent else {},
        rotatable=tuple(name for part in parts for name in part.rotatable),
        value_heads=value_heads,
        gated=tuple(product for layer in stated for product in layer.gated),
        source_readers=source_readers,
    )


class EncoderDecoderBuilder:
    """Makes the parts of a model one at a time; see :class:`._decoder.LayerBuilder`."""

    def __init__(self, config: Config, weights: Weights, ops: Backend):
        self.config = config
        self.weights = weights
        self.ops = ops
        self.shared = SharedValues(ops, weights)

    def embed(self) -> InputLayer:
        """The embedding that encoder and decoder share."""
        return self.config.input.build(self.ops, self.weights)

    def encoder_block(self, layer: int) -> Layer:
        """Layer ``layer`` of the encoder, counted from 0."""
        return self._layer(self.config.names.encoder, self.config.encoder_parts[layer], layer)

    def encoder_norm(self) -> NormLayer:
        return rms_norm(self.ops, self.weights, self.config.names.encoder.final_norm, self.config.norm_eps)

    def block(self, layer: int) -> Layer:
        """Layer ``layer`` of the decoder, counted from 0."""
        return self._layer(self.config.names.decoder, self.config.decoder_parts[layer], layer)

    def output(self) -> OutputLayer:
        """The decoder's residual stream to logits; their scale is part of the norm's weight."""
        return self.config.output.build(self.ops, self.weights)

    def _layer(self, stack: StackTensorNames, parts: LayerParts, layer: int) -> Layer:
        return parts.build(LayerSource(self.ops, self.weights, f"{stack.blocks}.{layer}", self.shared))


def fill_source(layer: Layer, encoded: Array, cache: LayerCache, batch: ForwardBatch) -> None:
    """Store a decoder layer's keys and values of the encoder's output ``[T, features]`` for a step's sources."""
    next(part for part in layer.parts if isinstance(part, CrossAttention)).fill_cache(encoded, cache, batch)


class EncoderDecoder:
    """A source in, then tokens in, logits out."""

    def __init__(self, builder: EncoderDecoderBuilder):
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
            residual = block(residual, None, batch)
        return self.encoder_norm(residual)

    def encode_to_cache(self, batch: ForwardBatch, source: KVCache) -> None:
        """Encode whole sources, and store their keys and values for each layer of the decoder in their blocks."""
        with self.ops.step(batch):
            output = self.encode(batch)
            for block, cache in zip(self.decoder, source.layers, strict=True):
                fill_source(block, output, cache, batch)

    def __call__(self, batch: ForwardBatch, cache: KVCache, all_logits: bool = False) -> Array:
        """fp32 logits ``[L, vocab]`` of the step's ``logit_rows``, or with ``all_logits`` of all, ``[T, vocab]``.

        ``cache.source`` must hold the sources of the batch's sequences; see :meth:`encode_to_cache`.
        """
        with self.ops.step(batch):
            residual = self.embed(batch)
            for block, layer in zip(self.decoder, cache.layers, strict=True):
                residual = block(residual, layer, batch)
            if not all_logits:
                residual = self.ops.last_tokens(residual, batch)
            return self.output(residual)
