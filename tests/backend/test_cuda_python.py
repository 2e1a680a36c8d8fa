"""Tests that need a GPU, run on one made of NumPy (tests/fake_gpu), each profile of a GPU in a process of its own.

So the Python of the GPU's path is executed wherever the tests are: shapes, pitches, signatures, lifetimes, graphs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cubin_info import kernel_info
from fake_gpu import PROFILES
from fake_gpu.launching import MODELS

from bminf_lite.cuda.kernels.sources import SOURCES
from bminf_lite.cuda.runtime import compiler
from bminf_lite.cuda.runtime.declarations import kernel_name
from bminf_lite.errors import DeviceError

TESTS = Path(__file__).parents[1]
GOLDENS = "models/test_goldens.py"
REFERENCE, INT8_CACHE = (
    "::test_the_gpu_gives_what_the_reference_gives",
    "::test_the_gpu_gives_what_the_reference_gives_with_an_int8_cache",
)
REPLAY = "::test_repeated_decoding_equals_decoding_anew"
CASES = {
    "h200": (
        *(f"{GOLDENS}{REFERENCE}[{kind}-llama: tied, biases, multi-query]" for kind in ("w8a8", "w8a16", "float")),
        f"{GOLDENS}{REFERENCE}[w8a8-mistral: window]",
        f"{GOLDENS}{REFERENCE}[w8a8-gpt_neox: half of heads, new keys]",
        f"{GOLDENS}{REFERENCE}[w8a8-opt: norm after, projections]",
        f"{GOLDENS}{INT8_CACHE}[w8a8-llama: tied, biases, multi-query]",
        f"{GOLDENS}{REFERENCE}[w8a8-t5: few buckets]",
        "backend/test_short_convolution.py::test_a_captured_step",
        "backend/test_adapter_slots.py",
        "engine/test_adapted_requests.py::test_on_a_gpu_in_any_company",
        "models/test_expert_adapters.py",
        "cuda/test_expert_adapter_kernels.py",
        "cuda/test_all_reduce_kernels.py",
        "checkpoint/test_adapters_of_experts.py::test_on_a_gpu_in_any_company",
        "backend/test_latent_attention.py::test_segments_are_merged_in_one_order",
        "backend/test_delta_net.py::test_sequences_of_one_step",
        "backend/test_mamba2.py::test_sequences_of_one_step",
        f"{GOLDENS}{REFERENCE}[w8a8-qwen3_next: two kinds]",
        f"{GOLDENS}{REFERENCE}[w8a8-mistral4: growing queries, a dense layer, groups]",
        "models/test_mixtures.py",
        f"{GOLDENS}{REFERENCE}[w8a8-gpt_oss: plain weights]",
        "backend/test_cuda_memory.py",
        "backend/test_early_attention.py",
        "memory/test_streaming_gpu.py::test_streamed_and_resident_give_equal_results",
    ),
    "h200*2": (
        "backend/test_divided_loading.py",
        "backend/test_divided_rows.py",
        "backend/test_peers.py::test_a_model_on_two_gpus",
        "backend/test_peers.py::test_every_kind_of_layer_gives_what_ranks_on_the_cpu_give",
        "backend/test_peers.py::test_steps_of_many_prompt_tokens_are_captured_with_the_same_bits",
        "backend/test_peers.py::test_a_rank_that_fails_ends_the_wait_of_the_others_at_once",
        "backend/test_peers.py::test_a_rank_that_hangs_is_named_within_seconds",
        "backend/test_peers.py::test_captured_steps_are_replayed_beside_others",
        "checkpoint/test_adapters_of_experts.py::test_on_a_gpu_in_any_company[mixtral-w8a8-2]",
        "bench/test_bench_cuda.py::test_a_model_divided_between_two_gpus",
    ),
    "sm_86": (
        f"{GOLDENS}{REFERENCE}[w8a8-qwen2: grouped]",
        f"{GOLDENS}{REFERENCE}[w8a16-gpt2: plain]",
        f"{GOLDENS}{REPLAY}[w8a8-llama: tied, biases, multi-query]",
        f"{GOLDENS}{REFERENCE}[w8a8-umt5: tied]",
        "models/test_mixtures.py::test_a_gpu_gives_what_the_reference_gives[w8a8-rotate-all-qwen2_moe: plain weights]",
        "models/test_mixtures.py::test_a_gpu_gives_what_the_reference_gives[float-ernie4_5_moe: plain weights]",
        "models/test_mixtures.py::test_a_gpu_gives_what_the_reference_gives[w8a8-gpt_oss: plain weights]",
        "models/test_expert_adapters.py::test_a_gpu_gives_what_the_reference_gives",
        f"models/test_encoders.py{REFERENCE}[w8a8-bert: one head, one layer]",
        "evaluation/test_compare.py::test_a_gpu_finds_what_a_cpu_finds",
    ),
    "sm_120": (
        f"{GOLDENS}{REFERENCE}[w8a8-qwen3: grouped]",
        f"{GOLDENS}{REPLAY}[w8a8-qwen3: layer types]",
    ),
}
"""By profile: which tests run on it. A test that was renamed is an error."""
MUCH_SHARED = 40 << 10


def run(profile: str, report: Path) -> subprocess.CompletedProcess[str]:
    """The tests of a profile; what they asked of it goes to ``report``."""
    command = [
        sys.executable, "-m", "pytest", f"--fake-gpu={profile}", f"--fake-gpu-report={report}", "-m", "gpu", "-x",
        "-p", "no:cacheprovider", *(str(TESTS / case) for case in CASES[profile]),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True)


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A module in a process of its own."""
    folders = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": folders}, capture_output=True, text=True)


