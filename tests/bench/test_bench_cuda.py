"""The benchmark on a GPU: every measurement runs, and its figures are possible."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from bminf_lite.backend import close_ranks, create_ranks
from bminf_lite.bench.model import BenchModel, random_model, read_shape
from bminf_lite.bench.runner import Workload, run_tests, trace_step
from bminf_lite.bench.session import Session
from bminf_lite.cuda.runtime.driver import device_count

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
SMALL = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 192, "vocab_size": 512}


@pytest.fixture
def cupy_arithmetic(pytestconfig: pytest.Config):
    """For tests of formulas over CuPy, whose arithmetic the GPU made of NumPy lacks."""
    if pytestconfig.getoption("--fake-gpu"):
        pytest.skip("needs CuPy's own arithmetic")


@pytest.fixture(scope="module")
def profiler(cuda_backend):
    """Small sizes: the figures do not matter here."""
    from bminf_lite.bench import cuda

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "GEMM_SIZE", 256)
        patch.setattr(cuda, "HOLD_READS", 2)
        patch.setattr(cuda, "SETTLE_SECONDS", 0.0)
        patch.setattr(cuda, "WEIGHT_BYTES", 1 << 19)
        yield cuda.CudaProfiler(cuda_backend, ceiling_bytes=1 << 20)


@pytest.fixture(scope="module")
def bench_model(cuda_backend):
    return random_model("small", read_shape("llama-tiny") | SMALL, cuda_backend)


def test_ceilings(profiler) -> None:
    ceilings = profiler.ceilings()
    assert min(ceilings.copy, ceilings.read, ceilings.int8) > 1e6


def test_speeds_and_peaks(bench_model, profiler) -> None:
    tests = [Workload("pp", 30, 0, 2), Workload("tg", 5, 10, 1), Workload("tg", 5, 10, 3)]
    for measurement in run_tests(bench_model, profiler, tests, 2):
        assert measurement.speed > 1
        assert measurement.peak_reserved >= measurement.peak_used > bench_model.nbytes / 2
        assert measurement.bandwidth > 0


@pytest.fixture
def divided() -> Iterator[BenchModel]:
    """A model that two GPUs divide."""
    if device_count() < 2:
        pytest.skip("needs 2 GPUs")
    ranks = create_ranks(2, "cuda", "512MiB", 128 * 512)
    try:
        yield random_model("small", read_shape("llama-tiny") | SMALL, ranks, max_num_batched_tokens=256)
    finally:
        close_ranks(ranks)


def test_a_model_divided_between_two_gpus(divided: BenchModel, profiler) -> None:
    tests, own = [Workload("pp", 30, 0, 2), Workload("tg", 6, 10)], type(profiler)(divided.ops, 1 << 20)
    for measurement in run_tests(divided, own, tests, 2):
        assert measurement.speed > 1 and 0 < measurement.token_bytes < divided.nbytes


def test_trace_of_a_model_divided_between_two_gpus(divided: BenchModel, profiler) -> None:
    trace = trace_step(divided, type(profiler)(divided.ops, 1 << 20), depth=10)
    assert any("all_reduce" in span.name for span in trace.spans)


def test_results_lie_where_it_is_seen_if_nothing_is_written(bench_model, monkeypatch) -> None:
    ops, marked, fetched = bench_model.ops, set(), set()
    array, fetch = ops.array, ops.fetch

    def mark(values: Any) -> Any:
        made = array(values)
        marked.add(made.data.ptr)
        return made

    def note(x: Any) -> Any:
        fetched.add(x.data.ptr)
        return fetch(x)

    with closing(Session(bench_model, 2, 64)) as session:
        position = session.fill_context(8)
        session.prepare_decode(position)
        session.decode(6)
        monkeypatch.setattr(ops, "array", mark)
        monkeypatch.setattr(ops, "fetch", note)
        session.prepare_decode(position)
        session.decode(6)
    assert fetched <= marked


def test_streamed_bytes_are_those_of_the_plan() -> None:
    """A token copies each streamed layer once, and a prompt does for each of its chunks."""
    from bminf_lite.backend.cuda.backend import CudaBackend
    from bminf_lite.bench.cuda import CudaProfiler

    small = {"num_hidden_layers": 12, "intermediate_size": 512, "vocab_size": 512, "max_position_embeddings": 256}
    ops = CudaBackend(0, "55MiB")
    streaming = random_model("streaming", read_shape("llama-tiny") | small, ops)
    plan = streaming.plan
    assert plan is not None and 3 <= len(plan.streamed) < 12
    tests = [Workload("tg", 3, 5, 2), Workload("pp", plan.chunk + 1, 0, 1)]
    decoded, prompt = run_tests(streaming, CudaProfiler(ops), tests, 2)
    assert decoded.streamed_bytes == plan.streamed_bytes / 2
    assert prompt.streamed_bytes * (plan.chunk + 1) == pytest.approx(2 * plan.streamed_bytes)
    ops.close()


def test_a_trace_has_every_launch_of_a_step(bench_model, profiler, cuda_backend) -> None:
    trace = trace_step(bench_model, profiler, depth=10)
    names = [span.name.split("<")[0] for span in trace.spans]
    assert names.count("attention_decode") == 2 and names.count("gemv") == 2 * 4 + 1
    assert names[:2] == ["write_step", "embed"] and names[-1] == "best_token"
    assert all(0 < span.seconds < 1 and span.nbytes > 0 for span in trace.spans[1:])
    assert 0 < trace.step_seconds < 0.1
    assert cuda_backend.device.observer is None


@pytest.mark.parametrize("batch", [2, 40])
def test_a_trace_of_a_batch_shows_its_products(bench_model, profiler, batch: int) -> None:
    trace = trace_step(bench_model, profiler, batch=batch, depth=10)
    names = [span.name.removeprefix("bminf::") for span in trace.spans]
    assert any(name.startswith(("cublasLt", "skinny_gemm", "igemm")) for name in names), names


def test_kernels(profiler) -> None:
    """Each kernel runs, and those that write over their input allocate nothing."""
    cases = list(profiler._row_cases(64, 1024))
    allocated = {case.kernel: profiler.allocated(case.run) for case in cases}
    assert allocated.keys() == {
        "softmax",
        "softmax, in place",
        "rms_norm",
        "layer_norm",
        "quantize",
        "rms_norm and quantize",
        "rms_norm to fp32, in place",
    }
    assert allocated.pop("softmax") >= 64 * 1024 * 4
    assert set(allocated.values()) == {0}
    apart, in_place = profiler._projection_cases(64, 256)
    assert profiler.allocated(in_place.run) <= profiler.allocated(apart.run) - 64 * 256 * 2
    cases += [apart, in_place, *profiler._gemv_cases(512, 1024)]
    assert cases[-1].kernel == "matvec"
    for run in (*(case.run for case in cases), profiler._gemm(16, 512, 1024)):
        assert 0 < profiler.median_seconds(run, runs=2) < 1


def test_products_with_fused_epilogues(profiler, cuda_backend) -> None:
    cases = list(profiler._finished_cases(300, 512, 256))
    hopper = cuda_backend.device.compute_capability == (9, 0)
    assert [case.kernel for case in cases] == ["igemm to fp16", "igemm, added to fp32", "igemm, gated"] * hopper
    for case in cases:
        assert 0 < profiler.median_seconds(case.run, runs=2) < 1


def test_plain_formulas_run(profiler, cupy_arithmetic) -> None:
    for case in (*profiler._row_cases(64, 1024), *profiler._gemv_cases(512, 1024)):
        assert (case.plain is None) == ("in place" in case.kernel)
        if case.plain is not None:
            assert 0 < profiler.plain_seconds(case.plain) < 1
