"""What the quantization of a few products alone does to a model's predictions.

Products of one kind, such as all down projections, in some neighbouring layers form a group. A copy of the residual
stream is kept for each group. In the copy its products are w8a8, and all others are float. All copies pass through a
layer before the next layer is built, so every matrix is read once. The divergence is a quadratic form of small errors,
and errors of different products are nearly independent. So the divergences of several products nearly add up to that of
a model in which all of them are quantized.

There are at most :data:`LAYER_GROUPS` groups of layers, so the work grows with the number of layers, not with its
square.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..backend.base import Backend
from ..backend.host_threads import map_in_threads
from ..backend.quantization import HostWeight
from ..checkpoint.opened_model import ModelSource
from ..layers.recording import LinearCall, Observer
from ..quantize.stages import HiddenState, LayerFn
from .blockwise import LayerwiseCheckpoint, batch_windows
from .corpus import Window
from .outputs import outputs_of

LAYER_GROUPS = 6
"""Groups of layers whose products of one kind are quantized together."""
HEAD_TOKENS = 128
"""The most tokens whose predictions are compared, if the model generates: each of them has logits for each group."""

Progress = Callable[[int, int, str], None]
ProductNames = tuple[str, ...]
"""The names of a product's matrices, as the layer stacks them along their outputs."""


@dataclass(frozen=True)
class GroupDivergence:
    """The mean divergence that ``products`` cause together, with all others float; see :mod:`.outputs`."""

    products: tuple[ProductNames, ...]
    divergence: float


def product_divergences(
    source: Path | ModelSource,
    windows: Sequence[Window],
    ops: Backend,
    rotated_offline: bool = False,
    progress: Progress | None = None,
    rotation_of: Callable[[str], int] = lambda name: 1,
    rank: int = 0,
    ranks: int = 1,
) -> list[GroupDivergence]:
    """The divergences that the products of the float checkpoint ``source`` cause in w8a8, rounded to nearest.

    Every product is in one group; groups come in the order in which the model computes their first product.
    ``windows`` run as one batch. ``rotated_offline`` rotates the model in its weights first. The input of a matrix is
    rotated in blocks of ``rotation_of`` its name. ``progress`` is called with layers. Of ``ranks`` that divide the
    groups, ``rank`` gets every ``ranks``-th group.
    """
    [batch] = batch_windows(windows, tokens=sum(len(window.tokens) for window in windows))
    products = LayerProducts(ops, rotation_of)
    with LayerwiseCheckpoint(source, ops, rotated_offline, products.add) as model:
        [reference] = model.start([batch])
        copies: dict[tuple[str, int], HiddenState] = {}
        groups: dict[tuple[str, int], list[ProductNames]] = {}
        parts = [*model.layerwise.names, "output head"]
        together = -(-(len(parts) - 1) // LAYER_GROUPS)
        for layer, part in enumerate(parts[:-1]):
            products.clear()
            layer_fn = model.layerwise.build(layer)
            before, reference = reference, model.run(layer_fn, reference, batch, products.record)
            found = products.by_kind()
            for kind, names in found.items():
                key = kind, layer // together
                groups.setdefault(key, []).extend(names)
                if list(groups).index(key) % ranks == rank:
                    copies.setdefault(key, before)

            def advanced(
                item: tuple[tuple[str, int], HiddenState],
                layer_fn: LayerFn = layer_fn,
                found: Mapping[str, list[ProductNames]] = found,
                group: int = layer // together,
            ) -> HiddenState:
                (kind, at), state = item
                here = found.get(kind, []) if at == group else []
                return model.run(layer_fn, state, batch, products.quantizing(here))

            copies = dict(zip(copies, map_in_threads(ops, advanced, copies.items()), strict=True))
            if progress:
                progress(layer + 1, len(parts), part)
        products.clear()
        head = model.layerwise.output()
        outputs = outputs_of(model.opened)
        chosen = outputs.parts(batch, HEAD_TOKENS)

        def output(state: HiddenState, observer: Observer | None = None) -> list[np.ndarray]:
            return [outputs.finished(model.rows(head, state.residual[rows], observer)) for rows in chosen]

        expected = output(reference, products.record)

        def divergence(found: Sequence[np.ndarray]) -> float:
            total = outputs.accumulator()
            for rows, want, own in zip(chosen, expected, found, strict=True):
                total.add(want, own, outputs.targets(batch, rows))
            return total.result().mean

        divergences = map_in_threads(ops, lambda state: divergence(output(state)), copies.values())
        results = [GroupDivergence(tuple(groups[key]), mean) for key, mean in zip(copies, divergences, strict=True)]
        for product in products.seen[(rank - len(groups)) % ranks :: ranks]:
            alone = output(reference, products.quantizing([product]))
            results.append(GroupDivergence((product,), divergence(alone)))
        if progress:
            progress(len(parts), len(parts), parts[-1])
        return results


class LayerProducts:
    """The products of one layer on ``ops``: their matrices, and observers that make some of them w8a8.

    ``seen`` are the names of their matrices, in the order in which they are computed.
    """

    def __init__(self, ops: Backend, rotation_of: Callable[[str], int] = lambda name: 1):
        self._ops = ops
        self._rotation_of = rotation_of
        self._matrices: dict[ProductNames, Sequence[HostWeight]] = {}
        self._quantized: dict[ProductNames, Any] = {}
        self.seen: list[ProductNames] = []

    def clear(self) -> None:
        """Forget a layer, before the next one is built."""
        self._matrices.clear()
        self._quantized.clear()
        self.seen.clear()

    def add(self, names: ProductNames, parts: Sequence[HostWeight]) -> None:
        """Remember the matrices of a product, as the layer stacks them along their outputs."""
        self._matrices[names] = parts

    def record(self, call: LinearCall) -> None:
        """An observer that lists the products."""
        if call.tensors not in self.seen:
            self.seen.append(call.tensors)

    def by_kind(self) -> dict[str, list[ProductNames]]:
        """The products by the name of their first matrix without its numbers: those of all experts are one kind."""
        kinds: dict[str, list[ProductNames]] = {}
        for names in self.seen:
            kinds.setdefault(re.sub(r"\d+", "#", names[0]), []).append(names)
        return kinds

    def quantizing(self, chosen: Collection[ProductNames]) -> Callable[[LinearCall], Any] | None:
        """An observer that replaces the weights of some products by their w8a8 versions; None for no product."""
        if not chosen:
            return None

        def observe(call: LinearCall) -> Any:
            if call.tensors not in chosen:
                return None
            if call.tensors not in self._quantized:
                self._quantized[call.tensors] = replace(self._int8(call.tensors), bias=call.weight.bias)
            return self._quantized[call.tensors]

        return observe

    def _int8(self, names: ProductNames) -> Any:
        """The matrices on the device, as one weight."""
        ops = self._ops.calibration_ops()
        matrix = np.concatenate([np.asarray(part).astype(np.float32) for part in self._matrices[names]])
        return ops.weight(ops.matrix(matrix), True, rotation=self._rotation_of(names[0]))
