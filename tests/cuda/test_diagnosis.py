"""The diagnosis on machines that miss something, each simulated by probes that find as much as such a machine has."""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace
from pathlib import Path

import pytest

from bminf_lite.cuda.doctor import GemmReport, Gpu, Probes, diagnose, require_usable
from bminf_lite.cuda.runtime.libraries import Headers, Library, Version, other_headers
from bminf_lite.errors import DeviceError

GPU = Gpu(0, "NVIDIA Example", (9, 0), 80 << 30)
PLANS = [
    GemmReport("plain", True, None, 1432.6),
    GemmReport("col32_2r_4r4", False, "cublasLt refuses it", None),
]


def absent(*_):
    raise DeviceError("it is not there; run: something\n  tried here\n  and there")


def libraries_of(cuda: Version, *missing: str, driver: Version = (13, 0)):
    """A library probe that finds everything of CUDA version ``cuda`` except ``missing``."""

    def load(name: str) -> Library:
        if name in missing:
            absent()
        version = driver if name == "cuda" else cuda
        return Library(name, f"/lib/lib{name}.so", version, ctypes.CDLL(None))

    return load


def complete(cuda: Version = (13, 1), driver: Version = (13, 0)) -> Probes:
    return Probes(
        library=libraries_of(cuda, driver=driver),
        driver_release=lambda: "580.1",
        gpus=lambda: [GPU],
        cupy=lambda: {f"cupy-cuda{cuda[0]}x": "14.2.0"},
        headers=lambda major: Headers(Path("/include"), cuda),
        other_headers=lambda major: [],
        plans=lambda: PLANS,
    )


def remedies(report) -> list[str]:
    return [problem.remedy for problem in report.problems]


def must_not_run(*_):
    raise AssertionError("a GPU was used though something is missing")


def test_gpus_that_reach_each_other_are_said_and_others_are_noted():
    beside = [replace(GPU, peers=(1,)), replace(GPU, index=1, peers=(0,)), replace(GPU, index=2)]
    report = diagnose(replace(complete(), gpus=lambda: beside[:2]))
    assert report.usable and not report.notes
    assert "80.0 GiB, reaches the memory of GPU 1\n" in report.text()
    report = diagnose(replace(complete(), gpus=lambda: beside))
    (note,) = report.notes
    assert report.usable and note.details[-1] == "GPU 2 does not reach the memory of GPUs 0, 1"
    assert "through the host's memory" in report.text()


def test_a_complete_machine_is_usable_and_says_what_it_has():
    report = diagnose(complete())
    assert report.usable and not report.problems
    text = report.text()
    for fact in (
        "580.1, CUDA up to 13.0",
        "GPU 0",
        "NVIDIA Example, compute capability 9.0, 80.0 GiB",
        "cupy-cuda13x 14.2.0",
        "/lib/libcublasLt.so",
        "13.1",
        "/include",
        "exact, 1433 TOPS (in use)",
        "cublasLt refuses it",
        "CUDA is ready",
    ):
        assert fact in text


@pytest.mark.parametrize(("cuda", "other"), [((12, 9), (13, 0)), ((13, 1), (12, 8))])
def test_headers_of_another_cuda_beside_cupy_are_noted(cuda: Version, other: Version):
    """As with PyTorch for CUDA 13 and cupy-cuda12x: CuPy's own kernels fail, and this package's compile."""
    asked = []

    def other_headers(major: int) -> list[Headers]:
        asked.append(major)
        return [Headers(Path("/site-packages/nvidia/cu13/include"), other)]

    report = diagnose(replace(complete(cuda), other_headers=other_headers))
    assert asked == [cuda[0]] and report.usable and not report.problems
    (note,) = report.notes
    assert note.remedy == f"pip uninstall cupy-cuda{cuda[0]}x, then pip install 'bminf-lite[cuda{other[0]}]'"
    for fact in (f"Headers of CUDA {other[0]}.{other[1]}", "/site-packages/nvidia/cu13/include", "CUDA is ready"):
        assert fact in report.text()
    assert json.loads(json.dumps(report.as_dict()))["notes"]
    require_usable(0, replace(complete(cuda), other_headers=other_headers))


