"""The state space of Mamba 2 behind its convolution: the launchers of ``mamba2.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....backend.cache_values import StateCache
from ....backend.values import ForwardBatch, Mamba2Spec
from ..arrays import address, nbytes_of, pitch_of
from ..constants import MAMBA2_MAX_STATE_DIM as MAX_STATE_DIM
from ..constants import MAMBA2_OUTPUT_THREADS as OUTPUT_THREADS
from ..instantiations import BOOLEANS, Capability, KernelFamily
from ..launcher import StepContext
from .chunks import ChunkKernels, Heads

if TYPE_CHECKING:
    import cupy as cp

STATE_ROWS = (128, MAX_STATE_DIM)
"""Rows of a state that a kernel has room for."""


def heads_of(spec: Mamba2Spec) -> Heads:
    """The sizes of a layer."""
    rows = next((rows for rows in STATE_ROWS if spec.state_dim <= rows), MAX_STATE_DIM)
    return Heads(spec.groups, spec.heads, spec.state_dim, spec.head_dim, rows)


class Mamba2Kernels(ChunkKernels):
    """:meth:`.Backend.mamba2` behind the convolution."""

    source, token_source = "recurrent/mamba2.cu", "recurrent/mamba2_token.cu"
    prepare, scan = "state_prepare", "state_space"

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, cls.prepare, (STATE_ROWS,))
        yield KernelFamily(cls.source, cls.scan, (STATE_ROWS, BOOLEANS, BOOLEANS), cls._is_scan)
        yield KernelFamily(cls.source, "state_output", (STATE_ROWS,))
        if capability >= (9, 0):
            yield KernelFamily(cls.token_source, "state_token", (STATE_ROWS[:1],))

    @staticmethod
    def _is_scan(rows: int, prepared: str, one: str) -> bool:
        """Whether such a scan is launched: no chunks are prepared of texts that have one new token."""
        return (prepared, one) != (BOOLEANS[1], BOOLEANS[1])

    def scan_arguments(self, batch: ForwardBatch) -> tuple[str, ...]:
        return (BOOLEANS[batch.max_query_len == 1 and not batch.has_drafts],)

    def template(self, heads: Heads, *arguments: str) -> str:
        return f"<{', '.join((str(heads.rows), *arguments))}>"

    def launch(
        self, step: StepContext, mixed: cp.ndarray, steps: cp.ndarray, gate: cp.ndarray, spec: Mamba2Spec,
        cache: StateCache, slots: cp.ndarray, batch: ForwardBatch, memory: cp.ndarray | None, sums: cp.ndarray,
        found: cp.ndarray, out: cp.ndarray,
    ) -> None:  # fmt: skip
        """The gated outputs of a step's tokens: ``out`` fp16 ``[T, features]`` with padded rows.

        ``mixed`` fp32 ``[T, channels]`` has x, B and C behind the convolution, ``steps`` fp16 ``[T, heads]`` what
        becomes time steps, and ``gate`` is fp16 ``[T, features]``; both may have any pitch. ``slots`` int32 ``[B, W]``
        has the sequences' slots in its first column. ``sums`` fp32 ``[T, heads]``, dense, ``found`` fp32
        ``[T, features]`` and ``memory``, that of :meth:`prepared`, are memory. ``spec.state_dim`` is at most
        ``MAMBA2_MAX_STATE_DIM``.
        """
        heads = heads_of(spec)
        net, rule = self.net(heads, cache, slots, batch), _rule(mixed, steps, spec)
        self.launch_scan(step, heads, net, rule, cache, batch, memory, sums, found)
        norm = spec.norm
        weight = (0, 1, False) if norm is None else (norm.norm.weight.data.ptr, norm.groups, norm.norm_first)
        eps = 0.0 if norm is None else norm.norm.eps
        self._launcher.launch(
            step, self.source, f"state_output{self.template(heads)}", (len(out), weight[1]), OUTPUT_THREADS,
            (*net, *rule, found.data.ptr, pitch_of(found), gate.data.ptr, pitch_of(gate), *weight, sums.data.ptr,
             out.data.ptr, pitch_of(out), eps),
            bytes_moved=nbytes_of(found, gate, out),
        )  # fmt: skip

    def computes_token(self, spec: Mamba2Spec, batch: ForwardBatch) -> bool:
        """Whether :meth:`launch_token_of` computes a step: a norm has a part for each group."""
        heads, norm = heads_of(spec), spec.norm
        fits = heads.rows == STATE_ROWS[0] and (norm is None or norm.groups == spec.groups)
        return fits and self.is_one_token(heads, spec.convolution, batch)

    def launch_token_of(
        self, step: StepContext, rows: cp.ndarray, steps: cp.ndarray, gate: cp.ndarray, spec: Mamba2Spec,
        cache: StateCache, slots: cp.ndarray, batch: ForwardBatch, out: cp.ndarray,
    ) -> None:  # fmt: skip
        """:meth:`launch` where each sequence has one token, with x, B and C in fp16 ``rows``."""
        norm = spec.norm
        weight = (0, False) if norm is None else (norm.norm.weight.data.ptr, norm.norm_first)
        eps = 0.0 if norm is None else norm.norm.eps
        outputs = gate.data.ptr, pitch_of(gate), *weight, out.data.ptr, pitch_of(out), eps
        heads, rule = heads_of(spec), _rule(None, steps, spec)
        expression = f"state_token{self.template(heads)}"
        self.launch_token(step, heads, expression, rows, spec.convolution, cache, slots, batch, rule, outputs, out)


def _rule(mixed: cp.ndarray | None, steps: cp.ndarray, spec: Mamba2Spec) -> tuple[object, ...]:
    """The members of ``StateSpace``; without ``mixed`` where one kernel computes a step."""
    return (
        address(mixed),
        0 if mixed is None else pitch_of(mixed),
        steps.data.ptr,
        pitch_of(steps),
        spec.decay_rates.data.ptr,
        spec.step_bias.data.ptr,
        spec.skip.data.ptr,
        *spec.step_limits,
    )
