"""The fake GPU without its arithmetic, for models of real sizes: every launch and every copy is checked, none is run.

Operations of CuPy on up to ``LITTLE`` bytes are computed, because tables and counts are read back. What is larger are
weights and activations, which nothing reads, so their memory is never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import fake_gpu

from . import fake_cublaslt, fake_cupy, launching
from .machine import Machine
from .memory import Memory

LITTLE = 1 << 20


def compute_little(function: Callable[..., Any], out: np.ndarray, operands: Sequence[Any]) -> None:
    """See :func:`fake_cupy.compute`."""
    if out.nbytes <= LITTLE:
        out[...] = function(*operands)


def install(profile: str) -> Machine:
    """Put such a GPU in place; its products pass their self-tests."""
    machine = fake_gpu.install(profile)
    Memory.fill = lambda self, address, nbytes, value: None  # type: ignore[method-assign]
    fake_cupy.compute = compute_little
    launching.run = lambda machine, launch: None
    fake_cublaslt.multiply = lambda *_: None
    from bminf_lite.cuda.kernels.gemm.gemm_hopper import ScaledGemm
    from bminf_lite.cuda.kernels.gemm.igemm import Int8Gemm

    Int8Gemm.check = lambda self, kind: None  # type: ignore[method-assign]
    Int8Gemm.skinny_gemm_verified = ScaledGemm.verified = True  # type: ignore[assignment, method-assign]
    return machine
