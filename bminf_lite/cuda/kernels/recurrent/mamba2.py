"""The state space of Mamba 2 behind its convolution: the launchers of ``mamba2.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....backend.values import ForwardBatch, Mamba2Spec, StateCache
from ..arrays import address, ceil_div, nbytes_of, pitch_of
from ..constants import MAMBA2_MAX_STATE_DIM as MAX_STATE_DIM
from ..constants import MAMBA2_THREADS as THREADS
from ..instantiations import Capability, KernelFamily
from ..launcher import Launcher, StepContext

if TYPE_CHECKING:
    import cupy as cp

COLUMNS = 32
"""Columns of a head's state in a block."""
STATE_ROWS = (128, MAX_STATE_DIM)
"""Rows of a state that a kernel has room for."""


class Mamba2Kernels:
    """:meth:`.Backend.mamba2` behind the convolution."""

    source = "recurrent/mamba2.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, "state_space", (STATE_ROWS,))
        yield KernelFamily(cls.source, "state_output")

    def launch(
        self,
        step: StepContext,
        mixed: cp.ndarray,
        steps: cp.ndarray,
        gate: cp.ndarray,
        spec: Mamba2Spec,
        cache: StateCache,
        slots: cp.ndarray,
        batch: ForwardBatch,
        sums: cp.ndarray,
        found: cp.ndarray,
        out: cp.ndarray,
    ) -> None:
        """The gated outputs of a step's tokens: ``out`` fp16 ``[T, features]`` with padded rows.

        ``mixed`` fp32 ``[T, channels]`` has x, B and C behind the convolution, ``steps`` fp16 ``[T, heads]`` what
        becomes time steps, and ``gate`` is fp16 ``[T, features]``; both may have any pitch. ``slots`` int32 ``[B, W]``
        has the sequences' slots in its first column. ``sums`` fp32 ``[T, heads]``, dense, and ``found`` fp32 ``[T,
        features]`` are memory. ``spec.state_dim`` is at most ``MAMBA2_MAX_STATE_DIM``.
        """
        kept = [cache[name] for name in ("state", "keys", "deltas", "decays", "end")]
        net = (
            mixed.data.ptr,
            pitch_of(mixed),
            steps.data.ptr,
            pitch_of(steps),
            spec.decay_rates.data.ptr,
            spec.step_bias.data.ptr,
            spec.skip.data.ptr,
            *(number for array in kept for number in (array.data.ptr, pitch_of(array))),
            address(batch.cu_seqlens),
            address(batch.context_lens),
            slots.data.ptr,
            pitch_of(slots),
            batch.batch_size,
            cache["keys"].shape[1],
            batch.has_drafts,
            spec.groups,
            spec.heads,
            spec.head_dim,
            spec.state_dim,
            *spec.step_limits,
        )
        rows = next(rows for rows in STATE_ROWS if spec.state_dim <= rows)
        self._launcher.launch(
            step,
            self.source,
            f"state_space<{rows}>",
            (batch.batch_size, spec.heads, ceil_div(spec.head_dim, COLUMNS)),
            THREADS,
            (*net, sums.data.ptr, found.data.ptr, pitch_of(found)),
            bytes_moved=nbytes_of(mixed, found),
        )
        norm = spec.norm
        weight = (0, 1, False) if norm is None else (norm.norm.weight.data.ptr, norm.groups, norm.norm_first)
        eps = 0.0 if norm is None else norm.norm.eps
        self._launcher.launch(
            step,
            self.source,
            "state_output",
            len(out),
            THREADS,
            (
                *net,
                found.data.ptr,
                pitch_of(found),
                gate.data.ptr,
                pitch_of(gate),
                *weight,
                sums.data.ptr,
                out.data.ptr,
                pitch_of(out),
                eps,
            ),
            bytes_moved=nbytes_of(found, gate, out),
        )
