"""cublasLt's types: they refuse a wrong handle, know every attribute's size, and have the values of the C headers."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from bminf_lite.cuda.runtime import cublaslt, libraries
from bminf_lite.cuda.runtime.bindings import LibraryError
from bminf_lite.cuda.runtime.cublaslt import (
    NO_SPLIT_K,
    REDUCE_IN_COMPUTE_TYPE,
    ComputeType,
    CublasLt,
    DataType,
    LayoutAttribute,
    MatmulAttribute,
    MatmulDesc,
    MatrixLayout,
    Operation,
    Order,
    Preference,
    PreferenceAttribute,
    Status,
    TransformAttribute,
    TransformDesc,
)
from bminf_lite.errors import DeviceError


@pytest.fixture(scope="module")
def lt() -> CublasLt:
    try:
        return CublasLt(libraries.load("cublasLt").dll)
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def header() -> dict[str, int]:
    """Every enumerator that ``cublasLt.h`` and the headers beside it give a value."""
    runtime = list(libraries.header_folders())
    cublas = [*runtime, *(Path(str(folder).replace("cuda_runtime", "cublas")) for folder in runtime)]
    wanted = {"cublasLt.h": cublas, "cublas_api.h": cublas, "library_types.h": runtime}
    found = [next((f / name for f in folders if (f / name).is_file()), None) for name, folders in wanted.items()]
    if all(found):
        text = "".join(path.read_text() for path in found if path)
        return {name: int(value) for name, value in re.findall(r"^\s*(CU\w+)\s*=\s*(\d+)\s*,?", text, re.M)}
    pytest.skip("cublasLt.h is not installed")


@pytest.mark.parametrize(
    ("enum", "prefix"),
    [
        (Status, "CUBLAS_STATUS_"),
        (ComputeType, "CUBLAS_"),
        (DataType, "CUDA_"),
        (Operation, "CUBLAS_OP_"),
        (Order, "CUBLASLT_ORDER_"),
        (LayoutAttribute, "CUBLASLT_MATRIX_LAYOUT_"),
        (MatmulAttribute, "CUBLASLT_MATMUL_DESC_"),
        (PreferenceAttribute, "CUBLASLT_MATMUL_PREF_"),
    ],
)
def test_enum_values_are_those_of_the_headers(header, enum, prefix):
    assert {member.name: header[prefix + member.name] for member in enum} == {m.name: m.value for m in enum}


def test_structure_sizes_are_those_of_the_header():
    assert ctypes.sizeof(cublaslt.Algorithm) == 64
    assert ctypes.sizeof(cublaslt.HeuristicResult) == 64 + 8 + 4 + 4 + 16


def test_every_attribute_is_read_back_as_it_was_set(lt):
    layout = MatrixLayout(lt, DataType.R_8I, Order.COL32, 33, 64, 33 * 32)
    layout[LayoutAttribute.BATCH_COUNT] = 5
    layout[LayoutAttribute.STRIDED_BATCH_OFFSET] = 1 << 40
    expected = [DataType.R_8I, Order.COL32, 33, 64, 33 * 32, 5, 1 << 40]
    assert [layout[attribute] for attribute in LayoutAttribute] == expected

    desc = MatmulDesc(lt, ComputeType.COMPUTE_32I, DataType.R_32I, Operation.T, Operation.N)
    assert desc[MatmulAttribute.COMPUTE_TYPE] == ComputeType.COMPUTE_32I
    assert desc[MatmulAttribute.SCALE_TYPE] == DataType.R_32I
    assert (desc[MatmulAttribute.TRANSA], desc[MatmulAttribute.TRANSB]) == (Operation.T, Operation.N)

    preference = Preference(lt, 3 << 32, 16)
    assert preference[PreferenceAttribute.MAX_WORKSPACE_BYTES] == 3 << 32
    assert preference[PreferenceAttribute.MIN_ALIGNMENT_D_BYTES] == 16
    assert preference[PreferenceAttribute.REDUCTION_SCHEME_MASK] == REDUCE_IN_COMPUTE_TYPE
    assert Preference(lt, 1, 16, split_k=False)[PreferenceAttribute.REDUCTION_SCHEME_MASK] == NO_SPLIT_K

    transform = TransformDesc(lt, DataType.R_32F)
    for attribute in TransformAttribute:
        transform[attribute] = transform[attribute]


def test_a_failure_says_which_function_and_which_status(lt):
    layout = MatrixLayout(lt, DataType.R_8I, Order.ROW, 1, 1, 1)
    expected = r"cublasLtMatrixLayoutSetAttribute .*CUBLAS_STATUS_INVALID_VALUE.* 7"
    with pytest.raises(LibraryError, match=expected) as info:
        lt.functions.cublasLtMatrixLayoutSetAttribute(layout.handle, LayoutAttribute.ORDER, None, 0)
    assert info.value.status == Status.INVALID_VALUE
    assert cublaslt._describe(99) == "unknown status"


def test_a_handle_of_another_type_is_refused(lt):
    layout = MatrixLayout(lt, DataType.R_8I, Order.ROW, 1, 1, 1)
    with pytest.raises(ctypes.ArgumentError):
        lt.functions.cublasLtMatmulDescDestroy(layout.handle)


def test_a_library_that_lacks_functions_is_refused_with_their_names():
    with pytest.raises(DeviceError, match="lacks cublasLtCreate, "):
        CublasLt(ctypes.CDLL("libc.so.6"))
