"""Fixtures for tests of the GPU's own parts, below the backend."""

from __future__ import annotations

import pytest

from bminf_lite.cuda.runtime import compiler
from bminf_lite.errors import DeviceError


@pytest.fixture(scope="session")
def device():
    """GPU 0 as the driver sees it; skips where CuPy or a usable GPU is missing."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from bminf_lite.cuda.runtime.driver import Device

    try:
        return Device(0)
    except DeviceError as error:
        pytest.skip(f"no usable GPU: {error}")


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
