"""Gated DeltaNet and Kimi Delta Attention behind their convolution: the launchers of ``delta_net.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....backend.cache_values import StateCache
from ....backend.values import DeltaNetSpec, ForwardBatch
from ..arrays import address, ceil_div, nbytes_of, pitch_of
from ..constants import DELTA_NET_MAX_KEY_DIM as MAX_KEY_DIM
from ..constants import DELTA_NET_OUTPUT_THREADS as OUTPUT_THREADS
from ..instantiations import BOOLEANS, Capability, KernelFamily
from ..launcher import StepContext
from .chunks import ChunkKernels, Heads

if TYPE_CHECKING:
    import cupy as cp


def heads_of(spec: DeltaNetSpec) -> Heads:
    """The sizes of a layer."""
    sizes = spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim
    return Heads(*sizes, MAX_KEY_DIM, spec.per_channel, corrects=True)


class DeltaNetKernels(ChunkKernels):
    """:meth:`.Backend.gated_delta_net` and :meth:`.Backend.kimi_delta` behind the convolution."""

    source, token_source = "recurrent/delta_net.cu", "recurrent/delta_token.cu"
    prepare, scan = "delta_prepare", "delta_rule"
    prepares_in_static_memory = False

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, cls.prepare, (BOOLEANS,))
        yield KernelFamily(cls.source, cls.scan, (BOOLEANS, BOOLEANS))
        yield KernelFamily(cls.source, "delta_output", (BOOLEANS,))
        if capability >= (9, 0):
            yield KernelFamily(cls.token_source, "delta_token", (("false",),))

    def template(self, heads: Heads, *arguments: str) -> str:
        return f"<{', '.join((BOOLEANS[heads.per_channel], *arguments))}>"

    def launch(
        self, step: StepContext, mixed: cp.ndarray, rates: cp.ndarray, decays: cp.ndarray, gate: cp.ndarray,
        spec: DeltaNetSpec, cache: StateCache, slots: cp.ndarray, batch: ForwardBatch, memory: cp.ndarray | None,
        sums: cp.ndarray, found: cp.ndarray, out: cp.ndarray,
    ) -> None:  # fmt: skip
        """The gated outputs of a step's tokens: ``out`` fp16 ``[T, value_features]`` with padded rows.

        ``mixed`` fp32 ``[T, channels]`` has queries, keys and values behind the convolution. ``rates`` fp32
        ``[T, value_heads]`` and ``decays`` fp32 ``[T, heads.sums]`` are those before their functions, and ``gate`` is
        fp16 ``[T, value_features]``; these may have any pitch. ``slots`` int32 ``[B, W]`` has the sequences' slots in
        its first column. ``sums`` fp32 ``[T, heads.sums]``, dense, ``found`` fp32 ``[T, value_features]`` and
        ``memory``, that of :meth:`prepared`, are memory. ``spec.key_dim`` is at most ``DELTA_NET_MAX_KEY_DIM``.
        """
        heads = heads_of(spec)
        net = self.net(heads, cache, slots, batch)
        rule = _rule(mixed, rates, decays, spec)
        self.launch_scan(step, heads, net, rule, cache, batch, memory, sums, found)
        rows = found.data.ptr, pitch_of(found), gate.data.ptr, pitch_of(gate), spec.norm.weight.data.ptr
        blocks = len(out), ceil_div(spec.value_heads, OUTPUT_THREADS // 32)
        self._launcher.launch(
            step,
            self.source,
            f"delta_output{self.template(heads)}",
            blocks,
            OUTPUT_THREADS,
            (*net, *rule, *rows, sums.data.ptr, out.data.ptr, pitch_of(out), spec.norm.eps),
            bytes_moved=nbytes_of(found, gate, out),
        )

    def launch_token_of(
        self, step: StepContext, rows: cp.ndarray, rates: cp.ndarray, decays: cp.ndarray, gate: cp.ndarray,
        spec: DeltaNetSpec, cache: StateCache, slots: cp.ndarray, batch: ForwardBatch, out: cp.ndarray,
    ) -> None:  # fmt: skip
        """:meth:`launch` where each sequence has one token, with queries, keys and values in fp16 ``rows``."""
        outputs = (
            gate.data.ptr, pitch_of(gate), spec.norm.weight.data.ptr, out.data.ptr, pitch_of(out), spec.norm.eps,
        )  # fmt: skip
        rule = _rule(None, rates, decays, spec)
        self.launch_token(
            step, heads_of(spec), "delta_token<false>", rows, spec.convolution, cache, slots, batch, rule, outputs, out
        )


def _rule(mixed: cp.ndarray | None, rates: cp.ndarray, decays: cp.ndarray, spec: DeltaNetSpec) -> tuple[object, ...]:
    """The members of ``DeltaNet``; without ``mixed`` where one kernel computes a step."""
    return (
        address(mixed),
        0 if mixed is None else pitch_of(mixed),
        rates.data.ptr,
        pitch_of(rates),
        decays.data.ptr,
        pitch_of(decays),
        spec.decay_rates.data.ptr,
        spec.decay_bias.data.ptr,
        spec.max_rate,
        0,
    )
