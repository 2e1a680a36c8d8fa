"""The operators on CUDA tensors: launches on torch's current stream, in memory of torch's caching allocator.

A kernel starts after everything before it on the stream has ended (no programmatic dependent launch): the kernel before
may be an optimizer's, whose weights ours would otherwise prefetch too early. Tensors whose last dimension is contiguous
and whose rows are equally far apart are read where they are; others are copied first.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cuda.kernels.arrays import round_up
from ..cuda.kernels.constants import Epilogue, GemvInput
from ..cuda.kernels.gemm.gemm_hopper import SELF_TESTS, GemmTileConfig, ScaledGemm
from ..cuda.kernels.gemm.skinny_gemm_hopper import SkinnyGemmHopper
from ..cuda.kernels.gemv.gemv import CODE_ROWS, MAX_WIDTH, Gemv, GemvCodes
from ..cuda.kernels.launcher import Launcher
from ..cuda.kernels.rowwise.softmax import EACH_ROW, Softmax
from ..cuda.kernels.rowwise.tensor_rows import Rows, TensorRows
from ..cuda.runtime.driver import Device
from ..cuda.runtime.kernel import Launch
from ..errors import DeviceError
from . import _definitions
from ._choices import TileChoices, most_gemv_rows, row_class, time_launches

KINDS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
"""The types of elements that kernels have, in CUDA C++."""
EPILOGUES = {torch.float32: Epilogue.TO_FLOAT, torch.float16: Epilogue.TO_HALF, torch.bfloat16: Epilogue.TO_BFLOAT16}
GEMV_INPUTS = {torch.float16: GemvInput.HALF, torch.bfloat16: GemvInput.BFLOAT16}
"""The types of a single row that the product quantizes itself."""
RowsLaunch = tuple[int, int, Launch | None, tuple[int | float, ...]]
"""How an operation over rows is launched: pitch and columns, the launch (None without rows), its last arguments."""
SCALE_BYTES = 4
SHAPES = 4096
"""Launches of operations over rows that are kept; beyond that, the least recently used is dropped."""
CODE_PAD = 16
"""Rows of codes start at multiples of this many bytes, for TMA."""
WORKSPACE_BYTES = 32 << 20
"""The most memory that :func:`square_linear_` takes."""
LIBRARY_ROWS, LIBRARY_MULTIPLE = 32, 8
"""``torch._int_mm`` needs more than 16 rows, and multiples of 8 elsewhere."""


class DeviceKernels:
    """The kernels of one GPU."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.device = device = Device(index)
        launcher = Launcher(device, 0)
        self.rows = TensorRows(launcher)
        self.softmax = Softmax(launcher)
        self.gemm = ScaledGemm(device)
        self.skinny = SkinnyGemmHopper(device)
        self.most_skinny_rows = self.skinny.max_rows
        self.gemv = Gemv(launcher)
        self.gemv_codes = GemvCodes(launcher)
        self.tiles = TileChoices()

    @functools.cached_property
    def products_verified(self) -> bool:
        """Whether the kernels of int8 products run here, and computed known products exactly. If not, it warns.

        Waits for the device at the first call.
        """
        if not self.gemm.supported:
            return False
        for rows, channels, in_features in SELF_TESTS:
            for dtype in (torch.float16, torch.bfloat16):
                for count in (rows, 5, 1):
                    if not self._is_exact(count, channels, in_features, dtype):
                        warnings.warn(
                            f"GPU {self.index}: a product of {count} x {in_features} by {channels} x {in_features} was "
                            f"wrong; int8 products go through torch._int_mm",
                            RuntimeWarning,
                            stacklevel=2,
                        )
                        return False
        return True

    def _is_exact(self, rows: int, channels: int, in_features: int, dtype: torch.dtype) -> bool:
        generator, place = torch.Generator().manual_seed(rows), torch.device("cuda", self.index)
        x = torch.randn((rows, in_features), generator=generator).to(dtype)
        codes = torch.randint(-128, 128, (channels, in_features), generator=generator).to(torch.int8)
        scale = torch.rand(channels, generator=generator) * 1e-2 + 1e-4
        out = torch.full((rows, channels), math.nan, dtype=dtype, device=place)
        self._dynamic_linear(x.to(place), codes.to(place), scale.to(place), None, out, rows, True)
        return torch.equal(out.cpu(), _definitions.int8_linear(x, codes, scale, None, True))

    def dynamic_linear(
        self, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor, rows: int
    ) -> None:
        """``out = x @ (scale * codes).T + bias`` with each of the ``rows`` of ``x`` quantized; see :meth:`product`."""
        self._dynamic_linear(x, codes, scale, bias, out, rows, self._may_use_products())

    def _dynamic_linear(
        self, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor, rows: int, own: bool
    ) -> None:
        n, k = codes.shape
        pitch = round_up(k, CODE_PAD)
        if own and rows == 1 and k == pitch <= MAX_WIDTH and x.dtype in GEMV_INPUTS and x.is_contiguous():
            source, weight = x.data_ptr(), codes.data_ptr()
            if (source | weight) % 16 == 0:
                self.gemv.launch_tensor(
                    stream_of(self.index),
                    GEMV_INPUTS[x.dtype],
                    source,
                    weight,
                    scale.data_ptr(),
                    _address(bias),
                    out.data_ptr(),
                    n,
                    k,
                )
                return
        scratch = codes.new_empty(rows * (pitch + SCALE_BYTES))
        row_codes = scratch.data_ptr()
        row_scale = row_codes + rows * pitch
        _quantize(x, row_codes, pitch, row_scale)
        self._product(scratch, pitch, row_scale, codes, scale, bias, out, rows, n, k, own)

    def product(
        self, x: Tensor, x_scale: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        """``out = x_scale * (scale * (x @ codes.T)) + bias``, exact up to the scales.

        ``x`` int8 ``[rows, in_features]``, ``codes`` int8 ``[n, in_features]``, scales and bias fp32, ``out``
        ``[rows, n]``; contiguous.
        """
        n, k = codes.shape
        own = self._may_use_products()
        self._product(x, x.shape[1], x_scale.data_ptr(), codes, scale, bias, out, len(x), n, k, own)

    def _product(
        self,
        x: Tensor,
        pitch: int,
        x_scale: int,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        out: Tensor,
        rows: int,
        n: int,
        k: int,
        own: bool,
    ) -> None:
        """The same with the codes of ``rows`` rows at the start of ``x``, ``pitch`` apart; ``own``: by our kernels."""
        stream = stream_of(self.index)
        few, dtype = rows <= self.most_skinny_rows, out.dtype
        if own and k == pitch and k % CODE_PAD == 0 and (few or (dtype is not torch.float32 and n % 8 == 0)):
            rows_at, weight, target = x.data_ptr(), codes.data_ptr(), out.data_ptr()
            weight_scale, offsets = scale.data_ptr(), _address(bias)
            if (rows_at | weight | target) % 16 == 0 and (weight_scale | offsets) % 8 == 0:
                if few:
                    self.skinny.launch(
                        rows_at,
                        x_scale,
                        weight,
                        weight_scale,
                        offsets,
                        target,
                        n,
                        rows,
                        n,
                        k,
                        stream,
                        EPILOGUES[dtype],
                        dependent=False,
                    )
                else:
                    launch = functools.partial(
                        self.gemm.launch,
                        (rows_at, k),
                        x_scale,
                        (weight, k),
                        weight_scale,
                        offsets,
                        (target, n),
                        rows=rows,
                        channels=n,
                        in_features=k,
                        epilogue=EPILOGUES[dtype],
                        stream=stream,
                        dependent=False,
                    )
                    launch(tile_config=self._tile_config(rows, n, k, dtype, launch))
                return
        inner, columns = round_up(k, LIBRARY_MULTIPLE), round_up(n, LIBRARY_MULTIPLE)
        row_codes = x.reshape(-1)[: rows * pitch].view(rows, pitch)[:, :k]
        sums = torch._int_mm(_padded(row_codes, max(rows, LIBRARY_ROWS), inner), _padded(codes, columns, inner).t())
        self.rows.scale_sums(
            stream,
            KINDS[out.dtype],
            True,
            (sums.data_ptr(), columns),
            x_scale,
            scale.data_ptr(),
            _address(bias),
            out.data_ptr(),
            rows,
            n,
        )

    def _tile_config(
        self, rows: int, n: int, k: int, dtype: torch.dtype, launch: Callable[..., None]
    ) -> GemmTileConfig | None:
        """The tiles of a product, measured by ``launch(tile_config=...)`` at the first one of its class of rows.

        None, for the modelled ones, while a graph is captured or the kernels are tested.
        """
        key = row_class(rows), n, k, dtype
        found = self.tiles.known(key)
        if found is None and "products_verified" in self.__dict__ and not torch.cuda.is_current_stream_capturing():
            found = self.tiles.measure(
                key,
                self.gemm.plausible_tiles(rows, n, k, EPILOGUES[dtype]),
                lambda config: time_launches(functools.partial(launch, tile_config=config)),
            )
        return found

    def _may_use_products(self) -> bool:
        """While a graph is captured nothing is tested: kernels that were not tested before are taken untested."""
        verified: bool | None = self.__dict__.get("products_verified")
        if verified is None:
            return self.gemm.supported if torch.cuda.is_current_stream_capturing() else self.products_verified
        return verified


@functools.cache
def _kernels(index: int) -> DeviceKernels:
    return DeviceKernels(index)


class _Thread(threading.local):
    """The GPUs whose contexts have been current in a thread; torch's threads of backward may start without one."""

    def __init__(self) -> None:
        self.ready: set[int] = set()


_thread = _Thread()


def _kernels_at(index: int) -> DeviceKernels:
    own = _kernels(index)
    if index not in _thread.ready:
        own.device.make_current()
        _thread.ready.add(index)
    return own


def kernels_of(x: Tensor) -> DeviceKernels:
    """The kernels of the tensor's GPU, which is the calling thread's current one; see :func:`on_own_device`."""
    return _kernels_at(x.get_device())


def on_own_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with the GPU of its first argument as the current one."""

    @functools.wraps(function)
    def call(x: Tensor, *arguments: Any) -> Any:
        if x.get_device() == torch._C._cuda_getDevice():
            return function(x, *arguments)
        with torch.cuda.device(x.device):
            return function(x, *arguments)

    return call


def stream_of(index: int) -> int:
    """torch's current stream on a GPU, ``cudaStream_t``, for launches of this thread."""
    if index not in _thread.ready:
        _kernels_at(index)
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return stream


def kind_of(dtype: torch.dtype) -> str:
    """The type of a tensor's elements in CUDA C++."""
    kind = KINDS.get(dtype)
    if kind is None:
        raise DeviceError(_refused(dtype))
    return kind


def _refused(dtype: torch.dtype) -> str:
    return f"the kernels take fp32, fp16 and bf16, not {dtype}; convert the tensor with .to()"


def in_rows(x: Tensor) -> tuple[Tensor, Rows, int, int]:
    """``x``, or a copy if its rows are not equally far apart, with its address, pitch, rows and columns."""
    layout = _layout(x.shape, x.stride())
    if layout is None:
        x = x.contiguous()
        layout = _layout(x.shape, x.stride())
        assert layout is not None
    pitch, rows, k = layout
    return x, (x.data_ptr(), pitch), rows, k


@functools.lru_cache(SHAPES)
def _layout(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Pitch, rows and columns of a tensor; None if its rows are not equally far apart, or overlap."""
    *sizes, k = shape
    rows = math.prod(sizes) if k else 0
    lead = [(size, stride) for size, stride in zip(sizes, strides[:-1], strict=True) if size != 1]
    if rows <= 1 or not lead:
        return (k, rows, k) if k <= 1 or not rows or strides[-1] == 1 else None
    pitch = expected = lead[-1][1]
    for size, stride in reversed(lead):
        if stride != expected:
            return None
        expected = stride * size
    return (pitch, rows, k) if pitch >= k and (k == 1 or strides[-1] == 1) else None


def whole(k: int, itemsize: int, *pairs: Rows) -> bool:
    """Whether rows of ``k`` elements of ``itemsize`` bytes can be read in vectors of eight."""
    if k % 8:
        return False
    bits = 0
    for address, pitch in pairs:
        bits |= address | pitch * itemsize
    return bits % 16 == 0


def _empty_like(x: Tensor, contiguous: bool) -> Tensor:
    """A contiguous tensor like ``x``, which says whether it is. To ask for it takes the host longer than all else."""
    return torch.empty_like(x) if contiguous else torch.empty_like(x, memory_format=torch.contiguous_format)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """``x`` as a contiguous ``[rows, columns]`` with zeros behind it; a copy unless it is that already."""
    if x.shape == (rows, columns) and x.is_contiguous():
        return x
    return torch.nn.functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))


def _fp32(x: Tensor) -> Tensor:
    if x.dtype == torch.float32 and x.is_contiguous():
        return x
    return x.to(torch.float32).contiguous()


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


# -- softmax -----------------------------------------------------------------------------------------------------------

NO_ROWS = (0, 0, *EACH_ROW)
"""The address, pitch and ``BroadcastRows`` of a bias or a mask that there is not."""
NO_BIAS_OR_MASK, EACH_BIAS_AND_MASK = (0, 0, 0, 0), (*EACH_ROW, *EACH_ROW)
"""The kernel's arguments for both, before and behind those of the result."""


def softmax(x: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    """``softmax(scale * x + bias)`` where ``mask`` is set."""
    return _softmax(x, scale, bias, mask, False)


def softmax_(x: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None) -> None:
    """The same over ``x``."""
    _softmax(x, scale, bias, mask, True)


def _softmax(x: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None, in_place: bool) -> Tensor:
    """The same over ``x`` if ``in_place``, else in new memory."""
    index, source = x.get_device(), x.data_ptr()
    before, behind, aligned = NO_BIAS_OR_MASK, EACH_BIAS_AND_MASK, source % 16 == 0
    if bias is not None or mask is not None:
        bias, bias_rows = (None, NO_ROWS) if bias is None else _broadcast(_fp32(bias), x.shape)
        mask, mask_rows = (None, NO_ROWS) if mask is None else _broadcast(mask, x.shape)
        aligned = aligned and whole(0, 4, bias_rows[:2]) and (mask_rows[0] | mask_rows[1]) % 8 == 0
        before, behind = (*bias_rows[:2], *mask_rows[:2]), (*bias_rows[2:], *mask_rows[2:])
    found = _softmax_launch(index, stream_of(index), x.dtype, x.shape, x.stride(), aligned)
    if found is None:
        y = _softmax(x.contiguous(), scale, bias, mask, True)
        return x.copy_(y) if in_place else y
    pitch, k, launch, sizes = found
    out = x if in_place else _empty_like(x, pitch == k)
    if launch is not None:
        launch((source, pitch, scale, *before, out.data_ptr(), pitch if in_place else k, *behind, *sizes))
    return out


@functools.lru_cache(SHAPES)
def _softmax_launch(
    index: int, stream: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], aligned: bool
) -> RowsLaunch | None:
    """What a softmax needs to know of its shape; None if it needs a copy, because rows are not equally far apart.

    ``aligned``: all addresses are multiples of what vectors need, as those of new memory are.
    """
    kind, layout = kind_of(dtype), _layout(shape, strides)
    if layout is None:
        return None
    pitch, rows, k = layout
    if not rows:
        return pitch, k, None, ()
    plan = _kernels_at(index).softmax.plan(kind, aligned and whole(k, dtype.itemsize, (0, pitch)), rows, k)
    return pitch, k, plan.kernel.configured(plan.grid, plan.block, 0, stream, False, plan.cluster), plan.sizes


def _broadcast(values: Tensor, shape: torch.Size) -> tuple[Tensor, tuple[int, int, int, int]]:
    """A bias or mask for scores of ``shape``: its address, pitch, and the kernel's ``BroadcastRows``.

    It is read where it is if its leading dimensions are one block of the scores' (``[keys]``, ``[queries, keys]``,
    ``[batch, 1, 1, keys]``), else expanded in a copy.
    """
    k = shape[-1]
    if values.shape[-1] != k:
        values = values.expand(*values.shape[:-1], k)
    sizes = (1,) * (len(shape) - values.dim()) + tuple(values.shape[:-1])
    lead = [(own, all_) for own, all_ in zip(sizes, shape[:-1], strict=True) if all_ != 1]
    present = [i for i, (own, _) in enumerate(lead) if own != 1]
    values = values.contiguous()
    if not present:
        return values, (values.data_ptr(), 0, *EACH_ROW)
    first, last = present[0], present[-1]
    if len(present) != last - first + 1:
        values = values.expand(shape).contiguous()
        return values, (values.data_ptr(), k, *EACH_ROW)
    if len(present) == len(lead):
        return values, (values.data_ptr(), k, *EACH_ROW)
    repeat = math.prod(size for _, size in lead[last + 1 :])
    return values, (values.data_ptr(), k, repeat, math.prod(size for _, size in lead[first : last + 1]))


def softmax_backward(y: Tensor, dy: Tensor, scale: float) -> Tensor:
    """The gradient of a softmax's input."""
    kind, own = kind_of(y.dtype), kernels_of(y)
    dx = _empty_like(y, y.is_contiguous())
    y, y_rows, rows, k = in_rows(y)
    dy, dy_rows, _, _ = in_rows(dy)
    if rows:
        target = dx.data_ptr(), k
        vectors = whole(k, y.itemsize, y_rows, dy_rows, target)
        own.rows.softmax_backward(stream_of(own.index), kind, vectors, y_rows, dy_rows, scale, target, rows, k)
    return dx


# -- norms -------------------------------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool) -> Tensor:
    """A norm."""
    return _norm(x, weight, bias, eps, center, False, ())


def norm_(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool) -> None:
    """The same over ``x``."""
    _norm(x, weight, bias, eps, center, True, ())


def norm_with_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """A norm, and its means (none without ``center``) and inverse deviations."""
    mean, inverse = _statistics(x, center)
    statistics = mean.data_ptr() if center else 0, inverse.data_ptr()
    return _norm(x, weight, bias, eps, center, False, statistics), mean, inverse


def norm_with_statistics_(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool
) -> tuple[Tensor, Tensor]:
    """The same over ``x``."""
    mean, inverse = _statistics(x, center)
    _norm(x, weight, bias, eps, center, True, (mean.data_ptr() if center else 0, inverse.data_ptr()))
    return mean, inverse


def _statistics(x: Tensor, center: bool) -> tuple[Tensor, Tensor]:
    """Memory for the means and inverse deviations of rows."""
    mean = torch.empty(x.shape[:-1] if center else (0,), dtype=torch.float32, device=x.device)
    return mean, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    in_place: bool,
    statistics: tuple[int, ...],
) -> Tensor:
    """A norm over ``x`` if ``in_place``, else in new memory. ``statistics``: addresses for two, or none."""
    index, source = x.get_device(), x.data_ptr()
    weight_dtype = bias_dtype = None
    weight_at = bias_at = 0
    if weight is not None:
        weight = weight.contiguous()
        weight_at, weight_dtype = weight.data_ptr(), weight.dtype
    if bias is not None:
        bias = bias.contiguous()
        bias_at, bias_dtype = bias.data_ptr(), bias.dtype
    aligned = (source | weight_at | bias_at) % 16 == 0
    found = _norm_launch(
        index, stream_of(index), x.dtype, x.shape, x.stride(), weight_dtype, bias_dtype, center, aligned, not statistics
    )
    if found is None:
        y = _norm(x.contiguous(), weight, bias, eps, center, True, statistics)
        return x.copy_(y) if in_place else y
    pitch, k, launch, sizes = found
    out = x if in_place else _empty_like(x, pitch == k)
    if launch is not None:
        out_pitch = pitch if in_place else k
        launch((source, pitch, weight_at, bias_at, eps, out.data_ptr(), out_pitch, *statistics, *sizes))
    return out


@functools.lru_cache(SHAPES)
def _norm_launch(
    index: int,
    stream: int,
    dtype: torch.dtype,
    shape: torch.Size,
    strides: tuple[int, ...],
    weight: torch.dtype | None,
    bias: torch.dtype | None,
    center: bool,
    aligned: bool,
    alone: bool,
) -> RowsLaunch | None:
    """As :func:`_softmax_launch`, for a norm; ``alone``: without statistics."""
    types, layout = _types(dtype, weight, bias), _layout(shape, strides)
    if layout is None:
        return None
    pitch, rows, k = layout
    if not rows:
        return pitch, k, None, ()
    vectors, parameters = aligned and whole(k, dtype.itemsize, (0, pitch)), (weight is not None, bias is not None)
    find = _kernels_at(index).rows.norm_launch
    kernel, grid, block, shared, sizes = find(types, center, vectors, rows, k, *parameters, alone)
    return pitch, k, kernel.configured(grid, block, shared, stream), sizes


@functools.cache
def _types(dtype: torch.dtype, weight: torch.dtype | None, bias: torch.dtype | None) -> str:
    """The template arguments for the types of a norm's input and of its parameters."""
    kinds = {kind for kind in (weight, bias) if kind is not None} or {dtype}
    if dtype not in KINDS:
        raise DeviceError(_refused(dtype))
    if len(kinds) > 1 or not kinds <= {dtype, torch.float32}:
        found = ", ".join(sorted(str(kind) for kind in kinds))
        raise DeviceError(f"a norm of {dtype} takes a weight and a bias of {dtype} or both of float32, not {found}")
    return f"{KINDS[dtype]}, {KINDS[kinds.pop()]}"


def _parameters(
    weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None, tuple[int, int], bool]:
    """Contiguous weight and bias, their addresses, and whether these are aligned for vectors."""
    weight, bias = None if weight is None else weight.contiguous(), None if bias is None else bias.contiguous()
    addresses = _address(weight), _address(bias)
    return weight, bias, addresses, (addresses[0] | addresses[1]) % 16 == 0


def norm_backward(
    dy: Tensor,
    x: Tensor,
    from_output: bool,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    center: bool,
    parameters: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a norm's input, weight and bias; empty without ``parameters``, or without a bias."""
    own, has_bias = kernels_of(x), bias is not None
    types = _types(x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype)
    dx = _empty_like(x, x.is_contiguous())
    x, x_rows, rows, k = in_rows(x)
    dy, dy_rows, _, _ = in_rows(dy)
    kind = x.dtype if weight is None else weight.dtype
    if not rows:
        zeros = torch.zeros(k if parameters else 0, dtype=kind, device=x.device)
        return dx, zeros, torch.zeros_like(zeros[: k if has_bias else 0])
    weight, bias, addresses, vectors = _parameters(weight, bias)
    target = dx.data_ptr(), k
    vectors = vectors and whole(k, x.itemsize, x_rows, dy_rows, target)
    stream, means = stream_of(own.index), mean.data_ptr() if center else 0
    own.rows.norm_backward(
        stream,
        types,
        center,
        vectors,
        dy_rows,
        x_rows,
        from_output,
        *addresses,
        means,
        inverse.data_ptr(),
        target,
        rows,
        k,
    )
    if not parameters:
        return dx, dx.new_empty(0, dtype=kind), dx.new_empty(0, dtype=kind)
    parts = own.rows.parameter_parts(rows, k)
    sums = [x.new_empty(parts, k, dtype=torch.float32) for _ in range(1 + has_bias)]
    own.rows.norm_parameter_gradients(
        stream,
        types,
        center,
        vectors,
        dy_rows,
        x_rows,
        from_output,
        *addresses,
        means,
        inverse.data_ptr(),
        sums[0].data_ptr(),
        sums[1].data_ptr() if has_bias else 0,
        parts,
        rows,
        k,
    )
    dweight, *dbias = (part.sum(0).to(kind) for part in sums)
    return dx, dweight, dbias[0] if has_bias else dx.new_empty(0, dtype=kind)


# -- int8 --------------------------------------------------------------------------------------------------------------


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales."""
    index, source = x.get_device(), x.data_ptr()
    found = _quantize_launch(index, stream_of(index), x.dtype, x.shape, x.stride(), source % 16 == 0)
    if found is None:
        return quantize_rows(x.contiguous())
    pitch, k, launch, sizes, lead = found
    new_codes, new_scales = _factories(index)
    codes = new_codes(*lead, k)  # sizes one by one take the host half as long as a tuple
    scale = new_scales(*lead) if lead else new_scales(())
    if launch is not None:
        launch((source, pitch, codes.data_ptr(), k, scale.data_ptr(), *sizes))
    return codes, scale


@functools.cache
def _factories(index: int) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """``new_empty`` of an int8 and of an fp32 tensor on a GPU: faster for the host than naming a dtype and a device."""
    place = torch.device("cuda", index)
    codes, scales = (torch.empty(0, dtype=dtype, device=place) for dtype in (torch.int8, torch.float32))
    return codes.new_empty, scales.new_empty


def _quantize(x: Tensor, codes: int, codes_pitch: int, scale: int) -> None:
    """The codes of the rows of ``x``, ``codes_pitch`` apart, and their scales, at addresses."""
    index, source = x.get_device(), x.data_ptr()
    found = _quantize_launch(index, stream_of(index), x.dtype, x.shape, x.stride(), source % 16 == 0)
    if found is None:
        _quantize(x.contiguous(), codes, codes_pitch, scale)
        return
    pitch, _, launch, sizes, _ = found
    if launch is not None:
        launch((source, pitch, codes, codes_pitch, scale, *sizes))


@functools.lru_cache(SHAPES)
def _quantize_launch(
    index: int, stream: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], aligned: bool
) -> tuple[int, int, Launch | None, tuple[int, ...], tuple[int, ...]] | None:
    """As :func:`_softmax_launch`, for quantization, with the scales' shape at the end."""
    if not shape:
        raise ValueError(_definitions.NO_ROWS)  # here it takes the host no time: launches are kept
    kind, layout = kind_of(dtype), _layout(shape, strides)
    if layout is None:
        return None
    pitch, rows, k = layout
    lead = tuple(shape[:-1])
    if not rows:
        return pitch, k, None, (), lead
    vectors = aligned and whole(k, dtype.itemsize, (0, pitch))
    kernel, grid, block, sizes = _kernels_at(index).rows.quantize_launch(kind, vectors, rows, k)
    return pitch, k, kernel.configured(grid, block, 0, stream), sizes, lead


def int8_dot(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``a_scale * (b_scale * (a @ b.T))`` of codes."""
    out = torch.empty((a.shape[0], b.shape[0]), dtype=dtype, device=a.device)
    kind_of(out.dtype)
    if out.numel():
        kernels_of(a).product(a.contiguous(), _fp32(a_scale), b.contiguous(), _fp32(b_scale), None, out)
    return out


def int8_linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    """``x @ (scale * codes).T + bias``, with ``x`` quantized per row if ``dynamic``."""
    kind_of(x.dtype)  # refuses other types
    own, (n, k), (*lead, _) = kernels_of(x), codes.shape, x.shape
    out = x.new_empty(*lead, n)
    elements = out.numel()
    if not elements:
        return out
    rows, factors, offsets = elements // n, _fp32(scale), None if bias is None else _fp32(bias)
    if not codes.is_contiguous():
        codes = codes.contiguous()
    if dynamic:
        own.dynamic_linear(x, codes, factors, offsets, out, rows)
        return out
    flat, few = x.reshape(rows, k), rows <= most_gemv_rows(own.device.name, x.dtype, n * k)
    if not (few and gemv_linear(flat, codes, factors, offsets, out)):
        dequantized_linear(flat, codes, factors, offsets, out)
    return out


def gemv_linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor) -> bool:
    """``out = x @ (scale * codes).T + bias``, a few rows at a time; False, and nothing done, if no kernel can.

    A row's sums are in one order, whatever is multiplied with it.
    """
    own, (n, k), x = kernels_of(x), codes.shape, x.contiguous()
    rows, source, target = len(x), x.data_ptr(), out.data_ptr()
    step = min(rows, CODE_ROWS[-1])
    if not own.gemv_codes.supports(step, k, x.itemsize) or (source | codes.data_ptr()) % 16:
        return False
    for first in range(0, rows, step):
        own.gemv_codes.launch(
            stream_of(own.index),
            KINDS[x.dtype],
            source + first * k * x.itemsize,
            codes.data_ptr(),
            scale.data_ptr(),
            _address(bias),
            target + first * n * x.itemsize,
            min(step, rows - first),
            n,
            k,
            x.itemsize,
        )
    return True


def dequantized_linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """The same by cuBLAS, with the codes in the type of ``x``."""
    own, (n, k), kind, stream = kernels_of(x), codes.shape, KINDS[x.dtype], stream_of(x.get_device())
    weight = x.new_empty((n, k))
    own.rows.dequantize_codes(stream, kind, codes.data_ptr(), 0, weight.data_ptr(), n, k)
    sums = x @ weight.t() if x.dtype == torch.float32 else torch.mm(x, weight.t(), out_dtype=torch.float32)
    own.rows.scale_sums(
        stream, kind, False, (sums.data_ptr(), n), 0, scale.data_ptr(), _address(bias), out.data_ptr(), len(x), n
    )


def int8_linear_backward(dy: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """``dy @ (scale * codes)``, with the weight rounded to the type of ``dy``."""
    kind, own, (n, k) = kind_of(dy.dtype), kernels_of(dy), codes.shape
    codes, factors, weight = codes.contiguous(), _fp32(scale), dy.new_empty((n, k))
    own.rows.dequantize_codes(stream_of(own.index), kind, codes.data_ptr(), factors.data_ptr(), weight.data_ptr(), n, k)
    return (dy.reshape(-1, n) @ weight).view(*dy.shape[:-1], k)


# -- in place ----------------------------------------------------------------------------------------------------------


def square_linear_(x: Tensor, w: Tensor, transpose: bool) -> None:
    """``x @ w.T``, or ``x @ w``, over ``x``, through a workspace of at most :data:`WORKSPACE_BYTES`."""
    kind_of(x.dtype)
    n = x.shape[-1]
    if not x.numel():
        return
    rows, factor = x.reshape(-1, n), w.t() if transpose else w
    step = max(1, WORKSPACE_BYTES // (n * x.itemsize))
    for block in (rows,) if len(rows) <= step else rows.split(step):
        block.copy_(torch.mm(block, factor))  # the allocator gives each product the memory of the one before
    if rows.data_ptr() != x.data_ptr():
        x.copy_(rows.view(x.shape))
