"""Fixtures for tests of the GPU's own parts, below the backend."""

from __future__ import annotations

import pytest

from bminf_lite.cuda.runtime import compiler
from bminf_lite.cuda.runtime.driver import Device
from bminf_lite.errors import DeviceError


@pytest.fixture(scope="session")
def device() -> Device:
    """GPU 0 as the driver sees it."""
    return Device(0)


@pytest.fixture(scope="session")
def matmul_context(device, tmp_path_factory):
    """cublasLt on GPU 0, with a store of algorithms of its own."""
    import cupy

    from bminf_lite.cuda.kernels.gemm.cublaslt_matmul import MatmulContext

    return MatmulContext.open(device, cupy.cuda.alloc, tmp_path_factory.mktemp("algorithms"))


@pytest.fixture(scope="session")
def nvrtc() -> None:
    """Skips where kernels cannot be compiled: no NVRTC, or no CUDA headers."""
    try:
        compiler.nvrtc()
        compiler._header_folder()
    except DeviceError as error:
        pytest.skip(str(error))
