"""Encoders: models that make vectors of whole texts, and no next token.

An encoder is a stack of layers over packed texts. Attention in both directions keeps nothing
(:class:`.parts.cross_attention.EncoderAttentionPart`). A decoder that embeds texts is an encoder too, whose mixers see
the tokens before their own: what such a layer keeps of a step is of no use behind that layer.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ..backend.base import Backend
from ..backend.values import BLOCK_SIZE, NULL_BLOCK, Array, ForwardBatch, Pooling
from ..layers.cache import CacheLayout, KVCache, Layout, blocks_for, caches_of_layers
from ..layers.norm import NormLayer
from ._config import (
    ACTIVATIONS,
    MAX_LAYERS,
    ConfigReader,
    Fields,
    choice,
    integer,
    number,
)
from ._decoder import Decoder, DecoderConfig, LayerBuilder, LayeredConfig
from .parts.classifier import Classifier, ClassifierPart
from .parts.cross_attention import EncoderAttentionPart
from .parts.ends import InputLayer, InputPart, PositionsPart, TokenTypesPart
from .parts.feed_forward import FeedForwardPart
from .parts.norms import NormKind, NormPart
from .parts.part import Layer, LayerParts, RelativeBiasTable, Sublayer
from .spec import Fold, Spec, Tensors

KEYS = {
    "vocab_size": integer("vocab_size", 30522),
    "hidden_size": integer("hidden_size", 768),
    "intermediate_size": integer("intermediate_size", 3072),
    "layers": integer("num_hidden_layers", 12, high=MAX_LAYERS),
    "heads": integer("num_attention_heads", 12),
    "positions": integer("max_position_embeddings", 512),
    "norm_eps": number("layer_norm_eps", 1e-12, high=1.0),
    "activation": choice("hidden_act", "gelu", ACTIVATIONS),
}
"""The keys of BERT and its relatives; the defaults are BERT's."""

HEADS = {"ForSequenceClassification": "sequence", "ForTokenClassification": "token"}
"""The end of the name of a class in transformers -> what its head classifies."""


@dataclass(frozen=True)
class EncoderConfig(LayeredConfig):
    """An encoder: what lies before its layers, the parts of each layer, and the norm behind them.

    The tensors of layer ``i`` are named ``{prefix}.{i}.…``. ``relative`` is a bias by distance that all layers share.
    ``classifier`` is the head of a model that classifies, whose ``labels`` have names. A model that ``is_causal`` was
    made of a decoder. ``ignored`` and ``aliases`` are those of :class:`.spec.Spec`.
    """

    generates: ClassVar[bool] = False

    norm: NormPart | None = None
    prefix: str = "encoder.layer"
    relative: RelativeBiasTable | None = None
    classifier: ClassifierPart | None = None
    labels: tuple[str, ...] = ()
    is_causal: bool = False
    ignored: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def cache_layout(self) -> CacheLayout:
        """Nothing: a text is computed in one step."""
        return CacheLayout(())

    @property
    def reads_pieces(self) -> bool:
        """Not if a token sees those behind it."""
        parts = (sub.part for layer in self.layer_parts for sub in layer.sublayers)
        return not any(isinstance(part, EncoderAttentionPart) for part in parts)

    def layer_name(self, layer: int) -> str:
        return f"{self.prefix}.{layer}"


def of_decoder(decoder: DecoderConfig, config: Mapping[str, Any]) -> EncoderConfig:
    """The encoder that a decoder is without its head, by the ``config.json`` of a folder that embeds or classifies.

    Files of a model without a head leave out the prefix of its tensors, such as ``model.``.
    """
    read, kind = ConfigReader(config, {}), head_kind(config)
    labels = label_names(read) if kind else ()
    read.checked_fields()
    classifier = None
    if kind is not None:
        pooling = Pooling.LAST if kind == "sequence" else None
        classifier = ClassifierPart(decoder.hidden_size, len(labels), "score", pooling, out_bias=kind == "token")
    found = EncoderConfig(
        decoder.vocab_size,
        decoder.hidden_size,
        decoder.context_length,
        decoder.input,
        decoder.layer_parts,
        decoder.output.norm,
        decoder.prefix,
        classifier=classifier,
        labels=labels,
        ignored=(*decoder.ignored, rf"{re.escape(decoder.output.name)}\..*"),
        is_causal=True,
    )
    base = f"{decoder.input.name.partition('.')[0]}."
    names = [name for name in spec(found).parameters if name.startswith(base)]
    modules = {name.removeprefix(base).partition(".")[0] for name in names}
    return replace(found, aliases=(*decoder.aliases, *base_names(base, map(re.escape, modules))))


