"""What T5, CPM-2, EVA and their kin share: an encoder, and a decoder that reads its output.

Both are pre-norm stacks with RMSNorm and a bias on the attention scores that depends on the distance of two tokens
(https://arxiv.org/abs/1910.10683). The encoder's layers see a whole source; the decoder's see the tokens before, and
the encoded source through cross-attention, whose keys and values are computed once per source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..backend.base import Backend
from ..backend.values import Array, AttentionSpec, ForwardBatch, LayerCache, RelativeBias
from ..layers.attention import Attention, CrossAttention, EncoderAttention
from ..layers.cache import CacheShape, KVCache, SourceCache
from ..layers.embedding import Embedding
from ..layers.linear import Linear, LMHead
from ..layers.loading import Weights
from ..layers.mlp import MLP, GatedMLP
from ..layers.norm import RMSNorm
from ..layers.relative_bias import load_relative_bias
from ._decoder import Output
from .spec import Fold, Parameter, Role, Spec


@dataclass(frozen=True)
class StackTensorNames:
    """Where a checkpoint keeps an encoder or a decoder. Names from ``self_norm`` on are those within ``{blocks}.{i}``.

    Query, key and value are one matrix or three, and so are a source's key and value one or two. ``mlp`` is the prefix
    of ``wi_0``, ``wi_1`` and ``wo`` (``wi`` and ``wo`` without a gate). An encoder has no cross-attention.
    """

    blocks: str
    final_norm: str
    self_norm: str
    qkv: tuple[str, ...]
    self_out: str
    bias: str
    mlp_norm: str
    mlp: str
    cross_norm: str = ""
    cross_q: str = ""
    cross_kv: tuple[str, ...] = ()
    cross_out: str = ""


@dataclass(frozen=True)
class TensorNames:
    """Where a checkpoint keeps what; ``ignored`` are patterns of copies that some files hold."""

    embedding: str
    head: str
    encoder: StackTensorNames
    decoder: StackTensorNames
    ignored: tuple[str, ...]


@dataclass(frozen=True)
class Config:
    """The shape of a model; lengths in tokens, sizes in elements.

    ``score_scale`` multiplies the attention scores, ``logit_scale`` the logits. ``biases_per_layer``: every layer has a
    table of relative biases, and not the first one for all. Decoding starts from the tokens
    ``decoder_start_token_ids``.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    encoder_layers: int
    layers: int
    heads: int
    head_dim: int
    max_source_length: int
    context_length: int
    norm_eps: float
    activation: str
    gated: bool
    tied_head: bool
    buckets: int
    max_distance: int
    score_scale: float
    logit_scale: float
    decoder_start_token_ids: tuple[int, ...]
    names: TensorNames
    biases_per_layer: bool = False

    @property
    def cache_shape(self) -> CacheShape:
        """What the decoder keeps per token, and per token of the source."""
        return CacheShape(self.layers, self.heads, self.head_dim)


def spec(config: Config) -> Spec:
    """Every tensor of the checkpoint."""
    names = config.names
    embedding, head = f"{names.embedding}.weight", f"{names.head}.weight"
    table = (config.vocab_size, config.hidden_size)
    tensors = {embedding: Parameter(table, Role.EMBEDDING), head: Parameter(table, Role.HEAD)}
    for stack, layers in ((names.encoder, config.encoder_layers), (names.decoder, config.layers)):
        for layer in range(layers):
            tensors |= {f"{stack.blocks}.{layer}.{name}.weight": p for name, p in _layer_tensors(config, stack, layer)}
        tensors[f"{stack.final_norm}.weight"] = Parameter((config.hidden_size,), Role.VECTOR)
    tied = {head: embedding} if config.tied_head else {}
    return Spec(tensors, tied, names.ignored, foldable=tuple(folds(config)))


