"""The step that kernels belong to, and its last tokens; :mod:`bminf_lite.backend.operations.step` defines it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import cupy as cp

from ...operations.step import StepOperations
from ...values import Array, ForwardBatch
from ..deferred import ResidualStream
from ..device import CudaDevice
from ..peers import PeerRank


class CudaStepOperations(CudaDevice, StepOperations):
    """What the groups of operations share."""

    @contextmanager
    def step(self, batch: ForwardBatch) -> Iterator[None]:
        with self.kernels.in_step(), super().step(batch):
            yield
            if isinstance(self.communicator, PeerRank):
                self.communicator.end_step()

    def last_tokens(self, x: Array, batch: ForwardBatch) -> Array:
        self._go_on_with_last_tokens(batch)
        if batch.logit_rows is None and batch.is_decode:
            return x
        source = self.materializer.as_residual(x)
        self.materializer.flush_residual(source)
        return ResidualStream(self._last_rows(source.values, batch))

    def _of_last_tokens(self, batch: ForwardBatch) -> ForwardBatch:
        """The same: no kernel for one token per sequence reads tokens or ``cu_seqlens``."""
        return batch

    def _last_rows(self, x: cp.ndarray, batch: ForwardBatch) -> cp.ndarray:
        """The rows of ``x`` whose logits are wanted."""
        rows, before = (batch.cu_seqlens[1:], 1) if batch.logit_rows is None else (batch.logit_rows, 0)
        out = self.arrays.rows(len(rows), x.shape[1], x.dtype)
        self.kernels.rows.gather_rows(self.kernels.step, rows, x, out, before)
        return out
