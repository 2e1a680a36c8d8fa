"""Work that is divided among threads of Python: in order, with its errors, and with one thread of BLAS each."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest

from bminf_lite.backend import host_threads
from bminf_lite.backend.blas_threads import BlasThreads
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.backend.host_threads import Later, map_in_threads, thread_count


@dataclass(frozen=True)
class Device:
    computes_in_threads: bool


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_threads, "thread_count", lambda ops: 2 if ops.computes_in_threads else 1)


HOST, GPU = Device(True), Device(False)


def test_a_device_has_one_thread_and_the_cpu_at_most_a_few() -> None:
    assert thread_count(GPU) == 1
    assert 1 <= thread_count(CpuBackend()) <= host_threads.MAX_THREADS


@pytest.mark.parametrize("ops", [HOST, GPU])
def test_results_come_in_order_with_the_callers_error_handling(ops: Device) -> None:
    def slower_first(i: int) -> tuple[int, float, int]:
        time.sleep(0.01 * (3 - i))
        return i, float(np.float32(1) / np.float32(0)), threading.get_ident()

    with np.errstate(divide="ignore"):
        found = map_in_threads(ops, slower_first, range(3))
    assert [(i, value) for i, value, _ in found] == [(i, np.inf) for i in range(3)]
    assert ({ident for *_, ident in found} == {threading.get_ident()}) == (ops is GPU)
    assert map_in_threads(ops, slower_first, []) == []


@pytest.mark.parametrize("ops", [HOST, GPU])
def test_an_error_is_raised(ops: Device) -> None:
    with pytest.raises(ZeroDivisionError):
        map_in_threads(ops, lambda i: 1 // i, [1, 0, 2])


@pytest.mark.parametrize("ops", [HOST, GPU])
def test_later_work_is_done_in_order(ops: Device) -> None:
    later, done = Later(ops), list[int]()
    for i in range(10):
        later.submit(done.append, i)
        assert len(done) >= i - host_threads.MAX_WAITING - 1
    later.finish()
    assert done == list(range(10))
    later.submit(done.append, 10)
    later.finish()
    assert done[-1] == 10


def test_an_error_ends_what_waits() -> None:
    later, begin, done = Later(HOST), threading.Event(), list[int]()

    def fails() -> None:
        begin.wait()
        raise ValueError("found later")

    later.submit(fails)
    later.submit(done.append, 1)
    begin.set()
    with pytest.raises(ValueError, match="found later"):
        later.finish()
    later.finish()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_runs_behind_an_error_or_a_cancellation(fails: bool) -> None:
    """What work reads may be closed then: the piece that runs has ended, and no other begins."""
    later, begin, running, done = Later(HOST), threading.Event(), threading.Event(), list[int]()

    def first() -> None:
        begin.wait()
        assert not fails

    def slow() -> None:
        running.set()
        time.sleep(0.05)
        done.append(1)

    later.submit(first)
    later.submit(slow)
    begin.set()
    running.wait()
    if fails:
        with pytest.raises(AssertionError):
            later.submit(done.append, 2)
        assert done[:1] == [1]
    else:
        later.cancel()
        assert done == [1]
    later.cancel()
    assert not later._waiting


def test_each_has_one_thread_of_blas() -> None:
    class Library:
        count = 8

        def get(self) -> int:
            return self.count

        def set(self, count: int) -> None:
            self.count = count

    library = Library()
    threads = BlasThreads([library])
    large = 1 << 12, 1 << 12, 1 << 12
    with threads.one_each():
        assert library.count == 1
        with threads.for_product(*large):
            assert library.count == 1
    with threads.for_product(*large):
        assert library.count == 8
    assert library.count == 8