def folds(config: Config) -> Iterator[Fold]:
    """Norm to what reads it, values to the output of attention, and the last linear step before ``wo`` to ``wo``.

    All layers of the decoder read the encoder's last norm. Fused matrices are left out where they would be divided.
    """
    encoder, decoder = config.names.encoder, config.names.decoder
    for stack, layers in ((encoder, config.encoder_layers), (decoder, config.layers)):
        for layer in range(layers):
            yield from _layer_folds(config, stack, f"{stack.blocks}.{layer}")
    blocks = [f"{decoder.blocks}.{layer}" for layer in range(config.layers)]
    readers = [f"{block}.{name}.weight" for block in blocks for name in decoder.cross_kv]
    yield Fold((f"{encoder.final_norm}.weight",), tuple(readers))
    if not config.tied_head:
        yield Fold((f"{decoder.final_norm}.weight",), (f"{config.names.head}.weight",))


def _layer_folds(config: Config, stack: StackTensorNames, block: str) -> Iterator[Fold]:
    inner = ("wi_0", "wi_1") if config.gated else ("wi",)
    pairs: list[tuple[str, Sequence[str]]] = [
        (stack.self_norm, stack.qkv),
        (stack.mlp_norm, [f"{stack.mlp}.{part}" for part in inner]),
    ]
    if stack.cross_q:
        pairs.append((stack.cross_norm, [stack.cross_q]))
    if len(stack.qkv) == 3:
        pairs.append((stack.qkv[2], [stack.self_out]))
    if len(stack.cross_kv) == 2:
        pairs.append((stack.cross_kv[1], [stack.cross_out]))
    if config.gated or config.activation == "relu":
        pairs.append((f"{stack.mlp}.{inner[-1]}", [f"{stack.mlp}.wo"]))
    for producer, consumers in pairs:
        yield Fold((f"{block}.{producer}.weight",), tuple(f"{block}.{name}.weight" for name in consumers))


