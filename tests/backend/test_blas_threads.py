"""The threads of BLAS: few for small products, restored afterwards, also with several threads of Python."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from bminf_lite.backend.blas_threads import BlasThreads, threads_for
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.backend.operations import products
from bminf_lite.backend.operations.weights import NumpyWeight


class FakeLibrary:
    def __init__(self, count: int):
        self.count = count

    def get(self) -> int:
        return self.count

    def set(self, count: int) -> None:
        self.count = count


def test_small_products_get_one_thread_and_large_ones_more() -> None:
    assert threads_for(1024, 256, 704) == 1  # a layer of the bundled model
    assert threads_for(1, 4096, 4096) == 1
    assert threads_for(2048, 4096, 14336) > 64  # a layer of an 8B model
    counts = [threads_for(rows, 4096, 4096) for rows in (1, 10, 100, 1000)]
    assert counts == sorted(counts)


@pytest.mark.parametrize("error", [False, True])
def test_the_number_is_limited_for_a_product_and_restored(error: bool) -> None:
    libraries = [FakeLibrary(16), FakeLibrary(2)]
    threads = BlasThreads(list(libraries))
    try:
        with threads.for_product(1, 8, 8):
            assert [library.count for library in libraries] == [1, 1]
            if error:
                raise ValueError
    except ValueError:
        pass
    assert [library.count for library in libraries] == [16, 2]
    with threads.for_product(1 << 12, 1 << 12, 1 << 12):
        assert [library.count for library in libraries] == [16, 2]


def test_the_largest_number_holds_where_products_run_at_once() -> None:
    library = FakeLibrary(8)
    threads = BlasThreads([library])
    small, large = (1, 8, 8), (1 << 12, 1 << 12, 1 << 12)
    with threads.for_product(*small):
        with threads.for_product(*large):
            assert library.count == 8
        assert library.count == 1
    outer = threads.for_product(*large)
    with outer, threads.for_product(*small):
        assert library.count == 8
    assert library.count == 8


def test_many_threads_leave_the_number_as_it_was() -> None:
    library = FakeLibrary(8)
    threads = BlasThreads([library])

    def work(size: int) -> None:
        for _ in range(300):
            with threads.for_product(size, size, size):
                assert 1 <= library.count <= 8

    workers = [threading.Thread(target=work, args=(1 << i,)) for i in range(4, 13)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert library.count == 8


def test_the_backend_s_products_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    library, seen = FakeLibrary(8), []
    monkeypatch.setattr(products, "blas_threads", BlasThreads([library]))
    exact = products.exact_int_matmul
    monkeypatch.setattr(products, "exact_int_matmul", lambda x, w: seen.append(library.count) or exact(x, w))
    ops = CpuBackend()
    weight = ops.weight([np.ones((8, 8), np.float32)])
    np.testing.assert_array_equal(ops.linear(np.ones((2, 8), np.float32), weight), np.full((2, 8), 8))
    ops.linear(
        np.ones((2, 8), np.float32), NumpyWeight(np.ones((8, 8), np.float32), np.ones(8, np.float32), None, True)
    )
    assert seen == [1] and library.count == 8


def test_numpy_s_library_is_found() -> None:
    """With the two functions that are needed, where NumPy has OpenBLAS or MKL."""
    threads = BlasThreads()
    with threads.for_product(1, 8, 8):
        assert threads._libraries is not None
        assert all(library.get() == 1 for library in threads._libraries)
    built_with = str(np.show_config(mode="dicts")).lower()  # type: ignore[call-arg]
    assert threads._libraries or not ("openblas" in built_with or "mkl" in built_with)
