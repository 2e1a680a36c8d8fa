"""Int8 products of many rows on compute capability 9.0 with a fused epilogue: scaled, and activated, gated or added.

The results of ``gemm/gemm_hopper.cu`` equal those of an int32 product (:mod:`.igemm`) and a scaling kernel, but its
sums are never written to memory.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...runtime.driver import Device, DeviceAttribute
from ...runtime.kernel import Kernel
from ...runtime.tensor_maps import ROW_BYTES, TensorMapDataType, tensor_map_2d
from ..constants import GEMM_BOX_ROWS as BOX_ROWS
from ..constants import GEMM_PIPELINE_BYTES as PIPELINE_BYTES
from ..constants import GEMM_ROWS as ROWS
from ..constants import GEMM_STAGE_COLUMNS as STAGE_COLUMNS
from ..constants import Activation, Epilogue
from ..instantiations import BOOLEANS, Capability, KernelFamily, numbers
from ..sources import load

THREADS = 384
STAGING_BYTES = THREADS * 2 // 3 // 32 * 2 * BOX_ROWS * ROW_BYTES
EPILOGUES = (
    Epilogue.TO_HALF,
    Epilogue.TO_FLOAT,
    Epilogue.TO_BFLOAT16,
    Epilogue.ADD,
    Epilogue.GATED,
    Epilogue.ACTIVATED,
)
ADAPTED_EPILOGUES = (Epilogue.TO_HALF, Epilogue.TO_FLOAT, Epilogue.ADD, Epilogue.GATED)
"""Those of products with a side product."""
FLOAT_EPILOGUES = (Epilogue.TO_FLOAT, Epilogue.ADD)
"""The epilogues with fp32 results."""


@dataclass(frozen=True)
class GemmTileConfig:
    """How blocks share a product: up to 128 rows by ``width`` of the weight at a time, in clusters of ``cluster``.

    With split-K, the ``split_k`` blocks of a cluster share one tile, each with a part of its columns.
    """

    width: int
    cluster: int = 1
    split_k: int = 1

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the pipeline's stages, staging for results, and two barriers for each stage."""
        return PIPELINE_BYTES + STAGING_BYTES + 16 * (PIPELINE_BYTES // (STAGE_COLUMNS * (ROWS + self.width)))

    @property
    def arguments(self) -> str:
        """The last template arguments of the kernel."""
        return f"{self.width}, {self.cluster}, {self.split_k}"

    @property
    def blocks(self) -> int:
        """Blocks of a cluster."""
        return self.cluster * self.split_k

    def columns(self, epilogue: Epilogue) -> int:
        """Columns of the result that a block writes for a tile."""
        return self.width // (2 if epilogue is Epilogue.GATED else 1) // self.split_k

    def box_row_bytes(self, epilogue: Epilogue) -> int:
        """Bytes of a row in a box of results: as many, up to ``ROW_BYTES``, as divide a tile's row."""
        row = self.columns(epilogue) * (4 if epilogue in FLOAT_EPILOGUES else 2)
        return min(row & -row, ROW_BYTES)

    def serves(self, epilogue: Epilogue, stages: int) -> bool:
        """Whether each part of a split has columns, and enough results for the box that a warp writes."""
        return stages >= self.split_k and self.box_row_bytes(epilogue) >= min(NARROW)

    def serves_adapted(self, activation: int, bias: bool) -> bool:
        """Whether registers suffice for a side product too."""
        return self.width < WIDEST or (activation != Activation.GELU and not bias)

    def cost(self, rows: int, channels: int, stages: int, epilogue: Epilogue, num_sms: int) -> float:
        """The relative duration of a product: stages of the weight that one SM passes over."""
        row_tiles, tall = -(-rows // ROWS), -(-rows // (ROWS * self.cluster))
        slower = SLOWER[self.width] * NARROW[self.box_row_bytes(epilogue)] * (1.05 if self.cluster < 2 else 1)
        slower *= tall * self.cluster / row_tiles
        passes = self.width * slower * stages / self.split_k + (EXCHANGE if self.split_k > 1 else 0)
        return -(-tall * -(-channels // self.width) // (num_sms // self.blocks)) * passes


WIDEST = 256
EXCHANGE = 1500
"""Cost of exchanging sums between blocks, in the unit of ``GemmTileConfig.cost``: weight rows times stages."""
SLOWER = {256: 1, 224: 1.02, 192: 1.02, 160: 1.03, 128: 1.05, 96: 1.1, 64: 1.2}
"""The cost of a weight row in tiles of each width; see ``benchmarks/measure_gemm_tiles.py``."""
NARROW = {128: 1, 64: 1.01, 32: 1.04}
"""The cost of results by the bytes of a row in a box."""
TILE_CONFIGS = (
    *(GemmTileConfig(width, cluster) for width in (256, 224, 192, 160, 128) for cluster in (2, 1)),
    *(GemmTileConfig(width, split_k=2) for width in (128, 96, 64)),
)
PLAUSIBLE = 5
PLAUSIBLE_COST = 1.25
"""The fastest configuration is sought among the ``PLAUSIBLE`` ones of the lowest modelled cost, as far as they cost at
most ``PLAUSIBLE_COST`` times the lowest."""
BANDS, BAND_BYTES = (64, 32, 16), 20 << 20
"""Row tiles of a band, see ``TileScheduler`` in the kernel: the most of ``BANDS`` with at most ``BAND_BYTES``, else the
fewest.

The L2 cache keeps a band's rows for all columns, and the weight is read once for each band.
"""
PIECE_COLUMNS = 32
"""Columns of a tile that are written beside the products of one stage of the next tile."""
TILES_TO_HIDE = 4
"""An activation takes no time of its own where a block has this number of tiles: the last one has no next tile."""
MIN_ROWS = 65
"""From this many rows on, this kernel is the fastest; below, ``skinny_gemm`` is."""
KERNEL_CACHE_SIZE = 1024
"""Shapes whose launches are kept; beyond that, the least recently used is dropped."""
SELF_TESTS = (300, 400, 272), (100, 400, 2000)
"""Rows, rows of the weight and inner sizes of products that must be exact before the kernel is used."""


PitchedPointer = tuple[int, int]
"""An address, and the elements from one row to the next; both are multiples of 16 bytes."""


@dataclass(frozen=True)
class _KernelLaunch:
    """The part of a launch that depends on the shape; ``numbers`` are the parameters ``rows`` to ``band``.

    ``height``: rows of a tile, as equal as multiples of 16 allow. A copy of rows that lie outside the matrix takes
    longer than one of rows that exist.
    """

    kernel: Kernel
    grid: int
    cluster: int | None
    shared: int
    height: int
    box_channels: int
    box_row_bytes: int
    numbers: tuple[int, ...]


class ScaledGemm:
    """The kernel of ``gemm/gemm_hopper.cu`` on one GPU."""

    source = "gemm/gemm_hopper.cu"

    def __init__(self, device: Device) -> None:
        self._device = device
        self._num_sms = device.attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
        shared = device.attribute(DeviceAttribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self.supported = device.compute_capability == (9, 0) and shared >= max(t.shared for t in TILE_CONFIGS)
        self._kernel = functools.cache(self._load)
        self._kernel_launch = functools.lru_cache(KERNEL_CACHE_SIZE)(self._kernel_launch_uncached)

    @classmethod
    def instantiations(cls, capability: Capability) -> Iterator[KernelFamily]:
        if capability == (9, 0):
            values = numbers(EPILOGUES), numbers(Activation), BOOLEANS, tuple(_TILE_CONFIG_BY_ARGUMENTS)
            yield KernelFamily(cls.source, "bminf::gemm_hopper", values, _possible)
            adapted = numbers(ADAPTED_EPILOGUES), *values[1:]
            yield KernelFamily(cls.source, "bminf::gemm_hopper_adapted", adapted, _possible_adapted)

    def supports(self, rows: int, channels: int, epilogue: Epilogue, adapted: bool = False) -> bool:
        """Whether the kernel runs here, and is the fastest for ``rows`` and a weight of ``channels`` rows."""
        known = epilogue in (ADAPTED_EPILOGUES if adapted else EPILOGUES)
        return self.supported and rows >= MIN_ROWS and channels % 4 == 0 and known

    def hides_activation(self, rows: int, channels: int, in_features: int) -> bool:
        """Whether an activation is computed while the tensor cores have the next tile, if blocks have the widest."""
        stages, tile = -(-in_features // STAGE_COLUMNS), ROWS * WIDEST
        return stages * PIECE_COLUMNS >= WIDEST and rows * channels >= TILES_TO_HIDE * self._num_sms * tile

    @functools.cached_property
    def verified(self) -> bool:
        """Whether the self-tests are exact, on CuPy's current stream; if not, there is a warning."""
        wrong = [sizes for sizes in SELF_TESTS if not self._is_exact(*sizes)]
        for rows, channels, in_features in wrong[:1]:
            reason = f"a product of {rows} x {in_features} by {channels} x {in_features} was wrong"
            warning = f"{self._device.name}: the int8 kernel that scales its own sums is not used, {reason}"
            warnings.warn(warning, RuntimeWarning, stacklevel=2)
        return not wrong

    def _is_exact(self, rows: int, channels: int, in_features: int) -> bool:
        import cupy as cp  # not above: instantiations() must work where CuPy is not installed

        random = np.random.default_rng(0)
        x, w = (random.integers(-128, 128, (n, in_features), np.int8) for n in (rows, channels))
        x_scale, w_scale = (random.uniform(1e-4, 1e-2, n).astype(np.float32) for n in (rows, channels))
        operands = [cp.asarray(v) for v in (x, x_scale, w, w_scale)]
        out = cp.asarray(np.full((rows, channels), np.nan, np.float16))  # CuPy would compile a kernel to fill it
        codes, scales, weight, weight_scales = (v.data.ptr for v in operands)
        self.launch(
            (codes, in_features),
            scales,
            (weight, in_features),
            weight_scales,
            0,
            (out.data.ptr, channels),
            rows=rows,
            channels=channels,
            in_features=in_features,
            epilogue=Epilogue.TO_HALF,
            stream=cp.cuda.get_current_stream().ptr,
        )
        acc = (x.astype(np.float64) @ w.T.astype(np.float64)).astype(np.float32)  # exact, faster than integers
        return np.array_equal(cp.asnumpy(out), (x_scale[:, None] * (w_scale * acc)).astype(np.float16))

    def launch(
        self,
        x: PitchedPointer,
        x_scale: int,
        w: PitchedPointer,
        w_scale: int,
        bias: int,
        out: PitchedPointer,
        *,
        rows: int,
        channels: int,
        in_features: int,
        epilogue: Epilogue,
        activation: int = 0,
        tile_config: GemmTileConfig | None = None,
        stream: int = 0,
        bytes_moved: int = 0,
        dependent: bool = True,
        side: tuple[int, ...] = (),
    ) -> None:
        """Compute ``scaled(x @ w.T) + bias`` with ``epilogue``, one of ``EPILOGUES``.

        - ``x`` int8 ``[rows, in_features]``, ``x_scale`` fp32 ``[rows]``;
        - ``w`` int8 ``[channels, in_features]``, ``w_scale`` fp32 ``[channels]``, ``bias`` as long or 0;
        - ``out`` fp16, bf16 or fp32 ``[rows, channels]``, or fp32 to add to, or the ``activation`` (by its number in
          ``common.cuh``) of them in fp16, or fp16 ``[rows, channels / 2]``: that of the first half times the second.

        The result has an even number of columns; padding in the last 16 bytes of a row is overwritten.
        ``tile_config`` changes the speed alone; None is the first of :meth:`plausible_tiles`. ``bytes_moved`` and
        ``dependent`` as in :class:`Kernel`. ``side`` are the arguments of a side product, whose sections end at
        multiples of 32; ``epilogue`` is one of ``ADAPTED_EPILOGUES`` then.
        """
        launch = self._kernel_launch(
            rows, channels, in_features, epilogue, activation, bias != 0, tile_config, bool(side)
        )
        element = TensorMapDataType.FLOAT32 if epilogue in FLOAT_EPILOGUES else TensorMapDataType.FLOAT16
        arguments = (
            *side,
            x_scale,
            w_scale,
            bias,
            *launch.numbers,
            tensor_map_2d(x[0], TensorMapDataType.INT8, rows, in_features, x[1], launch.height),
            tensor_map_2d(w[0], TensorMapDataType.INT8, channels, in_features, w[1], launch.box_channels),
            tensor_map_2d(out[0], element, rows, launch.numbers[1], out[1], BOX_ROWS, row_bytes=launch.box_row_bytes),
        )
        launch.kernel(launch.grid, THREADS, arguments, launch.shared, stream, dependent, launch.cluster, bytes_moved)

    def plausible_tiles(
        self, rows: int, channels: int, in_features: int, epilogue: Epilogue, configs: Sequence[GemmTileConfig] = ()
    ) -> list[GemmTileConfig]:
        """Up to ``PLAUSIBLE`` tile configurations whose modelled cost is near the least, the cheapest first.

        ``configs``: those that there are, if not all.
        """
        stages = -(-in_features // STAGE_COLUMNS)
        costs = {
            config: config.cost(rows, channels, stages, epilogue, self._num_sms)
            for config in configs or TILE_CONFIGS
            if config.serves(epilogue, stages)
        }
        cheapest = sorted(costs, key=costs.__getitem__)[:PLAUSIBLE]
        return [config for config in cheapest if costs[config] <= PLAUSIBLE_COST * costs[cheapest[0]]]

    def _kernel_launch_uncached(
        self,
        rows: int,
        channels: int,
        in_features: int,
        epilogue: Epilogue,
        activation: int,
        bias: bool,
        tile_config: GemmTileConfig | None,
        adapted: bool,
    ) -> _KernelLaunch:
        gated, stages = epilogue is Epilogue.GATED, -(-in_features // STAGE_COLUMNS)
        if tile_config is None:
            configs = [c for c in TILE_CONFIGS if not adapted or c.serves_adapted(activation, bias)]
            tile_config = self.plausible_tiles(rows, channels, in_features, epilogue, configs)[0]
        columns, width = channels // 2 if gated else channels, tile_config.columns(epilogue) * tile_config.split_k
        assert columns % 2 == 0 and epilogue in EPILOGUES, (columns, epilogue)
        row_tiles, column_tiles = -(-rows // (ROWS * tile_config.cluster)), -(-columns // width)
        clusters = row_tiles * column_tiles
        if tile_config.split_k == 1:  # else each cluster computes one tile
            clusters = fewest_clusters(clusters, self._num_sms // tile_config.cluster)
        height = -(-rows // (row_tiles * tile_config.cluster) // BOX_ROWS) * BOX_ROWS
        band = band_of(in_features) // tile_config.cluster
        numbers = (rows, columns, channels, stages, height, row_tiles, column_tiles, band)
        arguments = f"{int(epilogue)}, {activation}, {str(bias).lower()}, {tile_config.arguments}"
        kernel = self._kernel(f"bminf::gemm_hopper{'_adapted' if adapted else ''}<{arguments}>")
        cluster = tile_config.blocks if tile_config.blocks > 1 else None
        return _KernelLaunch(
            kernel,
            clusters * tile_config.blocks,
            cluster,
            tile_config.shared,
            height,
            tile_config.width // 2,
            tile_config.box_row_bytes(epilogue),
            numbers,
        )

    def _load(self, expression: str) -> Kernel:
        return load(self._device, self.source, expression)


def fewest_clusters(tiles: int, places: int) -> int:
    """Clusters that compute ``tiles`` in no more rounds than ``places`` would; idle SMs leave their power to others."""
    rounds = -(-tiles // places)
    return -(-tiles // rounds)


def band_of(in_features: int) -> int:
    """Row tiles of a band."""
    return next((band for band in BANDS if band * ROWS * in_features <= BAND_BYTES), BANDS[-1])


_TILE_CONFIG_BY_ARGUMENTS = {tile_config.arguments: tile_config for tile_config in TILE_CONFIGS}
_MANY_STAGES = 1024


def _possible(epilogue: int, activation: int, bias: str, tile_config: str) -> bool:
    serves = _TILE_CONFIG_BY_ARGUMENTS[tile_config].serves(Epilogue(epilogue), _MANY_STAGES)
    return serves and (epilogue in (Epilogue.GATED, Epilogue.ACTIVATED) or activation == 0)


def _possible_adapted(epilogue: int, activation: int, bias: str, tile_config: str) -> bool:
    serves = _TILE_CONFIG_BY_ARGUMENTS[tile_config].serves_adapted(activation, bias == BOOLEANS[1])
    return serves and _possible(epilogue, activation, bias, tile_config)
