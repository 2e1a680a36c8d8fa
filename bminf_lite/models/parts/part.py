"""What a part of a layer states and computes, and the layer: norms around parts.

A new kind of layer is a new :class:`Part` in a file of its own, and the operation of :class:`.base.Backend` that it
calls. There is no list of parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np

from ...backend.base import Backend
from ...backend.communicator import shard
from ...backend.values import Array, ForwardBatch, LinearBias, RelativeBias, Rope
from ...layers.cache import Layout
from ...layers.loading import Weights
from ...layers.norm import NormLayer
from ...layers.relative_bias import load_relative_bias
from .._config import common_divisors
from .._rotary import Rotary
from ..spec import (
    Fold,
    FusedExperts,
    GatedProduct,
    KeyHeads,
    Parameter,
    Role,
    StreamNorm,
    Tensors,
    embedding,
)
from .norms import NormPart


@dataclass(frozen=True)
class PartTensors:
    """The tensors of a part of one layer, and what migration may do with them, under their full names.

    - ``tensors``: all of them, with shapes and roles;
    - ``readers``: the matrices that read the part's input;
    - ``writers``: the matrices, and their biases, whose output is added to the residual stream;
    - ``folds``: places where one matrix of the part can be multiplied by a factor per channel and the next one divided
      by it; ``value_heads`` has those between the values of heads and the matrix that reads them;
    - ``key_heads``: heads whose keys may be scaled, and their queries divided by the same;
    - ``rotatable``: the matrices whose input ``w8a8-rotate`` rotates, see :class:`.spec.Spec`;
    - ``foldable``: factors per channel may move from a norm to the ``readers``;
    - ``fused``, ``source_readers``: see :class:`.spec.Spec`;
    - ``bounded``: gate, up and down of gated products with a known bound, which read the part's input;
    - ``gated``: gated products that read a norm inside the part instead (see :class:`.spec.GatedProduct`).
    """

    tensors: Tensors
    readers: tuple[str, ...]
    writers: tuple[str, ...]
    folds: tuple[Fold, ...] = ()
    value_heads: tuple[Fold, ...] = ()
    key_heads: tuple[KeyHeads, ...] = ()
    rotatable: tuple[str, ...] = ()
    foldable: bool = True
    source_readers: tuple[str, ...] = ()
    fused: Mapping[str, FusedExperts] = field(default_factory=dict)
    bounded: tuple[tuple[str, str, str], ...] = ()
    gated: tuple[GatedProduct, ...] = ()

    def beside(self, other: PartTensors) -> PartTensors:
        """Those of two parts of a layer that read the same input."""
        both = {x.name: (getattr(self, x.name), getattr(other, x.name)) for x in fields(self) if x.name != "foldable"}
        merged: dict[str, Any] = {
            name: {**a, **b} if isinstance(a, Mapping) else (*a, *b) for name, (a, b) in both.items()
        }
        return PartTensors(**merged, foldable=self.foldable and other.foldable)


class PartLayer(Protocol):
    """What computes a part. ``x`` is the input ``[T, features]``: a norm of the residual stream, or the stream."""

    def hidden(self, x: Array, cache: Any, batch: ForwardBatch, only_last: bool) -> Array:
        """What :meth:`add_to` reads; with ``only_last``, which only mixers see, that of last tokens ``[B, ...]``."""
        ...

    def fp32(self, hidden: Array) -> Array:
        """The part's output, fp32 ``[T, features]``."""
        ...

    def add_to(self, residual: Array, hidden: Array) -> Array:
        """``residual`` fp32 ``[T, features]``, which may be overwritten, plus the part's output."""
        ...


@dataclass(frozen=True)
class LayerSource:
    """What a part of the layer ``name`` is built from; ``shared`` holds what the layers of a model have in common."""

    ops: Backend
    weights: Weights
    name: str
    shared: SharedValues

    def named(self, names: Iterable[str]) -> list[str]:
        """The full names of the layer's tensors."""
        return [f"{self.name}.{name}" for name in names]