def _layer_tensors(config: Config, stack: StackTensorNames, layer: int) -> Iterator[tuple[str, Parameter]]:
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.heads * config.head_dim
    linears = [(name, 3 * heads // len(stack.qkv), hidden) for name in stack.qkv]
    linears += [(stack.self_out, hidden, heads)]
    if stack.cross_q:
        linears += [(stack.cross_q, heads, hidden), (stack.cross_out, hidden, heads)]
        linears += [(name, 2 * heads // len(stack.cross_kv), hidden) for name in stack.cross_kv]
    linears += [(f"{stack.mlp}.{part}", inner, hidden) for part in (("wi_0", "wi_1") if config.gated else ("wi",))]
    linears += [(f"{stack.mlp}.wo", hidden, inner)]
    for name, out_features, in_features in linears:
        yield name, Parameter((out_features, in_features), Role.LINEAR)
    for name in filter(None, (stack.self_norm, stack.cross_norm, stack.mlp_norm)):
        yield name, Parameter((hidden,), Role.VECTOR)
    if layer == 0 or config.biases_per_layer:
        yield stack.bias, Parameter((config.buckets, config.heads), Role.EMBEDDING)


class BlockBuilder:
    """Makes what a layer of either stack consists of."""

    def __init__(self, config: Config, stack: StackTensorNames, weights: Weights, ops: Backend, layer: int):
        self.config = config
        self.weights = weights
        self.ops = ops
        self.name = f"{stack.blocks}.{layer}"

    def linear(self, *names: str) -> Linear:
        """One product with the matrices ``names`` of this layer."""
        return Linear(self.ops, self.weights, [f"{self.name}.{name}" for name in names])

    def norm(self, name: str) -> RMSNorm:
        """A norm of this layer."""
        return RMSNorm(self.ops, self.weights, f"{self.name}.{name}", self.config.norm_eps)

    def attention(self, bias: RelativeBias | None) -> AttentionSpec:
        """Attention with a key and value head for each query head."""
        config = self.config
        return AttentionSpec(config.heads, config.heads, config.head_dim, config.score_scale, bias=bias)

    def mlp(self, name: str) -> GatedMLP | MLP:
        """The feed-forward layer."""
        if self.config.gated:
            parts = "wi_0", "wi_1", "wo"
            return GatedMLP(self.ops, self.weights, f"{self.name}.{name}", self.config.activation, parts=parts)
        return MLP(self.ops, self.config.activation, self.linear(f"{name}.wi"), self.linear(f"{name}.wo"))


class EncoderBlock:
    """``r = r + attention(norm(r))``, ``r = r + mlp(norm(r))``."""

    def __init__(self, config: Config, weights: Weights, ops: Backend, layer: int, bias: RelativeBias):
        stack = config.names.encoder
        parts = BlockBuilder(config, stack, weights, ops, layer)
        self.self_norm = parts.norm(stack.self_norm)
        self.attention = EncoderAttention(
            ops, parts.attention(bias), parts.linear(*stack.qkv), parts.linear(stack.self_out)
        )
        self.mlp_norm = parts.norm(stack.mlp_norm)
        self.mlp = parts.mlp(stack.mlp)

    def __call__(self, residual: Array, batch: ForwardBatch) -> Array:
        residual = self.attention.add_to(residual, self.self_norm(residual), batch)
        return self.mlp.add_to(residual, self.mlp_norm(residual))


class DecoderBlock:
    """``r = r + attention(norm(r))``, ``r = r + cross_attention(norm(r))``, ``r = r + mlp(norm(r))``."""

    def __init__(self, config: Config, weights: Weights, ops: Backend, layer: int, bias: RelativeBias):
        stack = config.names.decoder
        parts = BlockBuilder(config, stack, weights, ops, layer)
        self.self_norm = parts.norm(stack.self_norm)
        self.attention = Attention(ops, parts.attention(bias), parts.linear(*stack.qkv), parts.linear(stack.self_out))
        self.cross_norm = parts.norm(stack.cross_norm)
        self.cross_attention = CrossAttention(
            ops,
            parts.attention(None),
            parts.linear(stack.cross_q),
            parts.linear(*stack.cross_kv),
            parts.linear(stack.cross_out),
        )
        self.mlp_norm = parts.norm(stack.mlp_norm)
        self.mlp = parts.mlp(stack.mlp)

    def __call__(
        self, residual: Array, cache: LayerCache, source_cache: LayerCache, source: SourceCache, batch: ForwardBatch
    ) -> Array:
        residual = self.attention.add_to(residual, self.self_norm(residual), cache, batch)
        residual = self.cross_attention.add_to(residual, self.cross_norm(residual), source_cache, source, batch)
        return self.mlp.add_to(residual, self.mlp_norm(residual))


class ModelBuilder:
    """The model's parts, each made when it is asked for: run one after another, they need memory for one."""

    def __init__(self, config: Config, weights: Weights, ops: Backend):
        self.config = config
        self.weights = weights
        self.ops = ops

    def embed(self) -> Callable[[ForwardBatch], Array]:
        """A step's tokens, of sources or of texts, to the residual stream."""
        embedding = Embedding(self.ops, self.weights, self.config.names.embedding)
        return lambda batch: embedding(batch.tokens)

    @cached_property
    def _encoder_biases(self) -> Callable[[int], RelativeBias]:
        return self._biases(self.config.names.encoder, bidirectional=True)

    @cached_property
    def _decoder_biases(self) -> Callable[[int], RelativeBias]:
        return self._biases(self.config.names.decoder, bidirectional=False)

    def encoder_block(self, layer: int) -> EncoderBlock:
        """The encoder's layer of that number, from 0 on."""
        return EncoderBlock(self.config, self.weights, self.ops, layer, self._encoder_biases(layer))

    def encoder_norm(self) -> RMSNorm:
        """What follows the encoder's last layer."""
        return RMSNorm(self.ops, self.weights, self.config.names.encoder.final_norm, self.config.norm_eps)

    def block(self, layer: int) -> DecoderBlock:
        """The decoder's layer of that number, from 0 on."""
        return DecoderBlock(self.config, self.weights, self.ops, layer, self._decoder_biases(layer))

    def output(self) -> Output:
        """What follows the decoder's last layer; a scale on the logits is one on the gain of the norm."""
        config = self.config
        name = config.names.decoder.final_norm
        norm = RMSNorm(self.ops, self.weights, name, config.norm_eps, config.logit_scale)
        return Output(norm, LMHead(self.ops, self.weights, [config.names.head]))

    def _biases(self, stack: StackTensorNames, bidirectional: bool) -> Callable[[int], RelativeBias]:
        """The relative bias of a layer of a stack."""

        def load(layer: int) -> RelativeBias:
            name = f"{stack.blocks}.{layer}.{stack.bias}"
            return load_relative_bias(self.ops, self.weights, name, bidirectional, self.config.max_distance)

        if self.config.biases_per_layer:
            return load
        shared = load(0)
        return lambda layer: shared


class Model:
    """A source in, then tokens in, logits out."""

    def __init__(self, config: Config, weights: Weights, ops: Backend):
        self.ops = ops
        self.config = config
        builder = ModelBuilder(config, weights, ops)
        self.embed = builder.embed()
        self.encoder = ops.blocks(builder.encoder_block, config.encoder_layers)
        self.encoder_norm = builder.encoder_norm()
        self.decoder = ops.blocks(builder.block, config.layers)
        self.output = builder.output()

    def encode(self, batch: ForwardBatch) -> Array:
        """The encoder's output for a step of whole sources, ``[T, features]``, normalised."""
        residual = self.embed(batch)
        for block in self.encoder:
            residual = block(residual, batch)
        return self.encoder_norm(residual)

    def encode_to_cache(self, batch: ForwardBatch, source: SourceCache) -> None:
        """Encode a step of whole sources, and keep what the decoder needs of them in their slots."""
        output = self.encode(batch)
        for block, cache in zip(self.decoder, source.layers, strict=True):
            block.cross_attention.fill_cache(output, cache, batch)

    def __call__(self, batch: ForwardBatch, cache: KVCache, all_logits: bool = False) -> Array:
        """Run a step's tokens: fp32 logits ``[B, vocab]`` of each sequence's last token, or of all ``[T, vocab]``.

        The sources of its sequences must have been read into ``cache.source``.
        """
        source = cache.source
        assert source is not None
        residual = self.embed(batch)
        for block, layer, source_layer in zip(self.decoder, cache.layers, source.layers, strict=True):
            residual = block(residual, layer, source_layer, source, batch)
        if not all_logits:
            residual = self.ops.last_tokens(residual, batch)
        return self.output(residual)


CPM_ENCODER = StackTensorNames(
    blocks="encoder.blocks",
    final_norm="encoder.final_layernorm",
    self_norm="self_attn.layer_norm",
    qkv=("self_attn.self_attn.project",),
    self_out="self_attn.self_attn.dense",
    bias="self_attn.self_attn.relative_attention_bias",
    mlp_norm="ff.layer_norm",
    mlp="ff.dense_relu_dense",
)
CPM_NAMES = TensorNames(
    embedding="word_embeds",
    head="lm_head",
    encoder=CPM_ENCODER,
    decoder=replace(
        CPM_ENCODER,
        blocks="decoder.blocks",
        final_norm="decoder.final_layernorm",
        cross_norm="cross_attn.layer_norm",
        cross_q="cross_attn.cross_attn.project_q",
        cross_kv=("cross_attn.cross_attn.project_kv",),
        cross_out="cross_attn.cross_attn.dense",
    ),
    ignored=(r"(encoder|decoder)\.word_embeds\.weight",),
)
"""The names of the published model-parallel checkpoints of CPM-2 and EVA, their shards merged."""