def place_real_sizes(profile: str) -> subprocess.CompletedProcess[str]:
    """Launches of real sizes on a profile, checked without computing."""
    return run_module("fake_gpu.real_shapes", profile)


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[Future[Any], Path]]]:
    """The runs of the profiles that are selected, and their reports. Two run at a time, on one core each."""
    folder = tmp_path_factory.mktemp("fake_gpu")
    selected = {i.callspec.params["asked"] for i in request.session.items if "asked" in getattr(i, "fixturenames", ())}
    with ThreadPoolExecutor(2) as pool:
        yield {p: (pool.submit(run, p, folder / f"{p}.json"), folder / f"{p}.json") for p in CASES if p in selected}


@pytest.fixture(
    scope="module", params=[pytest.param(p, marks=[] if p == "sm_86" else [pytest.mark.slow]) for p in CASES]
)
def asked(request: pytest.FixtureRequest, runs: dict[str, tuple[Future[Any], Path]]) -> tuple[str, dict[str, Any]]:
    """A profile, and what the tests asked of it, all of which passed."""
    future, report = runs[request.param]
    done = future.result()
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    return request.param, json.loads(report.read_text())


def test_closing_gives_all_memory_back(asked: tuple[str, dict[str, Any]]):
    assert asked[1]["left"] == 0


def test_kernels_and_their_self_tests_need_no_kernel_of_cupy(asked: tuple[str, Any]) -> None:
    """CuPy cannot compile its own beside headers of another CUDA version, which :mod:`bminf_lite.cuda.doctor` notes."""
    assert [name for name in asked[1]["kernels_of_cupy"] if name.startswith("bminf_lite.cuda.")] == []


def test_every_kernel_that_is_launched_is_modelled(asked: tuple[str, dict[str, Any]]):
    launched = {kernel_name(e) for _, e, _, how in asked[1]["requested"] if how["launches"]}
    assert len(launched) >= 10 and launched <= set(MODELS)


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
def test_real_sizes_stay_within_the_limits_of_the_gpu_and_of_the_machine_code(profile: str):
    """Compiles the largest instantiation of each kernel that takes much dynamic shared memory."""
    done = place_real_sizes(profile)
    assert done.returncode == 0, done.stderr
    most: dict[str, Any] = {}
    for request in json.loads(done.stdout)["requested"]:
        name = kernel_name(request[1])
        if request[3]["shared"] > most.get(name, (0, 0, 0, {"shared": MUCH_SHARED}))[3]["shared"]:
            most[name] = request
    assert most
    reserved = 1024 if PROFILES[profile].capability >= (9, 0) else 0  # by the hardware, which ptxas counts
    for source, expression, defines, how in most.values():
        try:
            cubin = compiler.compile(source, how["arch"], [expression], defines, sources=SOURCES)
        except DeviceError as error:
            pytest.skip(str(error))
        static = cubin.usage[expression].shared
        assert static + how["shared"] <= PROFILES[profile].shared + reserved, expression
        assert how["threads"] <= kernel_info(cubin.image, cubin.symbols[expression]).max_threads, expression


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "shape", "limit", "kv_cache"),
    [
        ("h200", "llama-3.2-1b", "3GiB", "int8"), ("sm_86", "llama-3.2-1b", "3GiB", "int8"),
        ("h200", "gemma-2-9b", "12GiB", "int8"), ("sm_86", "mt5-xl", "6GiB", "fp16"),
        ("h200", "qwen3-8b", "10GiB", "fp16"), ("sm_86", "gpt2-xl", "4GiB", "fp16"),
        ("sm_86", "llama-3-8b", "12GiB", "int8"), ("h200", "granite-3.1-3b-a800m", "1536MiB", "fp16"),
        ("sm_86", "granite-3.1-3b-a800m", "1536MiB", "fp16"),
    ],
)  # fmt: skip
def test_an_engine_warms_up_and_serves_in_little_memory(profile: str, shape: str, limit: str, kv_cache: str):
    """With every layer, as many sequences as a plan has room for and more requests: all steps are captured."""
    done = run_module("fake_gpu.memory_limit", profile, shape, limit, kv_cache)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["results"] >= 5 and found["captured"] >= 15 and found["without memory"] == 0


@pytest.mark.slow
def test_an_engine_that_streams_layers_serves_in_little_memory():
    """Its cache grows while scratch comes and goes, so free memory must be given back in small pieces."""
    done = run_module("fake_gpu.memory_limit", "sm_86", "command-r7b", "10GiB", "fp16")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"] >= 5
