"""Gated DeltaNet behind its convolution: the launchers of ``delta_net.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....backend.values import DeltaNetSpec, ForwardBatch, StateCache
from ..arrays import ceil_div, nbytes_of, pitch_of
from ..constants import DELTA_NET_MAX_KEY_DIM as MAX_KEY_DIM
from ..constants import DELTA_NET_OUTPUT_THREADS as OUTPUT_THREADS
from ..instantiations import BOOLEANS, Capability, KernelFamily
from ..launcher import StepContext
from .chunks import ChunkKernels, Heads

if TYPE_CHECKING:
    import cupy as cp


def heads_of(spec: DeltaNetSpec) -> Heads:
    """The sizes of a layer."""
    return Heads(spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim, MAX_KEY_DIM)


class DeltaNetKernels(ChunkKernels):
    """:meth:`.Backend.gated_delta_net` behind the convolution."""

    source = "recurrent/delta_net.cu"
    prepare, scan = "delta_prepare", "delta_rule"

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, cls.prepare)
        yield KernelFamily(cls.source, cls.scan, (BOOLEANS,))
        yield KernelFamily(cls.source, "delta_output")

    def template(self, heads: Heads, *arguments: str) -> str:
        return f"<{', '.join(arguments)}>" if arguments else ""

    def launch(
        self, step: StepContext, mixed: cp.ndarray, gates: cp.ndarray, gate: cp.ndarray, spec: DeltaNetSpec,
        cache: StateCache, slots: cp.ndarray, batch: ForwardBatch, memory: cp.ndarray | None, sums: cp.ndarray,
        found: cp.ndarray, out: cp.ndarray,
    ) -> None:  # fmt: skip
        """The gated outputs of a step's tokens: ``out`` fp16 ``[T, value_features]`` with padded rows.

        ``mixed`` fp32 ``[T, channels]`` has queries, keys and values behind the convolution, and ``gates`` fp32
        ``[T, 2 * value_heads]`` what becomes rates and decays. ``gate`` fp16 ``[T, value_features]`` may have any
        pitch. ``slots`` int32 ``[B, W]`` has the sequences' slots in its first column. ``sums`` fp32
        ``[T, value_heads]``, dense, ``found`` fp32 ``[T, value_features]`` and ``memory``, that of :meth:`prepared`,
        are memory. ``spec.key_dim`` is at most ``DELTA_NET_MAX_KEY_DIM``.
        """
        heads = heads_of(spec)
        net = self.net(heads, cache, slots, batch)
        rule = (
            mixed.data.ptr, pitch_of(mixed), gates.data.ptr, pitch_of(gates), spec.decay_rates.data.ptr,
            spec.decay_bias.data.ptr, spec.max_rate, 0,
        )  # fmt: skip
        self.launch_scan(step, heads, net, rule, cache, batch, memory, sums, found)
        rows = found.data.ptr, pitch_of(found), gate.data.ptr, pitch_of(gate), spec.norm.weight.data.ptr
        blocks = len(out), ceil_div(spec.value_heads, OUTPUT_THREADS // 32)
        self._launcher.launch(
            step, self.source, "delta_output", blocks, OUTPUT_THREADS,
            (*net, *rule, *rows, sums.data.ptr, out.data.ptr, pitch_of(out), spec.norm.eps),
            bytes_moved=nbytes_of(found, gate, out),
        )  # fmt: skip
