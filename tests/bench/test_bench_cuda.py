"""The benchmark on a GPU. What it prints is for people to judge; here it must be there and make sense."""

from __future__ import annotations

import numpy as np
import pytest

from bminf_lite.bench import inside
from bminf_lite.bench.runner import Workload, run_tests
from bminf_lite.bench.shapes import read_shape
from bminf_lite.bench.subject import random_subject

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def instruments(cuda_backend):
    from bminf_lite.bench.cuda import CudaInstruments

    return CudaInstruments(cuda_backend, ceiling_bytes=1 << 28)


@pytest.fixture(scope="module")
def subject(cuda_backend):
    return random_subject("llama-tiny", read_shape("llama-tiny"), cuda_backend)


def test_ceilings(instruments) -> None:
    ceilings = instruments.ceilings()
    assert 1e11 < ceilings.copy < 2e13 and 1e11 < ceilings.read < 2e13
    assert 1e12 < ceilings.int8 < 1e16


def test_reading_reads_everything(instruments, cuda_backend) -> None:
    """The kernel writes only where the bits of all vectors add up to 1 in some thread."""
    data = cuda_backend.arrays.zeros((1 << 20,), np.int8)
    read_all = instruments._reader(data)
    seconds, _ = instruments.time(read_all)
    assert seconds > 0


def test_speeds_and_peaks(subject, instruments) -> None:
    tests = [Workload("pp", 300, 0, 2), Workload("tg", 20, 100, 1), Workload("tg", 20, 100, 3)]
    for measurement in run_tests(subject, instruments, tests, 3):
        assert measurement.speed > 100
        assert measurement.peak_reserved >= measurement.peak_used > subject.nbytes / 2
        assert measurement.bandwidth > 0


def test_a_trace_has_every_launch_of_a_step(subject, instruments, cuda_backend) -> None:
    trace = inside.trace_step(subject, instruments, depth=100)
    names = [span.name.split("<")[0] for span in trace.spans]
    assert names.count("attend") == 4 and names.count("matvec") == 4 * 4 + 1
    assert names[0] == "embed" and names[-1] == "best_token"
    assert all(0 < span.seconds < 0.1 and span.nbytes > 0 for span in trace.spans)
    assert 0 < trace.step_seconds < 0.1
    assert cuda_backend.device.observer is None


@pytest.mark.parametrize("batch", [2, 40])
def test_a_trace_of_a_batch_shows_its_products(subject, instruments, batch: int) -> None:
    trace = inside.trace_step(subject, instruments, batch=batch, depth=10)
    assert any(span.name.startswith(("cublasLt", "few_rows", "igemm")) for span in trace.spans)


def test_kernels(instruments, cuda_backend) -> None:
    cases = [*instruments._row_cases(64, 1024), *instruments._matvec_cases(512, 1024)]
    assert {case.kernel for case in cases} == {
        "rms_norm", "layer_norm", "quantize", "rms_norm and quantize", "matvec"
    }  # fmt: skip
    for case in cases:
        assert 0 < instruments.seconds_each(case.run, runs=2) < 0.1
        assert case.plain is not None and 0 < instruments.plain_seconds_each(case.plain) < 1
    run = instruments._product(16, 512, 1024)
    assert 0 < instruments.seconds_each(run, runs=2) < 0.1


def test_plain_formulas_give_what_the_kernels_give(instruments, cuda_backend) -> None:
    """What is compared does the same."""
    import cupy as cp

    from bminf_lite.backend.values import Norm
    from bminf_lite.bench.plain import quantize, rms_norm

    random = np.random.default_rng(0).standard_normal((33, 1024), np.float32)
    residual = cuda_backend.array(random)
    gain = cuda_backend.vector(np.full(1024, 1.5, np.float32))
    out = cuda_backend.arrays.rows(33, 1024, np.float16)
    cuda_backend.launches.transform(None, out, None, None, residual, Norm(gain, 1e-5))
    with cuda_backend.arrays.current():
        plain = rms_norm(cp, residual, gain)
        np.testing.assert_allclose(cp.asnumpy(out), cp.asnumpy(plain), rtol=2e-3, atol=1e-3)
        codes, _ = quantize(cp, out)
        expected, _ = cuda_backend.quantize(out)
        assert (cp.asnumpy(codes) == cp.asnumpy(expected)).mean() > 0.999
