"""Exact int8 products of few rows on the tensor cores, bound by reading the weight: decoding of small batches.

The kernel has a fused epilogue: it scales the sums, adds the bias, and writes them, adds them to the residual stream or
gates them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from ...runtime.driver import Device, DeviceAttribute, shared_memory_per_block
from ...runtime.kernel import Kernel
from ..constants import SKINNY_ROWS as GROUP
from ..constants import SKINNY_STEP as STEP
from ..constants import Activation, Epilogue
from ..instantiations import Capability, KernelFamily, numbers
from ..sources import SOURCES, load


@dataclass(frozen=True)
class PipelineConfig:
    """The weights in flight in a block: warps, stages per warp, and steps of ``STEP`` columns per stage."""

    warps: int
    stages: int
    steps: int

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory; the rows of a stage are padded by one step."""
        return self.warps * self.stages * GROUP * (self.steps + 1) * STEP

    @property
    def defines(self) -> tuple[str, ...]:
        """Macros of the kernel's source."""
        return f"PIPELINE_WARPS={self.warps}", f"PIPELINE_STAGES={self.stages}", f"PIPELINE_STEPS={self.steps}"


PIPELINES = (PipelineConfig(16, 2, 4), PipelineConfig(8, 2, 4))
"""The pipeline for much shared memory, and the one for little."""
WIDE_PIPELINES = (PipelineConfig(8, 2, 8), PipelineConfig(4, 2, 8))
"""The same for more than 16 rows, whose activations take more registers than 16 warps have."""
RESERVED_SHARED_MEMORY = 512
"""Static shared memory of a block, at most."""
MIN_EPILOGUE_SHARED_MEMORY = 18 << 10
"""Shared memory for the sums, scales and biases of a block's share, at least."""


class SkinnyGemm:
    """The kernel of ``gemm/skinny_gemm.cu`` on one GPU."""

    source = "gemm/skinny_gemm.cu"
    is_fastest = False
    """Whether the kernel is used without timing it; this one is slower than cublasLt on some shapes."""
    tile_counts: tuple[int, ...] = (1, 2, 4)
    """Numbers of tiles of 8 rows of activations that the kernel is compiled for."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kernel = functools.cache(self._load)

    @functools.cached_property
    def version(self) -> str:
        """A hash of the kernel's source, so that stored choices hold for one version only."""
        return hashlib.sha256(SOURCES.source(self.source).encode()).hexdigest()[:16]

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        if capability < (8, 0):
            return
        room = shared_memory_per_block(capability) - RESERVED_SHARED_MEMORY
        for tiles in (cls.tile_counts[:2], cls.tile_counts[2:]):
            defines = pipeline_for(tiles[0], room).defines
            yield KernelFamily(cls.source, "skinny_gemm", (tiles, *EPILOGUE_ARGUMENTS), possible_epilogue, defines)

    @property
    def max_rows(self) -> int:
        """The most rows of activations."""
        return 8 * self.tile_counts[-1]

    def tiles(self, rows: int) -> int:
        """The number of tiles in whose kernel ``rows`` rows are multiplied."""
        return next(tiles for tiles in self.tile_counts if rows <= 8 * tiles)

    def supports(self, rows: int) -> bool:
        """Whether the kernel supports ``rows`` rows, and the GPU has int8 MMA of compute capability 8.0."""
        return 1 < rows <= self.max_rows and self._device.compute_capability >= (8, 0)

    def launch(
        self,
        x: int,
        x_scale: int,
        w: int,
        w_scale: int,
        bias: int,
        out: int,
        out_pitch: int,
        rows: int,
        out_features: int,
        pitch: int,
        stream: int,
        epilogue: Epilogue = Epilogue.TO_INT32,
        activation: int = 0,
        bytes_moved: int = 0,
    ) -> None:
        """``out = x @ w.T`` with ``epilogue``, on ``stream``; the first six arguments are addresses.

        ``x`` is int8 ``[rows, pitch]`` with ``x_scale`` fp32 ``[rows]``, ``w`` int8 ``[out_features, pitch]``, its rows
        padded to whole groups, ``w_scale`` and ``bias`` (or 0) fp32 ``[out_features]``. ``out`` has rows of
        ``out_pitch`` elements: ``[rows, out_features]`` in fp16 (or activated), fp32 or int32, or gated fp16 ``[rows,
        out_features / 2]``, where half of the features must be whole groups. ``pitch`` is a multiple of 16, ``x`` and
        ``w`` are aligned to 16 bytes. Sums need no scales. ``bytes_moved`` is for the device's observer.
        """
        matrices = 2 if epilogue is Epilogue.GATED else 1
        assert self.supports(rows) and pitch % 16 == 0 and (matrices == 1 or out_features % (2 * GROUP) == 0)
        tiles = self.tiles(rows)
        groups, each = -(-out_features // (GROUP * matrices)), matrices * group_bytes(tiles)
        pipeline = pipeline_for(tiles, self._shared)
        most = (self._shared - pipeline.nbytes) // each
        waves = -(-groups // (self._num_sms * most))
        grid = min(groups, self._num_sms * waves)
        self._kernel(tiles, epilogue, activation)(
            grid,
            32 * pipeline.warps,
            (x, x_scale, w, w_scale, bias, out, out_pitch, rows, out_features, pitch),
            shared=pipeline.nbytes + -(-groups // grid) * each,
            stream=stream,
            dependent=True,
            bytes_moved=bytes_moved,
        )

    @functools.cached_property
    def _shared(self) -> int:
        """Shared memory per block without the kernel's static part."""
        return self._device.attribute(DeviceAttribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN) - RESERVED_SHARED_MEMORY

    @functools.cached_property
    def _num_sms(self) -> int:
        return self._device.attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)

    def _load(self, tiles: int, epilogue: Epilogue, activation: int) -> Kernel:
        expression = f"skinny_gemm<{tiles}, {int(epilogue)}, {activation}>"
        return load(self._device, self.source, expression, pipeline_for(tiles, self._shared).defines)


def pipeline_for(tiles: int, room: int) -> PipelineConfig:
    """The largest pipeline that leaves room for the epilogue in ``room`` bytes of shared memory."""
    pipelines = WIDE_PIPELINES if tiles > 2 else PIPELINES
    return next(pipeline for pipeline in pipelines if pipeline.nbytes + MIN_EPILOGUE_SHARED_MEMORY <= room)


def group_bytes(tiles: int) -> int:
    """Shared memory for the sums, scales and biases of a group of the weight's rows."""
    return GROUP * (8 * tiles + 2) * 4


EPILOGUE_ARGUMENTS = numbers(Epilogue), numbers(Activation)


def possible_epilogue(tiles: int, epilogue: int, activation: int) -> bool:
    """Whether the combination is launched: only a gated or an activated epilogue has an activation."""
    return epilogue in (Epilogue.GATED, Epilogue.ACTIVATED) or activation == 0