class SharedValues:
    """Arrays on the device that several layers use; each is made once."""

    def __init__(self, ops: Backend, weights: Weights):
        self.ops = ops
        self.weights = weights
        self._relative: dict[RelativeBiasTable, RelativeBias] = {}
        self._ropes: dict[tuple[Rotary, int], Rope] = {}
        self._slopes: dict[tuple[float, ...], LinearBias] = {}

    def rope(self, rotary: Rotary | None, head_dim: int) -> Rope | None:
        """The rotation of heads of ``head_dim`` elements."""
        if rotary is None:
            return None
        key = rotary, head_dim
        if key not in self._ropes:
            self._ropes[key] = rotary.rope(self.ops, head_dim)
        return self._ropes[key]

    def linear_bias(self, slopes: tuple[float, ...]) -> LinearBias | None:
        """ALiBi with a slope for each head, of which a rank has its share; None without slopes."""
        if not slopes:
            return None
        if slopes not in self._slopes:
            own = np.array(slopes)[shard(len(slopes), self.ops.communicator)]
            self._slopes[slopes] = LinearBias(self.ops.vector(own))
        return self._slopes[slopes]

    def relative_bias(self, table: RelativeBiasTable | None) -> RelativeBias | None:
        """The bias by distance of a table, of whose heads a rank has its share; None without a table."""
        if table is None:
            return None
        if table not in self._relative:
            self._relative[table] = load_relative_bias(
                self.ops, self.weights, table.name, table.bidirectional, table.max_distance
            )
        return self._relative[table]


@dataclass(frozen=True)
class RelativeBiasTable:
    """The table ``{name}.weight`` ``[buckets, heads]`` of a bias by distance (T5), in the layer that holds it."""

    name: str
    buckets: int
    heads: int
    max_distance: int
    bidirectional: bool

    def tensors(self, layer: str) -> Tensors:
        """The table, if the layer ``layer`` holds it; others read it there."""
        return embedding(self.name, (self.buckets, self.heads)) if self.name.startswith(f"{layer}.") else {}


class Part(ABC):
    """A mixer, which reads other tokens of a sequence, or a feed-forward, which does not."""

    @property
    def layout(self) -> Layout | None:
        """What a mixer keeps in the cache; None for a feed-forward."""
        return None

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """All layouts of the part: several if it contains several mixers."""
        return () if self.layout is None else (self.layout,)

    @property
    def source_layer(self) -> int | None:
        """The layer whose cache a mixer reads, which keeps nothing itself; None for other parts."""
        return None

    @property
    def is_mixer(self) -> bool:
        """Whether it reads other tokens of a sequence."""
        return bool(self.layouts) or self.source_layer is not None

    @property
    def adds_first(self) -> bool:
        """Whether what is added is computed of the input when it is added: in a parallel layer, before others add."""
        return False

    @property
    def num_readers(self) -> int:
        """How many products read the part's input one after another; matrices that are stacked into one count once."""
        return 1

    @property
    def divided(self) -> Mapping[str, int]:
        """What the ranks of a model divide, by name."""
        return {}

    @property
    def shared_heads(self) -> int:
        """The number of key and value heads: a multiple of the number of ranks, or a divisor of it; 0 without any."""
        return 0

    @property
    def undivided(self) -> str | None:
        """Why the part cannot be divided among ranks; None if it can."""
        return None

    def share(self, shared: SharedValues) -> None:
        """Make the values that the part has in common with others, before any layer is built."""
        return

    @abstractmethod
    def stated(self, layer: str) -> PartTensors:
        """The tensors of the part in the layer ``layer``, such as ``model.layers.0``."""

    @abstractmethod
    def build(self, source: LayerSource) -> PartLayer:
        """What computes the part."""


@dataclass(frozen=True)
class Sublayer:
    """A part with its norms: ``r = r + post_norm(part(norm(r)))``, then ``r = stream_norm(r)``; each may be missing."""

    part: Part
    norm: NormPart | None = None
    post_norm: NormPart | None = None
    stream_norm: NormPart | None = None

    @property
    def norms(self) -> tuple[NormPart, ...]:
        """The norms that exist."""
        return tuple(norm for norm in (self.norm, self.post_norm, self.stream_norm) if norm is not None)


@dataclass(frozen=True)
class LayerTensors:
    """What :class:`.spec.Spec` has of a layer."""

    tensors: Tensors
    folds: tuple[Fold, ...]
    norms: tuple[StreamNorm, ...]
    parts: tuple[PartTensors, ...]
    gated: tuple[GatedProduct, ...]


