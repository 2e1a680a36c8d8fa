"""The router of a mixture of experts: logits in fp32, and the choice of experts: the launchers of ``router.cu``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ....backend.values import Norm
from ..arrays import address, ceil_div, nbytes_of, pitch_of, pointer_and_pitch
from ..constants import CHOOSE_THREADS, MAX_EXPERTS, ROUTER_THREADS, ROUTER_TILE, ROUTER_TILE_THREADS
from ..instantiations import BOOLEANS, Capability, KernelFamily, Together
from ..launcher import Launcher, StepContext
from ..rowwise.rows import IDENTITY, LAYER_NORM, RMS_NORM, norm_arguments, vectors_for
from .weights import SPARSE_MIXER, RouterWeights

if TYPE_CHECKING:
    import cupy as cp

WARPS = ROUTER_THREADS // 32
VECTORS = (1, 2, 4)
MAX_WIDTH = VECTORS[-1] * 8 * ROUTER_THREADS
"""Elements of a row that a block normalises."""
FEW_ROWS = 16
"""Up to this many rows, each block normalises the row that it multiplies."""
ROWS = 8
"""Rows of a warp, where there are many."""
MANY = (4, 3, 2), (4, 1, 8), (8, 1, 8)
"""Experts of a warp then, the steps whose operands it loads at once, and the warps of a block.

