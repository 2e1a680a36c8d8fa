"""The machine to plan for: what is given counts, and only what is not is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from bminf_lite.errors import DeviceError, UsageError
from bminf_lite.memory import machine
from bminf_lite.memory.device import MARGIN, Speeds
from bminf_lite.memory.machine import CONTEXT_BYTES, available_memory, machine_of, usable_memory

GIB = 1 << 30


class FakeGpu:
    def memory(self) -> tuple[int, int]:
        return 20 * GIB, 24 * GIB


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A machine with a GPU; the list holds what was measured."""
    calls: list[object] = []

    def measure(gpu: FakeGpu) -> Speeds:
        calls.append(gpu)
        return Speeds(25e9, 900e9)

    monkeypatch.setattr(machine, "first_gpu", FakeGpu)
    monkeypatch.setattr(machine, "measure_speeds", measure)
    return calls


def test_only_what_is_not_given_is_measured(measured: list[object]) -> None:
    usable = 8 * GIB - CONTEXT_BYTES - MARGIN
    found = [machine_of(None, 8 * GIB, 1e9), machine_of(), machine_of(gpu_memory=8 * GIB, bandwidth=5e11)]
    assert [(m.memory, m.link, m.bandwidth) for m in found] == [
        (usable, 1e9, None),
        (20 * GIB - MARGIN, 25e9, 900e9),
        (usable, 25e9, 5e11),
    ]
    assert len(measured) == 2


def test_a_limit_counts_as_far_as_memory_is_free() -> None:
    assert usable_memory("6GiB", 20 * GIB, 24 * GIB) == 6 * GIB
    assert usable_memory("22GiB", 20 * GIB, 24 * GIB) == 20 * GIB - MARGIN
    with pytest.raises(UsageError, match=r"30\.0 GiB, but the GPU has 24\.0 GiB"):
        usable_memory("30GiB", 20 * GIB, 24 * GIB)


def test_without_a_gpu_the_error_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(index: int) -> None:
        raise DeviceError("no driver")

    monkeypatch.setattr(machine, "require_usable", none)
    with pytest.raises(DeviceError, match=r"no driver\. To plan for another machine, give gpu_memory and link"):
        machine_of()


def test_what_the_host_has_left(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       24689764 kB\nMemAvailable:   20000000 kB\n")
    assert available_memory(file) == 20_000_000 << 10
    file.write_text("MemTotal: 1 kB\n")
    assert available_memory(file) is None
    assert available_memory(tmp_path / "nowhere") is None
