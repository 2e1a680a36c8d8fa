"""Gated DeltaNet behind its convolution: the launchers of ``delta_net.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....backend.values import DeltaNetSpec, ForwardBatch, StateCache
from ..arrays import address, ceil_div, nbytes_of, pitch_of
from ..constants import DELTA_NET_THREADS as THREADS
from ..instantiations import Capability, KernelFamily
from ..launcher import Launcher, StepContext

if TYPE_CHECKING:
    import cupy as cp

COLUMNS = 32
"""Columns of a head's state in a block."""


class DeltaNetKernels:
    """:meth:`.Backend.gated_delta_net` behind the convolution."""

    source = "recurrent/delta_net.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, "delta_rule")
        yield KernelFamily(cls.source, "delta_output")

    def launch(
        self,
        step: StepContext,
        mixed: cp.ndarray,
        gates: cp.ndarray,
        gate: cp.ndarray,
        spec: DeltaNetSpec,
        cache: StateCache,
        slots: cp.ndarray,
        batch: ForwardBatch,
        sums: cp.ndarray,
        found: cp.ndarray,
        out: cp.ndarray,
    ) -> None:
        """The gated outputs of a step's tokens: ``out`` fp16 ``[T, value_features]`` with padded rows.

        ``mixed`` fp32 ``[T, channels]`` has queries, keys and values behind the convolution, and ``gates`` fp32
        ``[T, 2 * value_heads]`` what becomes rates and decays. ``gate`` fp16 ``[T, value_features]`` may have any
        pitch. ``slots`` int32 ``[B, W]`` has the sequences' slots in its first column. ``sums`` fp32
        ``[T, value_heads]``, dense, and ``found`` fp32 ``[T, value_features]`` are memory. ``spec.key_dim`` is at most
        ``DELTA_NET_MAX_KEY_DIM``.
        """
        kept = [cache[name] for name in ("state", "keys", "deltas", "decays", "end")]
        net = (
            mixed.data.ptr, pitch_of(mixed), gates.data.ptr, pitch_of(gates), spec.decay_rates.data.ptr,
            spec.decay_bias.data.ptr, *(number for array in kept for number in (array.data.ptr, pitch_of(array))),
            address(batch.cu_seqlens), address(batch.context_lens), slots.data.ptr, pitch_of(slots), batch.batch_size,
            cache["keys"].shape[1], batch.has_drafts, spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim,
            spec.max_rate,
        )  # fmt: skip
        self._launcher.launch(
            step,
            self.source,
            "delta_rule",
            (batch.batch_size, spec.value_heads, ceil_div(spec.value_dim, COLUMNS)),
            THREADS,
            (*net, sums.data.ptr, found.data.ptr, pitch_of(found)),
            bytes_moved=nbytes_of(mixed, found),
        )
        weight, eps = spec.norm.weight.data.ptr, spec.norm.eps
        rows = found.data.ptr, pitch_of(found), gate.data.ptr, pitch_of(gate), weight
        self._launcher.launch(
            step,
            self.source,
            "delta_output",
            len(out),
            THREADS,
            (*net, *rows, sums.data.ptr, out.data.ptr, pitch_of(out), eps),
            bytes_moved=nbytes_of(found, gate, out),
        )