The first is for few rows: there are more blocks, and a warp does not wait for each of its loads. But it reads more.
"""
TILE_STAGES = (4, 3)
"""Stages of ``router_tiles``: the first number that the GPU has memory for."""
TILE_SHARE = 3
"""From one tile for this many SMs on, blocks multiply tiles of ``ROUTER_TILE`` rows and experts from shared memory."""
EACH = (1, 4, 8, 16)
"""Experts of a lane of the warp that chooses."""
MAX_TOP_K = 32
TYPES = ("__half", "float")
ROW_OPS = (RMS_NORM, LAYER_NORM, IDENTITY)
"""What kernels read of a row: a norm of it, or the row itself."""


class RouterKernels:
    """Logits and choices of any number of rows."""

    source = "experts/router.cu"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        yield KernelFamily(cls.source, "router_few_rows", (ROW_OPS, VECTORS, TYPES, BOOLEANS))
        yield KernelFamily(cls.source, "router_norm", (ROW_OPS, VECTORS, BOOLEANS))
        yield KernelFamily(cls.source, "router_many_rows", ((ROWS,), tuple(map(Together, MANY)), TYPES))
        if capability >= (8, 0):
            yield KernelFamily(cls.source, "router_tiles", (TYPES, TILE_STAGES))
        for defines in ((), SPARSE_MIXER):
            yield KernelFamily(cls.source, "choose_experts", (EACH,), defines=defines)
        yield KernelFamily(cls.source, "scalar_gate", (ROW_OPS, VECTORS))

    @staticmethod
    def supports(router: RouterWeights) -> bool:
        """Whether there are kernels for the router's number of experts, its choices per token, and its width."""
        spec = router.spec
        return spec.num_experts <= MAX_EXPERTS and spec.top_k <= MAX_TOP_K and router.in_features <= MAX_WIDTH

    def logits(
        self,
        step: StepContext | None,
        x: cp.ndarray,
        norm: Norm | None,
        router: RouterWeights,
        out: cp.ndarray,
        normed: cp.ndarray | None,
        codes: cp.ndarray | None = None,
        scales: cp.ndarray | None = None,
        rotation: int = 1,
        gate: tuple[cp.ndarray, cp.ndarray] | None = None,
    ) -> None:
        """``norm(x) @ weight.T + bias``: fp32 ``[T, in]`` -> ``out`` fp32 ``[T, experts]``, dense.

        Without a ``norm`` the rows are read as they are. What is read of each row is also quantized, to ``codes`` int8
        ``[T, pitch]`` and ``scales`` fp32 ``[T]``, if they are given; before that it is transformed in blocks of
        ``rotation`` elements. ``normed`` is memory for the norms of more than ``FEW_ROWS`` rows, fp32 ``[T, in]`` with
        padded rows. Of at most that many rows, a ``gate`` may be computed too: the weight and the result of
        :meth:`scalar_gate`.
        """
        rows, experts, k = len(x), router.spec.num_experts, router.in_features
        op, vectors = row_op_of(norm), vectors_for(k, ROUTER_THREADS)
        kind = TYPES[router.matrix.dtype == np.float32]
        pitch, bias = pitch_of(router.matrix), address(router.bias)
        rotated = BOOLEANS[rotation > 1]
        quantized = (*pointer_and_pitch(codes), address(scales), rotation, rotation**-0.5)
        assert gate is None or rows <= FEW_ROWS
        if rows <= FEW_ROWS:
            gate_weight, gate_out = (0, 0) if gate is None else (v.data.ptr for v in gate)
            self._launcher.launch(
                step,
                self.source,
                f"router_few_rows<{op}, {vectors}, {kind}, {rotated}>",
                (ceil_div(experts, WARPS) + (codes is not None) + (gate is not None), rows),
                ROUTER_THREADS,
                (
                    x.data.ptr,
                    pitch_of(x),
                    *norm_arguments(norm),
                    router.matrix.data.ptr,
                    bias,
                    out.data.ptr,
                    *quantized,
                    gate_weight,
                    gate_out,
                    experts,
                    k,
                    pitch,
                ),
                bytes_moved=nbytes_of(x, router.matrix, codes),
            )
            return
        assert normed is not None
        self._launcher.launch(
            step,
            self.source,
            f"router_norm<{op}, {vectors}, {rotated}>",
            rows,
            ROUTER_THREADS,
            (x.data.ptr, pitch_of(x), *norm_arguments(norm), *pointer_and_pitch(normed), *quantized, k),
            bytes_moved=nbytes_of(x, normed, codes),
            cache=rows > self._launcher.num_sms,
        )
        arguments = (*pointer_and_pitch(normed), router.matrix.data.ptr, bias, out.data.ptr, rows, experts, k, pitch)
        moved = nbytes_of(normed, router.matrix, out)
        tiles = ceil_div(experts, ROUTER_TILE), ceil_div(rows, ROUTER_TILE)
        itemsize, max_shared = router.matrix.dtype.itemsize, self._launcher.max_shared
        stages = next((n for n in TILE_STAGES if tile_bytes(itemsize, n) <= max_shared), 0)
        num_sms = self._launcher.num_sms
        if stages and math.prod(tiles) * TILE_SHARE >= num_sms:
            name, shared = f"router_tiles<{kind}, {stages}>", tile_bytes(itemsize, stages)
            self._launcher.launch(
                step, self.source, name, tiles, ROUTER_TILE_THREADS, arguments, shared, bytes_moved=moved, cache=True
            )
            return
        few, many = (ceil_div(rows, ROWS) * ceil_div(experts, each * WARPS) for each, *_ in MANY[1:])
        each, depth, warps = MANY[(few * 2 > num_sms) + (many >= num_sms)]
        self._launcher.launch(
            step,
            self.source,
            f"router_many_rows<{ROWS}, {each}, {depth}, {warps}, {kind}>",
            (ceil_div(experts, each * warps), ceil_div(rows, ROWS)),
            warps * 32,
            arguments,
            bytes_moved=moved,
            cache=True,
        )

    def choose(
        self,
        step: StepContext | None,
        logits: cp.ndarray,
        router: RouterWeights,
        topk_ids: cp.ndarray,
        topk_weights: cp.ndarray,
    ) -> None:
        """:func:`backend.routing.route`: fp32 ``[T, experts]`` -> int32 and fp32 ``[T, top_k]``; all are dense."""
        rows = len(logits)
        self._launcher.launch(
            step,
            self.source,
            f"choose_experts<{experts_of_a_lane(router.spec.num_experts)}>",
            ceil_div(rows, CHOOSE_THREADS // 32),
            CHOOSE_THREADS,
            (*router.arguments, logits.data.ptr, topk_ids.data.ptr, topk_weights.data.ptr, rows),
            bytes_moved=nbytes_of(logits, topk_ids, topk_weights),
            defines=router.defines,
        )

    def scalar_gate(
        self, step: StepContext | None, x: cp.ndarray, norm: Norm | None, weight: cp.ndarray, out: cp.ndarray
    ) -> None:
        """``sigmoid(norm(x) @ weight)`` of each row: fp32 ``[T, in]``, fp32 ``[in]`` padded -> fp32 ``[T]``."""
        rows, k = x.shape
        self._launcher.launch(
            step,
            self.source,
            f"scalar_gate<{row_op_of(norm)}, {vectors_for(k, ROUTER_THREADS)}>",
            rows,
            ROUTER_THREADS,
            (x.data.ptr, pitch_of(x), *norm_arguments(norm), weight.data.ptr, out.data.ptr, k),
            bytes_moved=nbytes_of(x, weight, out),
        )


def row_op_of(norm: Norm | None) -> int:
    """The element of :data:`ROW_OPS` for a norm, or for none."""
    if norm is None:
        return IDENTITY
    return LAYER_NORM if norm.center else RMS_NORM


def tile_bytes(itemsize: int, stages: int) -> int:
    """Bytes of shared memory of ``router_tiles``: of its stages, or half of the sums of all threads."""
    return max(stages * ROUTER_TILE * 128 * (4 + itemsize), ROUTER_TILE_THREADS * 32 * 4)


def experts_of_a_lane(experts: int) -> int:
    """The element of :data:`EACH` with which the 32 lanes of a warp have ``experts`` experts."""
    return next(each for each in EACH if experts <= each * 32)
