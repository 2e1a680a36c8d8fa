"""Fixtures that every test may use: the backends that this machine has."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import random
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint
from hypothesis import HealthCheck, settings

import bminf_lite
from bminf_lite.backend.base import Backend
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.cuda.runtime.driver import Device
from bminf_lite.errors import DeviceError

BY_CHANCE = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
"""Checks of how examples are drawn, whose results depend on the machine's speed and on the draw."""
settings.register_profile("plain", deadline=None, max_examples=20, derandomize=True, suppress_health_check=BY_CHANCE)
settings.register_profile("random", deadline=None, max_examples=100, print_blob=True, suppress_health_check=BY_CHANCE)
settings.register_profile("under a checker", settings.get_profile("plain"), max_examples=3)
settings.load_profile("plain")
"""``pytest`` draws the same examples every time. ``--hypothesis-profile=random`` draws others, and prints how to
reproduce a failure."""

LEFT_OUT = {
    "compile_all": "compile every kernel for every architecture",
    "slow": "take seconds, or repeat with more models and sizes what others prove",
    "real_model": "run real models, SmolLM2 135M and MiniLM",
    "ray_cluster": "start clusters of Ray",
}
"""Markers of tests that a plain run leaves out, and what these tests do."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--fake-gpu=h200``: tests marked ``gpu`` run on a GPU made of NumPy; see tests/fake_gpu/README.md.

    ``--under-checker``: for compute-sanitizer. The GPU's blocks are allocations of their own
    (tests/cuda/separate_blocks.py), some results are cleared (tests/cuda/cleared_results.py), hypothesis tries few
    examples, cublasLt's first proposal is taken, and what is marked ``repeats`` is left out. In decode attention all
    lanes of a warp give a stage back: racecheck takes an arrival at a barrier to order one thread's accesses only.
    """
    parser.addoption("--fake-gpu", metavar="PROFILE", help="run tests marked gpu on a GPU made of NumPy")
    parser.addoption("--fake-gpu-ptx", action="store_true", help="there, run the PTX of kernels that it can interpret")
    parser.addoption("--under-checker", action="store_true", help="each kernel, but little of it: a checker is slow")
    parser.addoption("--fake-gpu-report", metavar="FILE", help="write there which kernels were asked for")


def pytest_configure(config: pytest.Config) -> None:
    """Put the fake GPU, or what a checker wants, in place before any test module is imported."""
    gc.disable()  # until the tests are collected: their modules and items stay, and a collection finds nothing
    if profile := config.getoption("--fake-gpu"):
        import fake_gpu

        config.stash[FAKE_GPU] = fake_gpu.install(profile, config.getoption("--fake-gpu-ptx"))
    if config.getoption("--under-checker"):
        from bminf_lite.cuda.kernels import constants
        from bminf_lite.cuda.kernels.gemm import cublaslt_matmul as matmul

        header, one = "constants/stages.cuh", f"RELEASING_LANES = {constants.STAGE_RELEASING_LANES};"
        assert one in constants.HEADERS[header]
        constants.HEADERS[header] = constants.HEADERS[header].replace(one, "RELEASING_LANES = 32;")
        settings.load_profile("under a checker")
        matmul.PROPOSALS = 1  # each is another kernel of cublasLt's that the checker rewrites
        import cleared_results
        import separate_blocks

        from bminf_lite.backend.cuda import device as cuda

        cleared_results.install()
        cuda.device_arena = separate_blocks.separate_arena


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of ``LEFT_OUT`` unless ``-m`` selects by marker, and ``repeats`` under a checker.

    Tests marked ``gpu`` are left out where no GPU is: a third of all tests are, and to skip one takes milliseconds.
    """
    markers = [] if config.option.markexpr else list(LEFT_OUT)
    if config.getoption("--under-checker"):
        markers.append("repeats")
    if why_no_gpu():
        markers.insert(0, "gpu")
    kept: list[pytest.Item] = []
    left_out: dict[str, list[pytest.Item]] = {}
    for item in items:
        marker = next((m for m in markers if item.get_closest_marker(m)), None)
        (kept if marker is None else left_out.setdefault(marker, [])).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=[item for group in left_out.values() for item in group])
    config.stash[LEFT_OUT_COUNTS] = {marker: len(group) for marker, group in left_out.items()}


def pytest_collection_finish() -> None:
    """What is there now stays, so the collector need not look at it again: it holds 14,000 tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what the run left out, and how to run it."""
    for marker, count in config.stash.get(LEFT_OUT_COUNTS, {}).items():
        if marker in LEFT_OUT:
            terminalreporter.write_line(f"left out: {count} tests that {LEFT_OUT[marker]}; run them with -m {marker}")
    if why_no_gpu():
        terminalreporter.write_line(f"left out: tests that need a GPU ({why_no_gpu()})")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Write what the tests asked of the fake GPU."""
    if file := config.getoption("--fake-gpu-report"):
        import fake_gpu

        Path(file).write_text(fake_gpu.report(config.stash[FAKE_GPU]))


FAKE_GPU = pytest.StashKey[Any]()
LEFT_OUT_COUNTS = pytest.StashKey[dict[str, int]]()


@functools.cache
def why_no_gpu() -> str:
    """Why tests marked ``gpu`` cannot run here; empty where they can."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    try:
        Device(0)
    except DeviceError as error:
        return f"no usable GPU: {error}"
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked ``alone`` where others share the GPU."""
    if item.get_closest_marker("alone") and "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("measures the whole GPU: run it without -n")


@pytest.fixture(autouse=True)
def _seeds() -> Iterator[None]:
    """Requests that give no seed draw the same ones in every run."""
    original, secrets.randbits = secrets.randbits, random.Random(0).getrandbits
    yield
    secrets.randbits = original


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random LLaMA, which tests only read, as is true of ``int8`` and ``text``."""
    return tiny_checkpoint.write(tmp_path_factory.mktemp("tiny") / "source")


@pytest.fixture(scope="session")
def int8(source: Path) -> Path:
    """The same in int8."""
    bminf_lite.migrate(source, source.parent / "int8")
    return source.parent / "int8"


@pytest.fixture(scope="session")
def text(source: Path) -> Path:
    """A text of 696 of its tokens: enough to calibrate on."""
    path = source.parent / "text.txt"
    path.write_text(tiny_checkpoint.WORDS * 12)
    return path


@pytest.fixture
def cuda_device() -> Device:
    """GPU 0 with its context current, for tests marked ``gpu``."""
    return Device(0)


def open_cuda_backend() -> Backend:
    """A backend on GPU 0; skips the test that asks for it where there is no usable one."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from bminf_lite.backend.cuda.backend import CudaBackend

    try:
        return CudaBackend(device=0, memory_limit=None)
    except DeviceError as error:
        pytest.skip(f"no usable GPU: {error}")


@pytest.fixture(scope="session")
def cuda_backend() -> Iterator[Backend]:
    """GPU 0, for tests marked ``gpu``."""
    backend = open_cuda_backend()
    yield backend
    backend.close()


@pytest.fixture
def new_cuda_backend() -> Iterator[Backend]:
    """A backend on GPU 0 that has done nothing yet, for tests marked ``gpu``."""
    backend = open_cuda_backend()
    yield backend
    backend.close()


@pytest.fixture(scope="session", params=["cpu", "reference-fp16", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend that the machine has: fp32 NumPy, NumPy that rounds where a GPU rounds, and the GPU."""
    if request.param == "cuda":
        return request.getfixturevalue("cuda_backend")
    return CpuBackend() if request.param == "cpu" else Backend(np.float16)
