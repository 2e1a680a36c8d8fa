"""cublasLt's C interface with types: each handle has a type of its own, and enumerations are ``IntEnum``.

:class:`CublasLt` wraps a loaded library. Its functions are called by their C names, take exactly the declared types (a
matrix layout in place of a matmul descriptor is an error), and raise :class:`.bindings.LibraryError` with the name of
the status if they fail. A descriptor class owns the cublasLt object that it creates and knows the C type of every
attribute. Names and values are those of ``cublasLt.h``, ``cublas_api.h`` and ``library_types.h``. No GPU is needed
until :class:`CublasLt` creates its handle.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Mapping
from ctypes import POINTER, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from typing import Any, ClassVar

from .bindings import bind


class Status(IntEnum):
    """``cublasStatus_t``."""

    SUCCESS = 0
    NOT_INITIALIZED = 1
    ALLOC_FAILED = 3
    INVALID_VALUE = 7
    ARCH_MISMATCH = 8
    MAPPING_ERROR = 11
    EXECUTION_FAILED = 13
    INTERNAL_ERROR = 14
    NOT_SUPPORTED = 15
    LICENSE_ERROR = 16


class ComputeType(IntEnum):
    """``cublasComputeType_t``: the type in which a product is accumulated."""

    COMPUTE_32F = 68
    COMPUTE_32I = 72


class DataType(IntEnum):
    """``cudaDataType_t``: the type of one matrix element, or of alpha and beta."""

    R_32F = 0
    R_16F = 2
    R_8I = 3
    R_32I = 10
    R_16BF = 14

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return {DataType.R_8I: 1, DataType.R_16F: 2, DataType.R_16BF: 2}.get(self, 4)


class Operation(IntEnum):
    """``cublasOperation_t``."""

    N = 0
    T = 1


class Order(IntEnum):
    """``cublasLtOrder_t``: the order of a matrix's elements; ``gemm.tensor_core_layouts`` defines the last three."""

    COL = 0
    ROW = 1
    COL32 = 2
    COL4_4R2_8C = 3
    COL32_2R_4R4 = 4


class LayoutAttribute(IntEnum):
    """``cublasLtMatrixLayoutAttribute_t``."""

    TYPE = 0
    ORDER = 1
    ROWS = 2
    COLS = 3
    LD = 4
    BATCH_COUNT = 5
    STRIDED_BATCH_OFFSET = 6


class MatmulAttribute(IntEnum):
    """``cublasLtMatmulDescAttributes_t``."""

    COMPUTE_TYPE = 0
    SCALE_TYPE = 1
    POINTER_MODE = 2
    TRANSA = 3
    TRANSB = 4


class PreferenceAttribute(IntEnum):
    """``cublasLtMatmulPreferenceAttributes_t``."""

    MAX_WORKSPACE_BYTES = 1
    REDUCTION_SCHEME_MASK = 3
    MIN_ALIGNMENT_A_BYTES = 5
    MIN_ALIGNMENT_B_BYTES = 6
    MIN_ALIGNMENT_C_BYTES = 7
    MIN_ALIGNMENT_D_BYTES = 8


NO_SPLIT_K, REDUCE_IN_COMPUTE_TYPE = 0, 2
"""Masks of reduction schemes: ``CUBLASLT_REDUCTION_SCHEME_NONE`` and ``CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE``."""


class TransformAttribute(IntEnum):
    """``cublasLtMatrixTransformDescAttributes_t``."""

    SCALE_TYPE = 0
    POINTER_MODE = 1
    TRANSA = 2
    TRANSB = 3


class Handle(c_void_p):
    """``cublasLtHandle_t``."""


class MatrixLayoutHandle(c_void_p):
    """``cublasLtMatrixLayout_t``."""


class MatmulDescHandle(c_void_p):
    """``cublasLtMatmulDesc_t``."""


class PreferenceHandle(c_void_p):
    """``cublasLtMatmulPreference_t``."""


class TransformDescHandle(c_void_p):
    """``cublasLtMatrixTransformDesc_t``."""


class Stream(c_void_p):
    """``cudaStream_t``."""


class Algorithm(ctypes.Structure):
    """``cublasLtMatmulAlgo_t``: its bytes stay valid for the same cublasLt version and GPU."""

    _fields_: ClassVar = [("data", c_uint64 * 8)]