@dataclass(frozen=True)
class LayerParts:
    """A layer: parts one after another. If they are ``parallel``, all read the same residual stream.

    ``scale`` names a tensor of one number, by which the residual stream is multiplied behind the last part.

    In a parallel layer the mixer is the first part, and parts without a norm read what the first one's norm returns.
    """

    sublayers: tuple[Sublayer, ...]
    parallel: bool = False
    scale: str | None = None

    def __post_init__(self) -> None:
        assert sum(sub.part.is_mixer for sub in self.sublayers) <= 1, "SideBySidePart makes one mixer of several"
        assert self.scale is None or self.sublayers[-1].post_norm, "`scale` needs a post_norm on the last part"
        if self.parallel:
            assert self.sublayers[0].norm and self.sublayers[0].part.is_mixer
            assert not any(sub.post_norm or sub.stream_norm for sub in self.sublayers)
            assert sum(sub.part.adds_first for sub in self.sublayers) <= 1

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """What the mixer keeps in the cache: one layout, several if mixers are side by side, or none."""
        return tuple(layout for sub in self.sublayers for layout in sub.part.layouts)

    @property
    def source_layer(self) -> int | None:
        """The layer whose cache the mixer reads, if it keeps nothing itself."""
        return next((s.part.source_layer for s in self.sublayers if s.part.source_layer is not None), None)

    @property
    def norms(self) -> tuple[NormPart, ...]:
        """The norms of all parts."""
        return tuple(norm for sub in self.sublayers for norm in sub.norms)

    @property
    def shared_norm_vectors(self) -> int:
        """How many vectors of norms a step reads again, because several products apply the same norm to their input."""
        shared = sum(sub.norm is None for sub in self.sublayers[1:]) if self.parallel else 0
        found = shared * self.sublayers[0].norm.num_vectors if shared and self.sublayers[0].norm else 0
        return found + sum(sub.norm.num_vectors * (sub.part.num_readers - 1) for sub in self.sublayers if sub.norm)

    @property
    def reads_rms_norms(self) -> bool:
        """Whether every part reads an RMSNorm of the residual stream, and adds to the stream directly."""
        inputs = [sub.norm or (self.sublayers[0].norm if self.parallel else None) for sub in self.sublayers]
        has_others = any(sub.post_norm or sub.stream_norm for sub in self.sublayers)
        return not has_others and all(norm is not None and norm.is_rms for norm in inputs)

    def stated(self, layer: str) -> LayerTensors:
        """The tensors of the layer ``layer``, such as ``model.layers.0``."""
        parts = tuple(sub.part.stated(layer) for sub in self.sublayers)
        tensors: Tensors = {}
        for part in parts:
            tensors |= part.tensors
        for norm in self.norms:
            tensors |= norm.tensors(layer)
        if self.scale is not None:
            tensors[f"{layer}.{self.scale}"] = Parameter((1,), Role.VECTOR)
        inputs = self._inputs()
        folds = [
            Fold(tuple(norm.tensors(layer)), tuple(name for place in places for name in parts[place].readers))
            for norm, places in inputs if norm.is_foldable and all(parts[place].foldable for place in places)
        ]  # fmt: skip
        stream_norms, gated = [], []
        for norm, places in inputs:
            weight = next(iter(norm.tensors(layer)), None)
            if norm.is_rms and weight is not None:
                readers = tuple(name for part in places for name in parts[part].readers)
                stream_norms.append(StreamNorm(weight, readers, norm.offset))
            if not norm.has_bias:
                products = (product for part in places for product in parts[part].bounded)
                gated += [GatedProduct(*product, weight, norm.offset) for product in products]
        folds += [fold for part in parts for fold in part.folds]
        gated += [product for part in parts for product in part.gated]
        return LayerTensors(tensors, tuple(folds), tuple(stream_norms), parts, tuple(gated))

    def _inputs(self) -> list[tuple[NormPart, list[int]]]:
        """The norms that parts read, and the numbers of these parts."""
        if self.parallel and self.sublayers[0].norm:
            first = [place for place, sub in enumerate(self.sublayers) if place == 0 or sub.norm is None]
            others = [(sub.norm, [place]) for place, sub in enumerate(self.sublayers) if place and sub.norm]
            return [(self.sublayers[0].norm, first), *others]
        return [(sub.norm, [place]) for place, sub in enumerate(self.sublayers) if sub.norm]

    def build(self, source: LayerSource) -> Layer:
        """The layer on the device of ``source``."""
        return Layer(self, source)

    @property
    def divided(self) -> dict[str, int]:
        """What the ranks of a model divide, by name."""
        return common_divisors(sub.part.divided for sub in self.sublayers)

    @property
    def shared_heads(self) -> frozenset[int]:
        """Numbers of heads of keys and values, see :attr:`Part.shared_heads`."""
        return frozenset(sub.part.shared_heads for sub in self.sublayers if sub.part.shared_heads)


