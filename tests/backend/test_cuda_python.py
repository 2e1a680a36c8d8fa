"""Tests that need a GPU, run on one made of NumPy (see ``fake_gpu``), each profile of a GPU in a process of its own.

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
from fake_gpu.sources import split_expression

from bminf_lite.cuda.runtime import compiler
from bminf_lite.errors import DeviceError

TESTS = Path(__file__).parents[1]
FILES = {
    "h200": {
        "models/test_goldens.py": (
            "tied and biases",
            "window and w8a8",
            "half and heads",
            "gives and opt",
            "few and buckets and umt5",
        ),
        "backend/test_cuda_memory.py": ("memory",),
        "backend/test_early_attention.py": ("early",),
        "backend/test_operations.py": ("cuda",),
        "memory/test_streaming_gpu.py": ("equal_results", "survey"),
    },
    "sm_86": {
        "models/test_goldens.py": ("gives and qwen2", "gives and grouped", "repeated and llama"),
        "backend/test_sample.py": ("not real",),
        "backend/test_encoder_operations.py": ("cuda",),
        "evaluation/test_compare.py": ("gpu",),
    },
    "sm_120": {"models/test_goldens.py": ("gives and grouped", "repeated and qwen3")},
}

MUCH_SHARED = 40 << 10


def run(profile: str, report: Path) -> subprocess.CompletedProcess[str]:
    """The tests of a profile; what they asked of it goes to ``report``."""
    files = FILES[profile]
    chosen = " or ".join(
        f"({Path(file).stem} and ({' or '.join(f'({word})' for word in words)}))" for file, words in files.items()
    )
    command = [
        sys.executable, "-m", "pytest", f"--fake-gpu={profile}", f"--fake-gpu-report={report}", "-m", "gpu", "-x",
        "-k", chosen, "-p", "no:cacheprovider", *(str(TESTS / file) for file in files),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Future[Any], Path]]]:
    """The runs of all profiles and their reports, two at a time: each computes on one core."""
    folder = tmp_path_factory.mktemp("fake_gpu")
    with ThreadPoolExecutor(2) as pool:
        yield {p: (pool.submit(run, p, folder / f"{p}.json"), folder / f"{p}.json") for p in FILES}


@pytest.fixture(scope="module", params=FILES)
def asked(request: pytest.FixtureRequest, runs: dict[str, tuple[Future[Any], Path]]) -> tuple[str, dict[str, Any]]:
    """A profile, and what the tests asked of it, all of which passed."""
    future, report = runs[request.param]
    done = future.result()
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    return request.param, json.loads(report.read_text())


def test_closing_gives_all_memory_back(asked: tuple[str, dict[str, Any]]):
    assert asked[1]["left"] == 0


def test_every_kernel_that_is_launched_is_modelled(asked: tuple[str, dict[str, Any]]):
    launched = {split_expression(e)[0] for _, e, _, how in asked[1]["requested"] if how["launches"]}
    assert len(launched) >= 10 and launched <= set(MODELS)


@pytest.mark.parametrize("profile", PROFILES)
def test_real_sizes_stay_within_the_limits_of_the_gpu_and_of_the_machine_code(profile: str):
    """Of each kernel that takes much dynamic shared memory, the instantiation that takes most."""
    folders = os.pathsep.join([str(TESTS.parent), str(TESTS / "cuda")])
    command = [sys.executable, "-m", "fake_gpu.real_shapes", profile]
    environment = os.environ | {"PYTHONPATH": folders}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    most: dict[str, Any] = {}
    for request in json.loads(done.stdout)["requested"]:
        name = split_expression(request[1])[0]
        if request[3]["shared"] > most.get(name, (0, 0, 0, {"shared": MUCH_SHARED}))[3]["shared"]:
            most[name] = request
    assert most
    reserved = 1024 if PROFILES[profile].capability >= (9, 0) else 0  # by the hardware, which ptxas counts
    for source, expression, defines, how in most.values():
        try:
            cubin = compiler.compile(source, how["arch"], [expression], defines)
        except DeviceError as error:
            pytest.skip(str(error))
        static = cubin.usage[expression].shared
        assert static + how["shared"] <= PROFILES[profile].shared + reserved, expression
        assert how["threads"] <= kernel_info(cubin.image, cubin.symbols[expression]).max_threads, expression