def spec(config: EncoderConfig) -> Spec:
    """Every tensor of the checkpoint. Factors move from a norm to the matrices that read it, and inside of parts."""
    layers = [layer.stated(config.layer_name(i)) for i, layer in enumerate(config.layer_parts)]
    parts = [part for layer in layers for part in layer.parts]
    tensors: Tensors = config.input.tensors()
    for layer in layers:
        tensors |= layer.tensors
    if config.norm is not None:
        tensors |= config.norm.tensors()
    if config.relative is not None:
        tensors |= config.relative.tensors(config.relative.name.rpartition(".")[0])
    if config.classifier is not None:
        tensors |= config.classifier.tensors()
    folds: list[Fold] = [fold for layer in layers for fold in layer.folds]
    value_heads = tuple(fold for part in parts for fold in part.value_heads)
    return Spec(
        tensors,
        ignored=config.ignored,
        foldable=(*folds, *value_heads),
        aliases=config.aliases,
        rotatable=tuple(name for part in parts for name in part.rotatable),
        value_heads=value_heads,
        gated=tuple(product for layer in layers for product in layer.gated),
        key_heads=tuple(heads for part in parts for heads in part.key_heads),
        fused={name: tensor for part in parts for name, tensor in part.fused.items()},
    )


class EncoderBuilder(LayerBuilder[EncoderConfig]):
    """The parts of an encoder."""

    def norm(self) -> NormLayer | None:
        """The norm behind the layers."""
        return None if self.config.norm is None else self.config.norm.build(self.ops, self.weights)

    def output(self) -> Callable[[Array], Array]:
        """The residual stream to the tokens' vectors, fp32 ``[T, features]``."""
        return self.norm() or (lambda residual: residual)

    def classifier(self) -> Classifier | None:
        """The head of a model that classifies."""
        return None if self.config.classifier is None else self.config.classifier.build(self.weights)


class TextCaches(dict[tuple[Layout, ...], KVCache]):
    """What layers keep while texts are computed, by their layouts."""

    def close(self) -> None:
        """Free the memory now."""
        for cache in self.values():
            cache.close()


