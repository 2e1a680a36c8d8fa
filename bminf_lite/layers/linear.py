"""Linear layers: ``y = x W^T + b``. Matrices that read the same input are stacked into one.

Under tensor parallelism (https://arxiv.org/abs/1909.08053) a rank computes some outputs of a
:class:`ColumnParallelLinear`, and a :class:`RowParallelLinear` reads these and adds the products of all ranks. The
names are those of matrices ``[in, out]``, as the paper has them. Other layers are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from ..backend.adapter_slots import AdapterSite
from ..backend.base import Backend
from ..backend.communicator import Communicator, shard, shard_heads
from ..backend.quantization import HostWeight, weight_columns
from ..backend.side_products import Adapter
from ..backend.values import Array
from ..errors import CheckpointError, UsageError
from .loading import RowTransform, TransformedWeights, Weights


@dataclass(frozen=True)
class KeyValueHeads:
    """A part of a product's outputs that is ``count`` heads of keys or values, of ``size`` elements each."""

    count: int
    size: int


Section = int | KeyValueHeads
"""A part of a product's outputs, by its width."""
Sections = Sequence[Section | tuple[Section, ...]]
"""Parts of a product's outputs; those of one matrix may be together."""


class Linear:
    """One product with the matrices ``names`` stacked along their outputs (so query, key and value are one product).

    ``names`` are checkpoint prefixes: each has a ``.weight`` and, if ``bias``, a ``.bias``. If the backend has
    ``adapter_slots``, adapters may change the product. ``widths`` are the outputs of each matrix. Raises
    ``CheckpointError`` for matrices that are not quantized alike.
    """

    def __init__(self, ops: Backend, weights: Weights, names: Sequence[str], bias: bool = False):
        self.ops = ops
        parts = [weights.weight(f"{name}.weight") for name in names]
        biases = [weights.vector(f"{name}.bias") for name in names] if bias else [None] * len(parts)
        try:
            self.weight = ops.weight(parts, biases)
        except ValueError as error:
            raise CheckpointError(f"{', '.join(names)}: {error}") from error
        self.widths = [part.shape[0] for part in parts]
        if ops.adapter_slots is not None:
            tensors = tuple(f"{name}.weight" for name in names)
            self.weight, bank = ops.with_adapters(self.weight, self.widths, parts[0].shape[1])
            ops.adapter_slots.sites.append(AdapterSite(tensors, partial(fitted, weights), bank))

    def __call__(self, x: Array) -> Array:
        """``[T, in]`` -> ``[T, out]``."""
        return self.ops.linear(x, self.weight)

    def fp32(self, x: Array) -> Array:
        """``[T, in]`` -> fp32 ``[T, out]``: logits, or the start of a residual stream."""
        return self.ops.linear(x, self.weight, fp32=True)

    def add_to(self, residual: Array, x: Array) -> Array:
        """``residual + self(x)``, fp32 ``[T, out]``; ``residual`` may be overwritten."""
        return self.ops.linear_add(x, self.weight, residual)


class LinearParts:
    """The products of the matrices ``names`` with one input: one product if the matrices are quantized alike.

    A checkpoint may quantize them each in its own way, because their outputs are used apart.
    """

    def __init__(self, ops: Backend, weights: Weights, names: Sequence[str], bias: bool = False):
        try:
            self.products = [Linear(ops, weights, names, bias)]
        except CheckpointError:
            self.products = [Linear(ops, weights, [name], bias) for name in names]

    def fp32(self, x: Array) -> list[Array]:
        """``[T, in]`` -> fp32 ``[T, out]`` of each matrix, which may be columns of one array."""
        found = []
        for product in self.products:
            y, ends = product.fp32(x), list(accumulate(product.widths))
            found += [y[:, end - width : end] for width, end in zip(product.widths, ends, strict=True)]
        return found


class ColumnParallelLinear(Linear):
    """Such a layer whose outputs are divided among the ranks.

    ``sections`` are the widths of parts of the outputs, such as queries, keys and values. A rank has its share of each
    section, so that it gets whole heads. There is a section, or several, for each of ``names``, or all are in one
    matrix.
    """

    def __init__(self, ops: Backend, weights: Weights, names: Sequence[str], sections: Sections, bias: bool = False):
        if ops.communicator.tp_size > 1:
            weights = TransformedWeights(weights, rows_of_rank(names, sections, ops.communicator))
        super().__init__(ops, weights, names, bias)


