"""What the quantization of each product alone does to a model's predictions.

A copy of the residual stream is kept for each product. In the copy that product is w8a8, and all other products are
float. All copies pass through a layer before the next layer is built, so every matrix is read once. The divergence is
a quadratic form of small errors, and errors of different products are nearly independent. So the divergences of several
products nearly add up to that of a model in which all of them are quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..backend.base import Backend
from ..backend.quantization import HostWeight
from ..layers.recording import LinearCall
from ..quantize.calibration import sample_rows
from ..quantize.stages import HiddenState
from .blockwise import LayerwiseCheckpoint, batch_windows
from .corpus import Window
from .divergence import DivergenceAccumulator

HEAD_TOKENS = 256
"""The most tokens whose predictions are compared: there are logits for each of them and each product."""

Progress = Callable[[int, int, str], None]


def product_divergences(
    source: Path,
    windows: Sequence[Window],
    ops: Backend,
    rotated_offline: bool = False,
    progress: Progress | None = None,
) -> dict[tuple[str, ...], float]:
    """The mean divergence in nats per token that each product of the float checkpoint ``source`` causes in w8a8.

    The keys are the names of the product's matrices, in the order in which the model computes them. ``windows`` run as
    one batch. ``rotated_offline`` rotates the model in its weights first. ``progress`` is called with layers.
    """
    [batch] = batch_windows(windows, tokens=sum(len(window.tokens) for window in windows))
    products = Products(ops)
    with LayerwiseCheckpoint(source, ops, rotated_offline, products.add) as model:
        [reference] = model.start([batch])
        copies: dict[tuple[str, ...], HiddenState] = {}
        parts = [*model.layerwise.names, "output head"]
        for layer, part in enumerate(parts[:-1]):
            products.clear()
            layer_fn = model.layerwise.build(layer)
            copies = {names: model.run(layer_fn, state, batch) for names, state in copies.items()}
            before, reference = reference, model.run(layer_fn, reference, batch, products.record)
            for names in products.seen:
                copies[names] = model.run(layer_fn, before, batch, products.quantizing(names))
            if progress:
                progress(layer + 1, len(parts), part)
        products.clear()
        head = model.layerwise.output()
        rows = batch.rows[sample_rows(len(batch.rows), HEAD_TOKENS)]
        expected = model.rows(head, reference.residual[rows], products.record)
        found: dict[tuple[str, ...], float] = {}

        def add(names: tuple[str, ...], logits: np.ndarray) -> None:
            total = DivergenceAccumulator()
            total.add(expected, logits, batch.tokens[rows + 1])
            found[names] = total.result().kl

        for names, state in copies.items():
            add(names, model.rows(head, state.residual[rows]))
        for names in products.seen:
            add(names, model.rows(head, reference.residual[rows], products.quantizing(names)))
        if progress:
            progress(len(parts), len(parts), parts[-1])
        return found


class Products:
    """The products of one layer on ``ops``: their matrices, and observers that make one of them w8a8.

    ``seen`` are the names of their matrices, in the order in which they are computed.
    """

    def __init__(self, ops: Backend):
        self._ops = ops
        self._matrices: dict[tuple[str, ...], Sequence[HostWeight]] = {}
        self.seen: list[tuple[str, ...]] = []

    def clear(self) -> None:
        """Forget a layer, before the next one is built."""
        self._matrices.clear()
        self.seen.clear()

    def add(self, names: tuple[str, ...], parts: Sequence[HostWeight]) -> None:
        """Remember the matrices of a product, as the layer stacks them along their outputs."""
        self._matrices[names] = parts

    def record(self, call: LinearCall) -> None:
        """An observer that lists the products."""
        if call.tensors not in self.seen:
            self.seen.append(call.tensors)

    def quantizing(self, names: tuple[str, ...]) -> Callable[[LinearCall], Any]:
        """An observer that replaces the weight of one product by its plain w8a8 version."""
        weight: Any = None

        def observe(call: LinearCall) -> Any:
            nonlocal weight
            if call.tensors != names:
                return None
            if weight is None:
                weight = replace(self._int8(names), bias=call.weight.bias)
            return weight

        return observe

    def _int8(self, names: tuple[str, ...]) -> Any:
        """The matrices on the device, as one weight."""
        ops = self._ops.calibration_ops()
        matrix = np.concatenate([np.asarray(part).astype(np.float32) for part in self._matrices[names]])
        return ops.weight(ops.matrix(matrix), True)
