"""Norm and rotation of heads before attention over many tokens: the launcher of ``prepare_heads.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....backend.values import AttentionSpec, ForwardBatch, LayerCache
from ..arrays import address
from ..instantiations import BOOLEANS, Capability, KernelFamily
from ..launcher import Launcher, StepContext
from ..rowwise.rows import FROM_INT32, RowSource, orders_for
from .heads import ELEMENTS, element_of, head_arguments, head_pitch_of

if TYPE_CHECKING:
    import cupy as cp


class PrepareHeads:
    """The kernel of ``prepare_heads.cu``."""

    source = "attention/prepare_heads.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, "prepare_heads", (BOOLEANS, orders_for(capability), ELEMENTS))

    def launch(
        self, step: StepContext, qkv: RowSource, spec: AttentionSpec, cache: LayerCache, batch: ForwardBatch,
        table: cp.ndarray | None, q: cp.ndarray, bytes_moved: int = 0,
    ) -> None:  # fmt: skip
        """Norm and rotation of a step's heads; queries go to ``q`` ``[T, heads, head_pitch]``, the others to the cache.

        ``table`` is the block table of the cache, int32 ``[B, W]``. Without one, keys and values of the cache are
        ``[kv_heads, T, head_dim]``, and hold the step's tokens in order.
        """
        read, kind, order = qkv
        expression = f"prepare_heads<{'true' if kind == FROM_INT32 else 'false'}, {order}, {element_of(cache)}>"
        step.is_unwritten(cache.keys.data.ptr, writes=True)
        self._launcher.launch(
            step, self.source, expression, q.shape[0], 256,
            (*read, *head_arguments(spec), address(batch.cu_seqlens),
             address(batch.context_lens), address(table), 0 if table is None else table.shape[1], batch.batch_size,
             q.data.ptr, cache.keys.data.ptr, cache.values.data.ptr, spec.heads, spec.kv_heads, spec.head_dim,
             head_pitch_of(cache), address(cache.key_scales), address(cache.value_scales)),
            bytes_moved=bytes_moved,
        )  # fmt: skip