class Layer:
    """Computes :class:`LayerParts` on the device of ``source``."""

    def __init__(self, parts: LayerParts, source: LayerSource):
        self.ops = source.ops
        self.parallel = parts.parallel
        mixers = (place for place, sub in enumerate(parts.sublayers) if sub.part.is_mixer)
        self.mixer = next(mixers, -1)
        """The number of the mixer; -1 without one."""

        def norms(chosen: Iterable[NormPart | None]) -> list[NormLayer | None]:
            return [norm.build(source.ops, source.weights, source.name) if norm else None for norm in chosen]

        self.norms = norms(sub.norm for sub in parts.sublayers)
        self.post_norms = norms(sub.post_norm for sub in parts.sublayers)
        self.stream_norms = norms(sub.stream_norm for sub in parts.sublayers)
        self.parts = [sub.part.build(source) for sub in parts.sublayers]
        self.adds_first = [sub.part.adds_first for sub in parts.sublayers]
        self.scale = 1.0 if parts.scale is None else float(source.weights.vector(f"{source.name}.{parts.scale}")[0])

    def __call__(self, residual: Array, cache: Any, batch: ForwardBatch, only_last: bool = False) -> Array:
        """See :class:`.._decoder.DecoderLayer`. ``cache`` is what the mixer's layouts make (see
        :func:`bminf_lite.layers.cache.caches_of_layers`); None for an encoder.
        """
        if self.parallel:
            return self._parallel(residual, cache, batch, only_last)
        if only_last and self.mixer < 0:
            residual = self.ops.last_tokens(residual, batch)
        last_part = len(self.parts) - 1
        for place, part in enumerate(self.parts):
            norm, post_norm, stream_norm = self.norms[place], self.post_norms[place], self.stream_norms[place]
            x = norm(residual) if norm else residual
            is_last_mixer = only_last and place == self.mixer
            hidden = part.hidden(x, cache, batch, is_last_mixer)
            if is_last_mixer:
                residual = self.ops.last_tokens(residual, batch)
                if batch.layer_inputs is not None:
                    batch = replace(batch, layer_inputs=self.ops.last_tokens(batch.layer_inputs, batch))
            if post_norm:
                scale = self.scale if place == last_part else 1.0
                residual = self.ops.norm_add(part.fp32(hidden), post_norm.norm, residual, scale)
            else:
                residual = part.add_to(residual, hidden)
            if stream_norm:
                residual = stream_norm(residual)
        return residual

    def _parallel(self, residual: Array, cache: Any, batch: ForwardBatch, only_last: bool) -> Array:
        mixer, *others = self.parts
        norm, *other_norms = self.norms
        assert norm is not None
        x = norm(residual)
        heads = mixer.hidden(x, cache, batch, only_last)
        if only_last:
            residual = self.ops.last_tokens(residual, batch)
            x = norm(residual)
        inputs = (own(residual) if own else x for own in other_norms)
        hidden = [part.hidden(x, cache, batch, False) for part, x in zip(others, inputs, strict=True)]  # beside mixing
        for part, own, adds_first in zip(others, hidden, self.adds_first[1:], strict=True):
            residual = part.add_to(residual, own) if adds_first else residual
        residual = mixer.add_to(residual, heads)
        for part, own, adds_first in zip(others, hidden, self.adds_first[1:], strict=True):
            residual = residual if adds_first else part.add_to(residual, own)
        return residual
