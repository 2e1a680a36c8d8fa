"""Decoders: their description by parts, the tensors of a checkpoint that follow from it, and the loop over the layers.

An architecture's file reads a ``config.json`` and returns a :class:`DecoderConfig`, which lists the parts of each
layer. Everything else follows from the parts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ..backend.base import Backend
from ..backend.values import Array, ForwardBatch
from ..layers.cache import CacheLayout, KVCache, Layout, caches_of_layers
from ..layers.loading import Weights
from ._config import ModelConfig, common_divisors
from ._mtp import MtpConfig
from ._mtp import spec as mtp_spec
from .parts.ends import InputLayer, InputPart, OutputLayer, OutputPart
from .parts.part import Layer, LayerParts, LayerSource, LayerTensors, SharedValues
from .spec import Fold, Spec, StreamNorm, StreamTensors, Tensors, weights_of


@dataclass(frozen=True)
class LayeredConfig(ModelConfig):
    """One stack of layers over an input: the parts of each layer state what the model needs."""

    input: InputPart
    layer_parts: tuple[LayerParts, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layer_parts)

    @property
    def layer_layouts(self) -> tuple[tuple[Layout, ...], ...]:
        """What each layer keeps: of a sequence, or in an encoder of a step until the step has passed it."""
        return tuple(layer.layouts for layer in self.layer_parts)

    @property
    def layer_input_features(self) -> int:
        return self.input.layer_input_features

    @abstractmethod
    def layer_name(self, layer: int) -> str:
        """The prefix of the tensors of layer ``layer``."""

    @property
    def divided(self) -> dict[str, int]:
        return common_divisors(layer.divided for layer in self.layer_parts)

    @property
    def undivided(self) -> str | None:
        reasons = (sub.part.undivided for layer in self.layer_parts for sub in layer.sublayers)
        return next((reason for reason in reasons if reason is not None), None)


@dataclass(frozen=True)
class DecoderConfig(LayeredConfig):
    """A decoder: what lies before its layers, the parts of each layer, and what lies behind them.

    The tensors of layer ``i`` are named ``{prefix}.{i}.…``. With ``tied_head`` the head is the embedding's table.
    ``drafting`` is the layer that guesses the next tokens in files that have one. ``ignored`` and ``aliases`` are those
    of :class:`.spec.Spec`.
    """

    output: OutputPart
    tied_head: bool = False
    prefix: str = "model.layers"
    drafting: MtpConfig | None = None
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def cache_layout(self) -> CacheLayout:
        return CacheLayout(tuple(layout for layouts in self.layer_layouts for layout in layouts))

    @property
    def source_layers(self) -> dict[int, int]:
        found = ((layer, parts.source_layer) for layer, parts in enumerate(self.layer_parts))
        return {layer: source for layer, source in found if source is not None}

    @property
    def last_keeping_layer(self) -> int:
        """The last layer that keeps anything of tokens. It and those behind it compute the rows of last tokens alone,
        where the logits of these are wanted.
        """
        return max((layer for layer, parts in enumerate(self.layer_parts) if parts.layouts), default=0)

    @property
    def shared_norm_vectors(self) -> int:
        return sum(layer.shared_norm_vectors for layer in self.layer_parts)

    def layer_name(self, layer: int) -> str:
        return f"{self.prefix}.{layer}"

    @property
    def shared_heads(self) -> frozenset[int]:
        return frozenset[int]().union(*(layer.shared_heads for layer in self.layer_parts))


def spec(config: DecoderConfig) -> Spec:
    """Every tensor of the checkpoint, and what migration may do with them.

    Factors move from a norm to the matrices that read it, and inside of parts. Norms with an offset, and norms whose
    output is added to the residual stream, are left out.
    """
    layers = [layer.stated(config.layer_name(i)) for i, layer in enumerate(config.layer_parts)]
    parts = [part for layer in layers for part in layer.parts]
    tensors: Tensors = config.input.tensors() | config.output.tensors()
    for layer in layers:
        tensors |= layer.tensors
    folds = [fold for layer in layers for fold in layer.folds]
    norm = config.output.norm
    if norm is not None and norm.is_foldable and (config.output.project or not config.tied_head):
        folds.append(Fold(tuple(norm.tensors()), weights_of(config.output.reader)))
    value_heads = tuple(fold for part in parts for fold in part.value_heads)
    return Spec(
        tensors,
        tied={f"{config.output.name}.weight": f"{config.input.name}.weight"} if config.tied_head else {},
        ignored=config.ignored,
        foldable=(*folds, *value_heads),
        aliases=config.aliases,
        rotatable=tuple(name for part in parts for name in part.rotatable),
        stream=residual_stream(config, layers),
        value_heads=value_heads,
        gated=tuple(product for layer in layers for product in layer.gated),
        key_heads=tuple(heads for part in parts for heads in part.key_heads),
        fused={name: tensor for part in parts for name, tensor in part.fused.items()},
        drafting=None if config.drafting is None else mtp_spec(config.drafting),
    )


def residual_stream(config: DecoderConfig, layers: list[LayerTensors]) -> StreamTensors | None:
    """The tensors around the residual stream, if it starts at the embedding, and only RMSNorms read it."""
    norm = config.output.norm
    reads_norms = norm is not None and norm.is_rms and all(layer.reads_rms_norms for layer in config.layer_parts)
    if norm is None or not reads_norms or not config.input.is_only_a_table:
        return None
    norms = [norm for layer in layers for norm in layer.norms]
    norms.append(StreamNorm(f"{norm.name}.weight", weights_of(config.output.reader), norm.offset))
    writers = tuple(name for layer in layers for part in layer.parts for name in part.writers)
    return StreamTensors(weights_of(config.input.name), tuple(norms), writers)


Observer = Callable[[int, Array], None]
"""Reads the residual stream before a layer, whose number it gets too."""


class DecoderLayer(Protocol):
    """A layer of a decoder."""

    def __call__(self, residual: Array, cache: Any, batch: ForwardBatch, only_last: bool = False) -> Array:
        """Residual stream, cache and batch to the residual stream, fp32 ``[T, features]``.

        With ``only_last``, for a batch with ``last_positions``, the result has the rows of last tokens, ``[B,
        features]``; keys and values of all tokens are added to the cache.
        """
        ...


C = TypeVar("C", bound=LayeredConfig)


class LayerBuilder(Generic[C]):
    """Makes the parts of a model one at a time, so that a caller may keep one of them in memory."""

    def __init__(self, config: C, weights: Weights, ops: Backend):
        self.config = config
        self.weights = weights
        self.ops = ops
        self.shared = SharedValues(ops, weights)
        for layer in config.layer_parts:
            for sub in layer.sublayers:
                sub.part.share(self.shared)

    def embed(self) -> InputLayer:
        """Tokens to the residual stream, fp32 ``[T, features]``."""
        return self.config.input.build(self.ops, self.weights)

    def block(self, layer: int) -> Layer:
        """Layer ``layer``, counted from 0."""
        source = LayerSource(self.ops, self.weights, self.config.layer_name(layer), self.shared)
        return self.config.layer_parts[layer].build(source)


class ModelBuilder(LayerBuilder[DecoderConfig]):
    """The parts of a decoder."""

    def output(self) -> OutputLayer:
        """The residual stream to logits, fp32 ``[T, vocab]``."""
        return self.config.output.build(self.ops, self.weights)


class Decoder:
    """Tokens in, logits out."""

    def __init__(self, builder: ModelBuilder):
        self.ops = builder.ops
        self.config = builder.config
        self.embed = builder.embed()
        self.blocks = self.ops.blocks(builder.block, self.config.num_layers)
        self.output = builder.output()
        self._layouts, self._sources = self.config.layer_layouts, self.config.source_layers
        self._last_keeping_layer = self.config.last_keeping_layer

    def __call__(
        self, batch: ForwardBatch, cache: KVCache, all_logits: bool = False, observe: Observer | None = None,
        observes_end: bool = False,
    ) -> Array:  # fmt: skip
        """fp32 logits ``[L, vocab]`` of the step's ``logit_rows``, or with ``all_logits`` of all, ``[T, vocab]``.

        ``observe`` is called before each layer with its number and the residual stream, fp32 ``[T, features]``, which
        the layer may overwrite; with ``observes_end`` also behind the last one, with the rows of all tokens.
        """
        with self.ops.step(batch):
            residual, last = self.embed(batch), self.config.num_layers - 1
            batch = self.embed.with_layer_inputs(residual, batch)
            only_last = batch.last_positions is not None and not all_logits and not observes_end
            narrow = self._last_keeping_layer if observe is None else last
            for i, (block, layer_cache) in enumerate(zip(self.blocks, self._caches(cache), strict=True)):
                if observe is not None:
                    observe(i, residual)
                residual = block(residual, layer_cache, batch, only_last and i == narrow)
                if only_last and i == narrow:
                    batch = self.ops.last_token_batch(batch)
            if observe is not None and observes_end:
                observe(last + 1, residual)
            if not all_logits and not only_last:
                residual = self.ops.last_tokens(residual, batch)
            return self.output(residual)

    def _caches(self, cache: KVCache) -> list[Any]:
        return caches_of_layers(self._layouts, cache, self._sources)

    def read(self, batch: ForwardBatch, cache: KVCache) -> None:
        """Add a step's tokens to the cache, without logits."""
        with self.ops.step(batch):
            residual, narrow = self.embed(batch), self._last_keeping_layer
            batch = self.embed.with_layer_inputs(residual, batch)
            only_last = batch.last_positions is not None
            for i, (block, layer_cache) in enumerate(zip(self.blocks, self._caches(cache), strict=True)):
                residual = block(residual, layer_cache, batch, only_last and i == narrow)
                if only_last and i == narrow:
                    batch = self.ops.last_token_batch(batch)