class TextVectors:
    """Texts in, a vector of each token out. ``layouts`` has what each of ``blocks`` keeps or reads, if anything.

    ``reads_pieces`` says whether :meth:`pieces` may compute a text.
    """

    def __init__(
        self,
        ops: Backend,
        embed: InputLayer,
        blocks: Iterable[Layer],
        layouts: Sequence[tuple[Layout, ...]],
        norm: NormLayer | None,
        reads_pieces: bool = False,
    ):
        self.ops = ops
        self.embed = embed
        self.blocks = blocks
        self.layouts = layouts
        self.norm = norm
        self.reads_pieces = reads_pieces

    @classmethod
    def of_decoder(cls, decoder: Decoder) -> TextVectors:
        """The vectors behind the layers of a decoder, which generates beside it."""
        layouts = layouts_read(decoder.config.layer_parts)
        return cls(decoder.ops, decoder.embed, decoder.blocks, layouts, decoder.output.norm, reads_pieces=True)

    def tables(self, lengths: Sequence[int]) -> list[np.ndarray]:
        """The block tables of a step of texts of these lengths, as :meth:`__call__` wants them: of blocks and of slots.

        There are none for a model whose layers keep nothing.
        """
        if not any(self.layouts):
            return []
        counts = np.array([blocks_for(length) for length in lengths])
        firsts = 1 + np.cumsum(counts) - counts
        places = np.arange(counts.max(initial=1))
        blocks = np.where(places < counts[:, None], firsts[:, None] + places, NULL_BLOCK)
        return [blocks.astype(np.int32), np.arange(1, 1 + len(counts), dtype=np.int32)[:, None]]

    def caches(self, tokens: int, texts: int) -> TextCaches:
        """What the layers keep of a step of up to ``tokens`` tokens of up to ``texts`` texts.

        Layers that keep the same share the memory, for no layer reads what the one before it has kept, unless that is
        the last one which keeps the same.
        """
        caches = TextCaches()
        try:
            for layouts in dict.fromkeys(layouts for layouts in self.layouts if layouts):
                layout = CacheLayout(layouts)
                sizes = [1 + texts + (0 if kept.per_sequence else tokens // BLOCK_SIZE) for kept in layout.groups]
                caches[layouts] = KVCache(self.ops, layout, sizes)
        except BaseException:
            caches.close()
            raise
        return caches

    def __call__(self, batch: ForwardBatch, caches: TextCaches | None = None) -> Array:
        """The vectors of the tokens of whole texts, packed: fp32 ``[T, features]``. Call it in a step of the batch.

        ``batch`` has the block tables of :meth:`tables`. ``caches`` are those of :meth:`caches`; None for new ones.
        """
        if caches is None:
            with closing(self.caches(int(batch.tokens.shape[0]), batch.batch_size)) as made:
                return self(batch, made)
        residual = self.embed(batch)
        batch = self.embed.with_layer_inputs(residual, batch)
        for block, layouts in zip(self.blocks, self.layouts, strict=True):
            if not layouts:
                residual = block(residual, None, batch)
                continue
            cache = caches[layouts]
            tables = tuple(batch.block_tables[kept.per_sequence] for kept in cache.layout.groups)
            (own,) = caches_of_layers([layouts], cache)
            residual = block(residual, own, replace(batch, block_tables=tables))
        return self._normed(residual)

    def pieces(self, tokens: np.ndarray, size: int) -> Generator[None, None, list[Array]]:
        """The vectors of one text's tokens, int32 ``[n]``: fp32 ``[size, features]`` of each piece, the last one less.

        All pieces pass through a layer before the next one, so the memory is that of a step of ``size`` tokens, of the
        residual stream of the whole text, and of what a layer keeps. The generator yields behind each layer of each
        piece, when the device has computed it; other steps may be computed before it goes on, as
        :attr:`parts_at_once` says. Vectors are those of :meth:`__call__`, to the bit where a step's size changes none.
        """
        ops, tables = self.ops, self.tables([len(tokens)])
        steps = [
            ForwardBatch.packed(ops.array, [tokens[first : first + size]], [first], tables)
            for first in range(0, len(tokens), size)
        ]
        residuals: list[Array] = []
        for i, step in enumerate(steps):
            with ops.step(step):
                residuals.append(ops.complete(self.embed(step)))
                inputs = self.embed.with_layer_inputs(residuals[i], step).layer_inputs
                steps[i] = replace(step, layer_inputs=None if inputs is None else ops.complete(inputs))
        with ExitStack() as caches:
            made: dict[tuple[Layout, ...], KVCache] = {}
            for block, layouts in zip(self.blocks, self.layouts, strict=True):
                own = None
                if layouts and layouts not in made:
                    cache = KVCache.for_sequences(ops, CacheLayout(layouts), 1, len(tokens))
                    made[layouts] = caches.enter_context(closing(cache))
                if layouts:
                    (own,) = caches_of_layers([layouts], made[layouts])
                for i, step in enumerate(steps):
                    kept = made[layouts].layout.groups if layouts else ()
                    own_tables = tuple(step.block_tables[group.per_sequence] for group in kept)
                    with ops.step(step):
                        found = block(residuals[i], own, replace(step, block_tables=own_tables))
                        residuals[i] = ops.complete(found)
                    yield
        for i, step in enumerate(steps):  # each in place of its residual stream, which takes as much memory
            with ops.step(step):
                residuals[i] = ops.complete(self._normed(residuals[i]))
        return residuals

    @property
    def parts_at_once(self) -> int:
        """After how many parts of :meth:`pieces` others may compute a step: a step's layers, or all if some stream."""
        return sys.maxsize if self.ops.placement.streamed else max(len(self.layouts), 1)

    def _normed(self, residual: Array) -> Array:
        found: Array = residual if self.norm is None else self.norm(residual)
        return found


def layouts_read(layers: Sequence[LayerParts]) -> list[tuple[Layout, ...]]:
    """What each layer keeps, or reads of what another has kept."""
    return [x.layouts if x.source_layer is None else layers[x.source_layer].layouts for x in layers]


class Encoder(TextVectors):
    """The network of an encoder, and the head of one that classifies."""

    def __init__(self, builder: EncoderBuilder):
        self.config = config = builder.config
        ops = builder.ops
        super().__init__(
            ops,
            builder.embed(),
            ops.blocks(builder.block, config.num_layers),
            layouts_read(config.layer_parts),
            builder.norm(),
            config.reads_pieces,
        )
        self.classifier = builder.classifier()


# -- BERT and its relatives, from the fields of a configuration ------------------------------------------------------


@dataclass(frozen=True)
class LayerNames:
    """Names of the tensors of a layer that normalises behind its parts; they follow ``{prefix}.{i}.``."""

    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    out: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    inner: tuple[str, ...] = ("intermediate.dense",)
    down: str = "output.dense"
    norm: str = "output.LayerNorm"


def checked_fields(read: ConfigReader) -> dict[str, Any]:
    """The fields of :data:`KEYS`, with the size of a head. Raises with every problem."""
    read.require_divisible("hidden_size", "heads")
    if read.config.get("is_decoder"):
        read.problem("is_decoder", "is_decoder is true, but this model_type is run as an encoder")
    kind = read.config.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        read.problem("position_embedding_type", f"position_embedding_type is {kind!r}; absolute is supported")
    fields = read.checked_fields()
    return fields | {"head_dim": fields["hidden_size"] // fields["heads"]}


def layer_norm(fields: Fields, name: str) -> NormPart:
    """A LayerNorm of the residual stream."""
    return NormPart(name, fields["hidden_size"], fields["norm_eps"], NormKind.LAYER)


def attention(fields: Fields, qkv: tuple[str, ...], out: str, bias: bool = True, **others: Any) -> EncoderAttentionPart:
    """Attention in both directions, and the ``others`` of its options."""
    heads = fields["heads"]
    return EncoderAttentionPart(
        fields["hidden_size"],
        heads,
        heads,
        fields["head_dim"],
        qkv=qkv,
        out=out,
        qkv_bias=bias,
        out_bias=bias,
        **others,
    )


def post_norm_layer(
    fields: Fields, names: LayerNames, bias: bool = True, gated: bool = False, **others: Any
) -> LayerParts:
    """A layer whose parts read the residual stream, which is normalised behind each; ``others`` are of attention."""
    sizes = fields["hidden_size"], fields["intermediate_size"], fields["activation"]
    mixer = attention(fields, names.qkv, names.out, bias, **others)
    mlp = FeedForwardPart(*sizes, gated, names.inner, names.down, bias)
    first, second = layer_norm(fields, names.attention_norm), layer_norm(fields, names.norm)
    return LayerParts((Sublayer(mixer, stream_norm=first), Sublayer(mlp, stream_norm=second)))


def encoder_input(
    fields: Fields, base: str, first_position: int | None = 0, token_types: int = 0, norm: str = "embeddings.LayerNorm"
) -> InputPart:
    """The embeddings of BERT under the prefix ``base``, normalised.

    Position 0 has the row ``first_position`` of the table; None for a model without learned positions. There are
    ``token_types`` types of tokens, 0 for none.
    """
    table, positions = f"{base}embeddings.word_embeddings", None
    if first_position is not None:
        count = fields["positions"] - first_position
        positions = PositionsPart(f"{base}embeddings.position_embeddings", count, first_position)
    types = TokenTypesPart(f"{base}embeddings.token_type_embeddings", token_types) if token_types else None
    sizes = fields["vocab_size"], fields["hidden_size"]
    return InputPart(*sizes, table, norm=layer_norm(fields, base + norm), positions=positions, token_types=types)


def head_kind(config: Mapping[str, Any]) -> str | None:
    """What the head of a ``config.json`` classifies, ``sequence`` or ``token``; None without such a head."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    return next((kind for end, kind in HEADS.items() if name.endswith(end)), None)


def label_names(read: ConfigReader) -> tuple[str, ...]:
    """The names of a classifier's labels, in order: ``id2label``, or ``LABEL_0`` and so on for ``num_labels``."""
    found = read.config.get("id2label")
    if not found:
        return tuple(f"LABEL_{i}" for i in range(read.value(integer("num_labels", 2, high=1 << 20))))
    is_complete = isinstance(found, Mapping) and {str(key) for key in found} == {str(i) for i in range(len(found))}
    if not is_complete:
        read.problem("id2label", f"id2label is {found!r}, not an object that names the labels 0, 1, ...")
        return ("LABEL_0",)
    named = {str(key): str(value) for key, value in found.items()}
    return tuple(named[str(i)] for i in range(len(named)))


def base_names(base: str, known: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Aliases that give the tensors of the modules ``known`` the prefix ``base``, which some files leave out or add.

    ``base`` is empty for a file that has no head; then a prefix such as ``bert.`` is dropped.
    """
    modules = "|".join(sorted(known))
    if base:
        return ((rf"((?:{modules})\..*)", rf"{base}\1"),)
    return ((rf"\w+\.((?:{modules})\..*)", r"\1"),)