class HeuristicResult(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``: an algorithm, the bytes of workspace it needs, and whether it is usable."""

    _fields_: ClassVar = [
        ("algorithm", Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves_count", ctypes.c_float),
        ("reserved", c_int * 4),
    ]


_LAYOUT, _ALGORITHM, _SETTER = MatrixLayoutHandle, POINTER(Algorithm), (c_int, c_void_p, c_size_t)
_GETTER = (*_SETTER, POINTER(c_size_t))
_FUNCTIONS: Mapping[str, tuple[Any, ...]] = {
    "cublasLtCreate": (POINTER(Handle),),
    "cublasLtDestroy": (Handle,),
    "cublasLtMatrixLayoutCreate": (POINTER(_LAYOUT), c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatrixLayoutDestroy": (_LAYOUT,),
    "cublasLtMatrixLayoutSetAttribute": (_LAYOUT, *_SETTER),
    "cublasLtMatrixLayoutGetAttribute": (_LAYOUT, *_GETTER),
    "cublasLtMatmulDescCreate": (POINTER(MatmulDescHandle), c_int, c_int),
    "cublasLtMatmulDescDestroy": (MatmulDescHandle,),
    "cublasLtMatmulDescSetAttribute": (MatmulDescHandle, *_SETTER),
    "cublasLtMatmulDescGetAttribute": (MatmulDescHandle, *_GETTER),
    "cublasLtMatmulPreferenceCreate": (POINTER(PreferenceHandle),),
    "cublasLtMatmulPreferenceDestroy": (PreferenceHandle,),
    "cublasLtMatmulPreferenceSetAttribute": (PreferenceHandle, *_SETTER),
    "cublasLtMatmulPreferenceGetAttribute": (PreferenceHandle, *_GETTER),
    "cublasLtMatrixTransformDescCreate": (POINTER(TransformDescHandle), c_int),
    "cublasLtMatrixTransformDescDestroy": (TransformDescHandle,),
    "cublasLtMatrixTransformDescSetAttribute": (TransformDescHandle, *_SETTER),
    "cublasLtMatrixTransformDescGetAttribute": (TransformDescHandle, *_GETTER),
    "cublasLtMatmulAlgoGetHeuristic": (
        Handle,
        MatmulDescHandle,
        _LAYOUT,
        _LAYOUT,
        _LAYOUT,
        _LAYOUT,
        PreferenceHandle,
        c_int,
        POINTER(HeuristicResult),
        POINTER(c_int),
    ),
    "cublasLtMatmulAlgoCheck": (
        Handle,
        MatmulDescHandle,
        _LAYOUT,
        _LAYOUT,
        _LAYOUT,
        _LAYOUT,
        _ALGORITHM,
        POINTER(HeuristicResult),
    ),
    "cublasLtMatmul": (
        Handle,
        MatmulDescHandle,
        c_void_p,
        c_void_p,
        _LAYOUT,
        c_void_p,
        _LAYOUT,
        c_void_p,
        c_void_p,
        _LAYOUT,
        c_void_p,
        _LAYOUT,
        _ALGORITHM,
        c_void_p,
        c_size_t,
        Stream,
    ),
    "cublasLtMatrixTransform": (
        Handle,
        TransformDescHandle,
        c_void_p,
        c_void_p,
        _LAYOUT,
        c_void_p,
        c_void_p,
        _LAYOUT,
        c_void_p,
        _LAYOUT,
        Stream,
    ),
}


def _describe(status: int) -> str:
    return f"CUBLAS_STATUS_{Status(status).name}" if status in Status._value2member_map_ else "unknown status"


def _destroy_with(owner: object, destroy: Any, handle: c_void_p) -> None:
    # Not at the interpreter's exit: the driver may be unloaded, and the process frees all.
    weakref.finalize(owner, destroy, handle).atexit = False


class CublasLt:
    """A loaded cublasLt: ``functions`` has its C functions by name, and the first use of ``handle`` creates it."""

    def __init__(self, dll: ctypes.CDLL) -> None:
        """Declare every function of ``dll``; raises ``DeviceError`` with the names of those that it lacks."""
        self.functions = bind(dll, _FUNCTIONS, _describe)
        dll.cublasLtGetVersion.argtypes, dll.cublasLtGetVersion.restype = (), c_size_t
        self.version: int = dll.cublasLtGetVersion()

    @functools.cached_property
    def handle(self) -> Handle:
        """The library's handle on the current device; creating it needs a GPU."""
        handle = Handle()
        self.functions.cublasLtCreate(handle)
        _destroy_with(self, self.functions.cublasLtDestroy, handle)
        return handle


class _Descriptor:
    """Owns one cublasLt object; ``types`` gives the C type of each attribute that may be set or read."""

    prefix: ClassVar[str]
    types: ClassVar[Mapping[IntEnum, Any]]

    def __init__(self, lt: CublasLt, handle: Any, *arguments: int) -> None:
        self._functions, self.handle = lt.functions, handle
        self._function("Create")(handle, *arguments)
        _destroy_with(self, self._function("Destroy"), handle)

    def _function(self, verb: str) -> Any:
        return getattr(self._functions, self.prefix + verb)

    def __setitem__(self, attribute: IntEnum, value: int) -> None:
        content = self.types[attribute](value)
        self._function("SetAttribute")(self.handle, attribute, ctypes.byref(content), ctypes.sizeof(content))

    def __getitem__(self, attribute: IntEnum) -> int:
        content, written = self.types[attribute](), c_size_t()
        size = ctypes.sizeof(content)
        self._function("GetAttribute")(self.handle, attribute, ctypes.byref(content), size, written)
        return int(content.value)


class MatrixLayout(_Descriptor):
    """The shape and order of one matrix; ``ld`` counts the elements between its columns, rows or groups."""

    prefix = "cublasLtMatrixLayout"
    types: ClassVar = {
        LayoutAttribute.TYPE: c_uint32,
        LayoutAttribute.ORDER: c_int32,
        LayoutAttribute.ROWS: c_uint64,
        LayoutAttribute.COLS: c_uint64,
        LayoutAttribute.LD: c_int64,
        LayoutAttribute.BATCH_COUNT: c_int32,
        LayoutAttribute.STRIDED_BATCH_OFFSET: c_int64,
    }

    def __init__(self, lt: CublasLt, dtype: DataType, order: Order, rows: int, cols: int, ld: int) -> None:
        super().__init__(lt, MatrixLayoutHandle(), dtype, rows, cols, ld)
        self[LayoutAttribute.ORDER] = order


class MatmulDesc(_Descriptor):
    """The operation ``D = alpha op(A) op(B) + beta C``."""

    prefix = "cublasLtMatmulDesc"
    types: ClassVar = dict.fromkeys(MatmulAttribute, c_int32)

    def __init__(
        self, lt: CublasLt, compute: ComputeType, scale: DataType, transpose_a: Operation, transpose_b: Operation
    ) -> None:
        super().__init__(lt, MatmulDescHandle(), compute, scale)
        self[MatmulAttribute.TRANSA] = transpose_a
        self[MatmulAttribute.TRANSB] = transpose_b


class Preference(_Descriptor):
    """Limits for the heuristic: a workspace in bytes, and the alignment in bytes of all four matrices.

    With ``split_k`` a kernel may cut sums into parts. These are kept in the compute type, never in a narrower output
    type.
    """

    prefix = "cublasLtMatmulPreference"
    types: ClassVar = {
        attribute: c_uint64 if attribute is PreferenceAttribute.MAX_WORKSPACE_BYTES else c_uint32
        for attribute in PreferenceAttribute
    }

    def __init__(self, lt: CublasLt, workspace_bytes: int, alignment: int, split_k: bool = True) -> None:
        super().__init__(lt, PreferenceHandle())
        self[PreferenceAttribute.MAX_WORKSPACE_BYTES] = workspace_bytes
        self[PreferenceAttribute.REDUCTION_SCHEME_MASK] = REDUCE_IN_COMPUTE_TYPE if split_k else NO_SPLIT_K
        for attribute in PreferenceAttribute:
            if attribute.name.startswith("MIN_ALIGNMENT"):
                self[attribute] = alignment


class TransformDesc(_Descriptor):
    """The operation ``C = alpha op(A) + beta op(B)``, which also converts a matrix from one order to another."""

    prefix = "cublasLtMatrixTransformDesc"
    types: ClassVar = dict.fromkeys(TransformAttribute, c_int32)

    def __init__(self, lt: CublasLt, scale: DataType) -> None:
        super().__init__(lt, TransformDescHandle(), scale)
