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
    with LayerwiseCheckpoint(source, ops, rotated_offline) as model:
        [reference] = model.start([batch])
        copies: dict[tuple[str, ...], HiddenState] = {}
        parts = [*model.layerwise.names, "output head"]
        for layer, part in enumerate(parts[:-1]):
            layer_fn = model.layerwise.build(layer)
            copies = {names: model.run(layer_fn, state, batch) for names, state in copies.items()}
            before, products = reference, ProductRecorder(model)
            reference = model.run(layer_fn, before, batch, products.record)
            for names in products.names:
                copies[names] = model.run(layer_fn, before, batch, products.quantizing(names))
            if progress:
                progress(layer + 1, len(parts), part)
        head, products = model.layerwise.output(), ProductRecorder(model)
        rows = batch.rows[sample_rows(len(batch.rows), HEAD_TOKENS)]
        expected = model.rows(head, reference.residual[rows], products.record)
        found: dict[tuple[str, ...], float] = {}

        def add(names: tuple[str, ...], logits: np.ndarray) -> None:
            total = DivergenceAccumulator()
            total.add(expected, logits, batch.tokens[rows + 1])
            found[names] = total.result().kl

        for names, state in copies.items():
            add(names, model.rows(head, state.residual[rows]))
        for names in products.names:
            add(names, model.rows(head, reference.residual[rows], products.quantizing(names)))
        if progress:
            progress(len(parts), len(parts), parts[-1])
        return found


class ProductRecorder:
    """The products of one layer of ``model``: their names, and observers that make one of them w8a8."""

    def __init__(self, model: LayerwiseCheckpoint):
        self._model = model
        self.names: list[tuple[str, ...]] = []

    def record(self, call: LinearCall) -> None:
        """An observer that lists the products."""
        if call.tensors not in self.names:
            self.names.append(call.tensors)

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
        """The matrices ``names``, stacked along their outputs, on the device."""
        parts = [self._model.float_weight(name) for name in names]
        ops = self._model.ops.calibration_ops()
        return ops.weight(ops.matrix(np.concatenate(parts) if len(parts) > 1 else parts[0]), True)