class VocabularyLinear(Linear):
    """The output head ``name``, whose ``rows`` are divided among the ranks: all ranks get all logits.

    A rank has a run of the vocabulary. The runs of a size that ranks do not divide differ by one row.
    """

    def __init__(self, ops: Backend, weights: Weights, name: str, rows: int, bias: bool = False):
        ranks = ops.communicator
        self.rows = rows
        self.own = slice(ranks.tp_rank * rows // ranks.tp_size, (ranks.tp_rank + 1) * rows // ranks.tp_size)
        if ranks.tp_size > 1:
            weights = TransformedWeights(weights, {name: RowTransform(self.own)})
        super().__init__(ops, weights, [name], bias)

    def fp32(self, x: Array) -> Array:
        """``[T, in]`` -> fp32 ``[T, rows]``."""
        y = super().fp32(x)
        return y if self.ops.communicator.tp_size == 1 else self.ops.all_gather_columns(y, self.own, self.rows)


class RowParallelLinear:
    """The layer ``name`` whose inputs are divided among the ranks: it adds their products, in the order of the ranks.

    A rank quantizes its own inputs, so w8a8 has a scale for each rank's columns. The result is defined by the whole
    matrix with ``tp_size`` groups of columns; see :class:`.weights.NumpyWeight`.
    """

    def __init__(self, ops: Backend, weights: Weights, name: str, bias: bool = False):
        self.ops = ops
        self.is_partial = ops.communicator.tp_size > 1
        own = ColumnsOfRank(weights, ops.communicator) if self.is_partial else weights
        self.product = Linear(ops, own, [name], bias and not self.is_partial)
        self.bias = ops.vector(weights.vector(f"{name}.bias")) if bias and self.is_partial else None

    def fp32(self, x: Array) -> Array:
        """``[T, in]`` -> fp32 ``[T, out]``."""
        y = self.product.fp32(x)
        return self.ops.all_reduce_add(y, self.bias) if self.is_partial else y

    def add_to(self, residual: Array, x: Array) -> Array:
        """``residual + self(x)``, fp32 ``[T, out]``; ``residual`` may be overwritten."""
        if not self.is_partial:
            return self.product.add_to(residual, x)
        return self.ops.linear_add_of_ranks(x, self.product.weight, self.bias, residual)


@dataclass(frozen=True)
class Columns:
    """``weights`` whose matrices have some of their columns, so that a product can be a sum of two."""

    weights: Weights
    columns: slice

    def weight(self, name: str) -> HostWeight:
        return weight_columns(self.weights.weight(name), self.columns)

    def vector(self, name: str) -> np.ndarray:
        return self.weights.vector(name)


class ColumnsOfRank:
    """``weights`` whose matrices have the columns of one rank."""

    def __init__(self, weights: Weights, ranks: Communicator):
        self.weights = weights
        self.ranks = ranks

    def weight(self, name: str) -> HostWeight:
        whole = self.weights.weight(name)
        try:
            return weight_columns(whole, shard(whole.shape[1], self.ranks))
        except ValueError as error:
            remedy = "take fewer ranks, or migrate the original by a recipe that rotates nothing, such as w8a8"
            raise UsageError(f"{name} cannot be divided among {self.ranks.tp_size} ranks: {error}; {remedy}") from error

    def vector(self, name: str) -> np.ndarray:
        return self.weights.vector(name)


def fitted(weights: Weights, name: str, adapter: Adapter) -> Adapter:
    """An adapter of the matrix ``name``, changed as ``weights`` changes the rows and columns of the matrix."""
    if isinstance(weights, ColumnsOfRank):
        inner = fitted(weights.weights, name, adapter)
        return inner.within(shard(inner.a.shape[1], weights.ranks))
    if isinstance(weights, TransformedWeights):
        inner, change = fitted(weights.weights, name, adapter), weights.change_of(name)
        return inner if change is None else replace(inner, b=change.apply(inner.b))
    return adapter


def rows_of_rank(names: Sequence[str], sections: Sections, ranks: Communicator) -> dict[str, RowTransform]:
    """The rows of matrices that a rank has: its share of each section."""
    of_each = sections if len(names) == len(sections) else [sections]
    return {name: RowTransform(_own_rows(own, ranks)) for name, own in zip(names, of_each, strict=True)}


def _own_rows(sections: Any, ranks: Communicator) -> np.ndarray | slice:
    is_one = isinstance(sections, (int, KeyValueHeads))
    return _part(sections, ranks)[1] if is_one else rows_of_sections(sections, ranks)


def _part(section: Section, ranks: Communicator) -> tuple[int, slice]:
    """The width of a section, and the part of it that a rank has."""
    if isinstance(section, int):
        return section, shard(section, ranks)
    heads = shard_heads(section.count, ranks)
    return section.count * section.size, slice(heads.start * section.size, heads.stop * section.size)


def rows_of_sections(sections: Sequence[Section], ranks: Communicator) -> np.ndarray:
    """The rows that a rank has of a matrix whose rows are ``sections``, one behind another."""
    first, found = 0, []
    for width, own in (_part(section, ranks) for section in sections):
        found.append(np.arange(first + own.start, first + own.stop))
        first += width
    return np.concatenate(found)
