"""Exact int8 products of a few rows on compute capability 9.0: the same results as :mod:`.skinny_gemm`, faster.

``skinny_gemm_hopper.cu`` multiplies with WGMMA from shared memory that TMA copies fill, so a product takes as long as
reading its weight, independent of the number of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ...runtime.driver import Device, DeviceAttribute
from ...runtime.kernel import Kernel
from ...runtime.tensor_maps import ROW_BYTES, TensorMapDataType, tensor_map_2d
from ..constants import SKINNY_HOPPER_BOXES as BOXES
from ..constants import SKINNY_HOPPER_CLUSTER as CLUSTER
from ..constants import SKINNY_HOPPER_ROWS as ROWS
from ..constants import SKINNY_HOPPER_THREADS as THREADS
from ..constants import SKINNY_HOPPER_TILES as TILES
from ..constants import SKINNY_HOPPER_WINDOW as WINDOW
from ..constants import Epilogue
from ..instantiations import Capability, KernelFamily
from ..sources import load
from .skinny_gemm import EPILOGUE_ARGUMENTS, SkinnyGemm, possible_epilogue

KERNEL_CACHE_SIZE = 1024
"""Shapes whose launches are kept; beyond that, the least recently used is dropped."""
RESERVED_SHARED_MEMORY = 11 << 8
"""Shared memory for the dependent kernel over rows that is resident beside this one."""
SHRINK_SHARED_MEMORY = 12 << 10
"""Shared memory for two blocks of the kernel of adapters' inputs, which runs beside the product."""
SECTION_MULTIPLE = ROWS // CLUSTER
"""Channels that a block finishes of a tile: all belong to one section of a weight with adapters."""
_STAGE_BARRIERS, _SUMS_BARRIERS = 24, 32
_INT8 = TensorMapDataType.INT8  # looking it up takes the host 0.07 us


class SkinnyGemmHopper(SkinnyGemm):
    """The kernel of ``gemm/skinny_gemm_hopper.cu`` on one GPU."""

    source = "gemm/skinny_gemm_hopper.cu"
    is_fastest = True
    tile_counts = TILES

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._kernel_adapted = functools.cache(self._load_adapted)
        self._launch_of = functools.lru_cache(KERNEL_CACHE_SIZE)(self._find_launch)

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        if capability == (9, 0):
            values = cls.tile_counts, *EPILOGUE_ARGUMENTS
            yield KernelFamily(cls.source, "bminf::skinny_gemm_hopper", values, possible_epilogue)
            yield KernelFamily(cls.source, "bminf::skinny_gemm_hopper_adapted", values, _possible_adapted)

    def supports(self, rows: int) -> bool:
        return 1 < rows <= self.max_rows

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
        dependent: bool = True,
        side: tuple[int, ...] = (),
    ) -> None:
        """As the base class's, and also of a single row; ``dependent`` as in :class:`Kernel`.

        ``side`` are the arguments of a side product, whose sections end at multiples of :data:`SECTION_MULTIPLE`.
        """
        kernel, grid, box_rows, weight_rows, shared, numbers = self._launch_of(
            rows, out_features, pitch, epilogue, activation, bool(side)
        )
        x_map = tensor_map_2d(x, _INT8, rows, pitch, pitch, box_rows, False)
        w_map = tensor_map_2d(w, _INT8, out_features, pitch, pitch, weight_rows, False)
        arguments = (*side, x_scale, w_scale, bias, out, out_pitch, rows, out_features, x_map, w_map, *numbers)
        kernel(grid, THREADS, arguments, shared, stream, dependent, CLUSTER, bytes_moved)

    def _find_launch(
        self, rows: int, out_features: int, pitch: int, epilogue: Epilogue, activation: int, adapted: bool
    ) -> tuple[Kernel, int, int, int, int, tuple[int, ...]]:
        """The kernel, its blocks, the rows of both boxes, shared memory, and its last arguments."""
        gated = epilogue is Epilogue.GATED
        assert 1 <= rows <= self.max_rows and pitch % 16 == 0 and not (gated and out_features % 2)
        columns = BOXES * ROW_BYTES
        tiles, weight_rows = self.tiles(rows), ROWS // (1 + gated)
        weight_tiles, steps = -(-out_features // (1 + gated) // weight_rows), -(-pitch // columns)
        clusters = min(self._num_sms // CLUSTER, weight_tiles)
        reserved = SHRINK_SHARED_MEMORY if adapted else 0
        resident, stages, shared = self._divide(tiles, steps, weight_tiles > clusters, reserved)
        kernel = (
            self._kernel_adapted(tiles, epilogue, activation) if adapted else self._kernel(tiles, epilogue, activation)
        )
        return kernel, clusters * CLUSTER, 8 * tiles, weight_rows, shared, (weight_tiles, steps, stages, resident)

    @functools.cached_property
    def _shared(self) -> int:
        """Shared memory per block beside a dependent kernel; this kernel has no static part."""
        return self._device.attribute(DeviceAttribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN) - RESERVED_SHARED_MEMORY

    def _divide(self, tiles: int, steps: int, several: bool, reserved: int) -> tuple[bool, int, int]:
        """Whether activations stay in shared memory, used for ``several`` tiles; stages; and bytes in total.

        ``reserved`` bytes are left to kernels beside this one.
        """
        weight, activations = BOXES * ROWS * ROW_BYTES, BOXES * 8 * tiles * ROW_BYTES
        room, in_all = self._shared - reserved, -(-steps // CLUSTER) * activations
        sums = 2 * ROWS * 8 * tiles * 4 + _SUMS_BARRIERS
        resident = several and sums + in_all + WINDOW * (weight + _STAGE_BARRIERS) <= room
        fixed, each = (sums + in_all, weight) if resident else (sums, weight + activations)
        stages = (room - fixed) // (each + _STAGE_BARRIERS)
        assert stages >= WINDOW
        return resident, stages, fixed + stages * (each + _STAGE_BARRIERS)

    def _load(self, tiles: int, epilogue: Epilogue, activation: int) -> Kernel:
        expression = f"bminf::skinny_gemm_hopper<{tiles}, {int(epilogue)}, {activation}>"
        return load(self._device, self.source, expression)

    def _load_adapted(self, tiles: int, epilogue: Epilogue, activation: int) -> Kernel:
        expression = f"bminf::skinny_gemm_hopper_adapted<{tiles}, {int(epilogue)}, {activation}>"
        return load(self._device, self.source, expression)


def _possible_adapted(tiles: int, epilogue: int, activation: int) -> bool:
    unused = Epilogue.TO_INT32, Epilogue.TO_BFLOAT16
    return epilogue not in unused and possible_epilogue(tiles, epilogue, activation)
