"""Finding libraries: the order of the search, what is too new for the driver, and messages that say what to run."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from bminf_lite.cuda.runtime import libraries
from bminf_lite.errors import DeviceError


@pytest.fixture
def fake_versions(monkeypatch):
    """Let the C library pass for libnvrtc, with a version that the test sets by path."""
    versions: dict[str, tuple[int, ...]] = {}
    monkeypatch.setattr(libraries.ctypes, "CDLL", lambda path: _Fake(path, versions))
    return versions


class _Fake:
    def __init__(self, path: str, versions: dict[str, tuple[int, ...]]) -> None:
        if path not in versions:
            raise OSError(f"{path}: cannot open shared object file")
        self.version = versions[path]

    def nvrtcVersion(self, major, minor):
        major._obj.value, minor._obj.value = self.version
        return 0


def test_the_first_file_that_loads_is_taken(fake_versions):
    fake_versions.update({"/b/libnvrtc.so.13": (13, 1), "/c/libnvrtc.so.12": (12, 9)})
    found = libraries.load_from("nvrtc", ["/a/libnvrtc.so.13", "/b/libnvrtc.so.13", "/c/libnvrtc.so.12"], ())
    assert (found.path, found.version) == ("/b/libnvrtc.so.13", (13, 1))


def test_a_library_newer_than_the_driver_is_passed_over(fake_versions):
    fake_versions.update({"/b/libnvrtc.so.13": (13, 1), "/c/libnvrtc.so.12": (12, 9)})
    found = libraries.load_from("nvrtc", ["/b/libnvrtc.so.13", "/c/libnvrtc.so.12"], (12, 4))
    assert found.path == "/c/libnvrtc.so.12"


def test_a_library_of_another_major_version_than_cupy_s_is_passed_over(fake_versions):
    fake_versions.update({"/b/libnvrtc.so.13": (13, 1), "/c/libnvrtc.so.12": (12, 9)})
    found = libraries.load_from("nvrtc", ["/b/libnvrtc.so.13", "/c/libnvrtc.so.12"], (13, 0), 12)
    assert found.path == "/c/libnvrtc.so.12"
    with pytest.raises(DeviceError, match=r"run: pip install nvidia-cuda-nvrtc-cu12. .*Tried:") as info:
        libraries.load_from("nvrtc", ["/b/libnvrtc.so.13"], (13, 0), 12)
    assert "/b/libnvrtc.so.13 is for CUDA 13, and CuPy for CUDA 12" in str(info.value)


@pytest.mark.parametrize(
    ("cupy", "major"),
    [(["cupy-cuda12x"], 12), (["cupy-cuda13x"], 13), (["cupy"], None), ([], None), (["cupy-cuda12x", "cupy"], None)],
)
def test_cupy_s_distribution_tells_its_cuda_version(cupy, major):
    assert libraries.major_of(cupy) == major


def test_nothing_found_lists_what_was_tried_and_the_command(fake_versions):
    fake_versions["/b/libnvrtc.so.13"] = (13, 1)
    with pytest.raises(DeviceError) as info:
        libraries.load_from("nvrtc", ["/a/libnvrtc.so.13", "/b/libnvrtc.so.13"], (12, 4))
    message = str(info.value)
    assert "pip install nvidia-cuda-nvrtc-cu12" in message
    assert "/a/libnvrtc.so.13: cannot open" in message
    assert "/b/libnvrtc.so.13 is for CUDA 13, and the driver supports CUDA 12.4" in message


@pytest.mark.parametrize(
    ("name", "driver", "command"),
    [
        ("cublasLt", (12, 4), "pip install nvidia-cublas-cu12"),
        ("cublasLt", (13, 0), "pip install nvidia-cublas"),
        ("cublasLt", (), "pip install nvidia-cublas"),
        ("headers", (12, 2), "pip install nvidia-cuda-runtime-cu12"),
        ("cupy", (12, 2), "pip install 'bminf-lite[cuda12]'"),
        ("cupy", (13, 2), "pip install 'bminf-lite[cuda13]'"),
        ("cuda", (), "install the NVIDIA driver: https://www.nvidia.com/drivers"),
    ],
)
def test_the_command_suits_the_driver(name, driver, command):
    assert libraries.install_command(name, driver) == command


def test_candidates_end_with_names_for_the_dynamic_linker():
    for name in ("cudart", "nvrtc", "cublasLt"):
        assert list(libraries.candidates(name))[-2:] == [f"lib{name}.so.13", f"lib{name}.so.12"]
    assert list(libraries.candidates("cuda")) == ["libcuda.so.1"]


def test_headers_of_the_wanted_version_come_first(tmp_path):
    for major in (13, 12):
        folder = tmp_path / str(major)
        folder.mkdir()
        (folder / "cuda_fp16.h").touch()
        (folder / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {major}040\n")
    folders = [tmp_path / "none", tmp_path / "13", tmp_path / "12"]
    assert libraries.find_headers(folders) == libraries.Headers(tmp_path / "13", (13, 4))
    assert libraries.find_headers(folders, major=12).version == (12, 4)
    (tmp_path / "12" / "cuda_runtime_api.h").unlink()
    assert libraries.find_headers(folders[2:]).version == ()


def test_missing_headers_say_where_they_were_searched(tmp_path):
    with pytest.raises(DeviceError, match="pip install nvidia-cuda-runtime") as info:
        libraries.find_headers([tmp_path])
    assert str(tmp_path) in str(info.value)


def test_a_library_found_by_name_tells_its_file():
    libc = ctypes.CDLL("libc.so.6")
    assert libc and (libraries._mapped_file("libc.so.6") or "").endswith("libc.so.6")
    assert libraries._mapped_file("libno-such-thing.so") is None


def test_versions_read_as_people_write_them():
    assert libraries.text((13, 1, 0)) == "13.1.0"
    assert libraries.text(()) == "unknown"


@pytest.mark.parametrize("module", ["runtime.libraries", "runtime.cublaslt", "kernels.gemm.plans", "doctor"])
def test_importing_does_not_import_cupy_or_load_a_library(module):
    program = f"import sys, bminf_lite.cuda.{module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert {"cupy", "cuda.pathfinder"}.isdisjoint(loaded)
