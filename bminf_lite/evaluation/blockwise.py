"""Run a checkpoint layer by layer over the same tokens, so that only one of its layers is in memory.

All windows of tokens go through a layer before the next layer is built. The host keeps the residual stream between two
layers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..backend.base import Backend
from ..backend.quantization import HostWeight, Int8Weight
from ..backend.values import Array
from ..checkpoint.fp16_range import within_fp16
from ..checkpoint.offline_rotation import rotate_offline
from ..checkpoint.opened_model import ModelSource, OpenedModel, open_model
from ..checkpoint.recipe import Scheme
from ..layers.loading import Weights
from ..layers.recording import LinearCall, LinearHooks, Observer
from ..quantize.stages import HiddenState, LayerFn, LayerwiseModel, SequenceBatch
from .corpus import Window

BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Batch:
    """Windows that run together, packed."""

    windows: tuple[Window, ...]

    @cached_property
    def sequences(self) -> SequenceBatch:
        """The windows as sequences from position 0."""
        sources = tuple(w.source for w in self.windows if w.source is not None)
        return SequenceBatch(tuple(w.tokens for w in self.windows), sources)

    @cached_property
    def tokens(self) -> np.ndarray:
        """All tokens, int32 ``[T]``."""
        return np.concatenate([w.tokens for w in self.windows])

    @cached_property
    def rows(self) -> np.ndarray:
        """The rows whose logits predict a scored token, int64 ``[n]``; the token itself is in the next row."""
        ends = np.cumsum([len(w.tokens) for w in self.windows]) - 1
        return np.concatenate([np.arange(end - w.scored, end) for w, end in zip(self.windows, ends, strict=True)])


def batch_windows(windows: Iterable[Window], tokens: int = BATCH_TOKENS) -> list[Batch]:
    """Group windows, in their order, into batches of at most ``tokens`` tokens; a longer window is a batch alone."""
    groups: list[list[Window]] = []
    room = 0
    for window in windows:
        if len(window.tokens) > room:
            groups.append([])
            room = tokens
        groups[-1].append(window)
        room -= len(window.tokens)
    return [Batch(tuple(group)) for group in groups]


class LayerwiseCheckpoint:
    """The checkpoint in a folder, run on ``ops`` layer by layer. Close it, or use it as a context manager.

    ``rotated_offline`` rotates a float model as a migration does, see :mod:`..checkpoint.offline_rotation`.
    ``on_weight`` is called with each weight that is made, see :class:`..layers.recording.LinearHooks`.
    ``int8_cache`` is that of :class:`..quantize.stages.LayerwiseModel`.
    ``schemes`` holds the quantization of each matrix that was read so far, see :func:`scheme_of`. Raises
    ``CheckpointError`` for a folder that holds no model of a known architecture.
    """

    def __init__(
        self,
        path: Path | ModelSource,
        ops: Backend,
        rotated_offline: bool = False,
        on_weight: Callable[[tuple[str, ...], Sequence[HostWeight]], None] | None = None,
        int8_cache: bool = False,
    ):
        self.path = Path(path)
        self.ops = ops
        self._local = threading.local()
        model = open_model(path)
        if rotated_offline:
            model = rotate_offline(model)
        if model.checkpoint.quantization is None and ops.activation_dtype == np.float16:
            model = within_fp16(model)
        self._model = model
        self.checkpoint = self._model.checkpoint
        self.config: Any = self._model.config
        self.spec = self._model.spec
        try:
            weights = _Schemes(self._model.weights())
            self.schemes = weights.schemes
            hooks = LinearHooks(ops, weights, self._observe, on_weight)
            builder = self._model.architecture.ModelBuilder(self.config, hooks.weights, hooks.ops)
            self.layerwise = LayerwiseModel(builder, self.config, ops, int8_cache)
        except BaseException:
            self._model.close()
            raise

    def __enter__(self) -> LayerwiseCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._model.close()

    @property
    def opened(self) -> OpenedModel:
        """The open checkpoint."""
        return self._model

    def start(self, batches: Sequence[Batch]) -> list[HiddenState]:
        """Each batch before the first layer, on the host: fp32 ``[T, features]``."""
        return [state.on_host(self.ops) for state in self.layerwise.start([batch.sequences for batch in batches])]

    def run(self, layer_fn: LayerFn, state: HiddenState, batch: Batch, observer: Observer | None = None) -> HiddenState:
        """A batch after one layer of :attr:`layerwise`; both states are on the host.

        ``observer`` is called before each product, see :mod:`..layers.recording`. On a backend that computes in threads
        several runs may be under way, each with its own observer.
        """
        self._local.observer = observer
        return layer_fn(state.on_device(self.ops), batch.sequences).on_host(self.ops)

    def rows(
        self, output: Callable[[Array], Array], residual: np.ndarray, observer: Observer | None = None
    ) -> np.ndarray:
        """Logits fp32 ``[n, vocab]`` of rows ``[n, features]`` of the residual stream after the last layer."""
        self._local.observer = observer
        return self._host(output(self.ops.array(residual)))

    def _observe(self, call: LinearCall) -> Any:
        observer: Observer | None = getattr(self._local, "observer", None)
        return None if observer is None else observer(call)

    def _host(self, x: Array) -> np.ndarray:
        return np.array(self.ops.host(x), np.float32)


def scheme_of(weight: HostWeight) -> str:
    """``float``, ``w8a16``, ``w8a8``, ``w8a8+4`` where four columns stay fp16, ``w8a8 H64`` if its input is rotated."""
    if not isinstance(weight, Int8Weight):
        return Scheme.FLOAT.value
    scheme = (Scheme.W8A8 if weight.dynamic else Scheme.W8A16).value + (
        f" H{weight.rotation}" if weight.rotation > 1 else ""
    )
    return scheme if weight.outliers is None else f"{scheme}+{len(weight.outliers.index)}"


class _Schemes:
    """Passes ``weights`` on, and remembers how each matrix is quantized."""

    def __init__(self, weights: Weights):
        self._weights = weights
        self.schemes: dict[str, str] = {}

    def weight(self, name: str) -> HostWeight:
        weight = self._weights.weight(name)
        self.schemes[name] = scheme_of(weight)
        return weight

    def vector(self, name: str) -> np.ndarray:
        return self._weights.vector(name)