def test_headers_of_other_versions_are_found_in_wheels(tmp_path: Path):
    folders = []
    for name, number in (("cu13", 13000), ("cuda_runtime", 12090), ("broken", None), ("empty", 0)):
        folder = tmp_path / name / "include"
        folder.mkdir(parents=True)
        folders.append(folder)
        if name != "empty":
            (folder / "cuda_runtime.h").write_text("")
        if number:
            (folder / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {number}\n")
    assert other_headers(12, folders) == [Headers(folders[0], (13, 0))]
    assert other_headers(13, folders) == [Headers(folders[1], (12, 9))]
    assert other_headers(12, []) == []


def test_without_cupy_no_headers_are_noted():
    assert not diagnose(replace(complete(), cupy=dict, other_headers=must_not_run)).notes


def test_without_a_driver():
    probes = replace(
        complete(),
        library=libraries_of((13, 1), "cuda"),
        gpus=must_not_run,
        plans=must_not_run,
        driver_release=must_not_run,
    )
    report = diagnose(probes)
    assert not report.usable and report.driver is None and report.gpus == ()
    assert remedies(report) == ["install the NVIDIA driver: https://www.nvidia.com/drivers"]
    assert "There is no NVIDIA driver." in report.text() and "the CPU can" in report.text()
    assert report.cupy and report.components, "the rest is reported all the same"


@pytest.mark.parametrize(("driver", "extra"), [((12, 4), "cuda12"), ((13, 0), "cuda13")])
def test_with_a_driver_and_nothing_else(driver, extra):
    probes = replace(
        complete(driver=driver),
        cupy=dict,
        headers=absent,
        plans=must_not_run,
        library=libraries_of((13, 1), "cudart", "nvrtc", "cublasLt", driver=driver),
    )
    report = diagnose(probes)
    assert not report.usable and report.gpus == (GPU,)
    assert remedies(report) == [f"pip install 'bminf-lite[{extra}]'"], "one command installs everything"
    assert "CuPy, libnvrtc (compiles kernels), libcublasLt" in report.problems[0].what


@pytest.mark.parametrize(
    ("found", "driver", "extra"),
    [((12, 9), (13, 0), "cuda12"), ((13, 1), (13, 0), "cuda13"), ((13, 1), (12, 4), "cuda12")],
)
@pytest.mark.parametrize("missing", [(), ("nvrtc",), ("cublasLt", "cudart")])
def test_without_cupy_the_libraries_that_are_there_are_used_if_the_driver_can(found, driver, extra, missing):
    probes = replace(complete(found, driver), cupy=dict, library=libraries_of(found, *missing, driver=driver))
    assert remedies(diagnose(probes)) == [f"pip install 'bminf-lite[{extra}]'"]


@pytest.mark.parametrize(("cuda", "wheel"), [((12, 9), "nvidia-cublas-cu12"), ((13, 1), "nvidia-cublas")])
def test_with_cupy_and_no_cublas(cuda, wheel):
    driver = (cuda[0], 0)
    probes = replace(complete(cuda, driver), library=libraries_of(cuda, "cublasLt", driver=driver), plans=must_not_run)
    report = diagnose(probes)
    assert remedies(report) == [f"pip install {wheel}"]
    assert "libcublasLt (multiplies matrices)" in report.text() and "and there" in report.text()


@pytest.mark.parametrize(("cuda", "wheel"), [((12, 9), "nvidia-cuda-runtime-cu12"), ((13, 1), "nvidia-cuda-runtime")])
def test_with_headers_missing(cuda, wheel):
    report = diagnose(replace(complete(cuda, (cuda[0], 0)), headers=absent, plans=must_not_run))
    assert remedies(report) == [f"pip install {wheel}"]
    assert "the CUDA headers (cuda_fp16.h)" in report.text()


def test_a_missing_runtime_is_no_problem():
    report = diagnose(replace(complete(), library=libraries_of((13, 1), "cudart")))
    assert report.usable and "cudart" not in [component.name for component in report.components]


@pytest.mark.parametrize("gpus", [absent, list], ids=["refused", "none"])
def test_a_driver_that_offers_no_gpu(gpus):
    report = diagnose(replace(complete(), gpus=gpus, plans=must_not_run))
    assert not report.usable
    assert "nvidia-smi" in remedies(report)[0] and "--gpus all" in remedies(report)[0]


def test_cupy_for_a_newer_driver():
    report = diagnose(replace(complete((12, 9), (12, 4)), cupy=lambda: {"cupy-cuda13x": "14.2.0"}, plans=must_not_run))
    assert remedies(report) == ["pip uninstall cupy-cuda13x, then pip install 'bminf-lite[cuda12]'"]
    assert "this one supports CUDA up to 12.4" in report.text()


def test_two_cupys():
    report = diagnose(replace(complete(), cupy=lambda: {"cupy-cuda13x": "14.2.0", "cupy-cuda12x": "13.6.0"}))
    assert remedies(report) == ["pip uninstall cupy-cuda13x cupy-cuda12x, then pip install 'bminf-lite[cuda13]'"]


def test_headers_of_another_cuda_version():
    report = diagnose(replace(complete(), headers=lambda major: Headers(Path("/include"), (12, 4)), plans=must_not_run))
    assert remedies(report) == ["pip install nvidia-cuda-runtime"]


def test_headers_are_searched_for_the_compilers_version():
    asked = []
    diagnose(replace(complete((12, 9)), headers=lambda major: asked.append(major) or Headers(Path("/i"), (12, 9))))
    assert asked == [12]


def test_products_that_fail_are_reported():
    report = diagnose(replace(complete(), plans=absent))
    assert not report.usable and "Products on the GPU fail." in report.text() and "it is not there" in report.text()


def test_requiring_a_gpu_runs_nothing_and_says_all_that_is_missing_on_one_line():
    require_usable(0, replace(complete(), plans=must_not_run))
    with pytest.raises(DeviceError, match="no GPU 1: the driver offers 1"):
        require_usable(1, complete())
    probes = replace(complete(), library=libraries_of((13, 1), "cublasLt"), headers=absent)
    with pytest.raises(DeviceError) as info:
        require_usable(0, probes)
    assert "pip install nvidia-cublas;" in str(info.value) and "pip install nvidia-cuda-runtime" in str(info.value)
    assert "\n" not in str(info.value)


def test_requiring_a_gpu_looks_for_nothing_else_without_a_driver():
    probes = replace(complete(), library=libraries_of((13, 1), "cuda"), cupy=must_not_run, headers=must_not_run)
    with pytest.raises(DeviceError, match="no NVIDIA driver; install"):
        require_usable(0, probes)


def test_the_report_is_json():
    values = json.loads(json.dumps(diagnose(complete()).as_dict()))
    assert values["usable"] is True and values["gpus"][0]["compute_capability"] == [9, 0]
    assert values["plans"][0] == {"name": "plain", "preferred": True, "problem": None, "tops": 1432.6}


def test_this_machine_is_diagnosed_whatever_it_has():
    report = diagnose(replace(Probes(), plans=list))
    assert report.text() and (report.usable or report.problems)


@pytest.mark.gpu
def test_this_gpu_is_ready(device, tmp_path, monkeypatch):
    monkeypatch.setenv("BMINF_LITE_CACHE", str(tmp_path))
    report = diagnose()
    print(report.text())
    assert report.usable, report.text()
    assert [plan.name for plan in report.plans if plan.preferred and plan.problem is None and plan.tops]


@pytest.mark.parametrize("found", [(), (13, 0)])
def test_libraries_are_those_of_cupy_s_cuda_version(found):
    """A driver for CUDA 13 runs CuPy for CUDA 12, whose libraries must be 12 too."""
    missing = () if found else ("nvrtc", "cublasLt")
    probes = replace(
        complete((13, 0)),
        library=libraries_of(found or (12, 9), *missing),
        cupy=lambda: {"cupy-cuda12x": "14.2.0"},
        headers=lambda major: Headers(Path("/include"), (major, 0)),
        plans=must_not_run,
    )
    report = diagnose(probes)
    assert remedies(report) == ["pip install nvidia-cuda-nvrtc-cu12", "pip install nvidia-cublas-cu12"]


def test_products_that_fail_beside_cupy_for_cuda_12():
    report = diagnose(replace(complete((12, 9)), plans=absent))
    assert remedies(report) == ["pip install --upgrade 'bminf-lite[cuda12]'"]
