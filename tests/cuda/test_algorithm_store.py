"""The store of algorithms: kept between runs, apart for each GPU and version, and never trusted when damaged."""

from __future__ import annotations

from bminf_lite.cuda.kernels.gemm.algorithm_store import AlgorithmStore
from bminf_lite.cuda.runtime.cublaslt import Algorithm


def algorithm(number: int) -> Algorithm:
    return Algorithm((number,) * 8)


def test_algorithms_are_kept_between_runs(tmp_path):
    AlgorithmStore("gpu 1", tmp_path).put("a", algorithm(7))
    kept = AlgorithmStore("gpu 1", tmp_path).get("a")
    assert kept is not None and bytes(kept) == bytes(algorithm(7))
    assert AlgorithmStore("gpu 1", tmp_path).get("b") is None


def test_another_gpu_or_version_starts_empty(tmp_path):
    AlgorithmStore("gpu 1", tmp_path).put("a", algorithm(7))
    assert AlgorithmStore("gpu 2", tmp_path).get("a") is None


def test_two_processes_keep_each_others_entries(tmp_path):
    one, other = AlgorithmStore("gpu", tmp_path), AlgorithmStore("gpu", tmp_path)
    one.put("a", algorithm(1))
    other.put("b", algorithm(2))
    both = AlgorithmStore("gpu", tmp_path)
    assert both.get("a") is not None and both.get("b") is not None


def test_a_damaged_file_counts_as_empty_and_is_replaced(tmp_path):
    AlgorithmStore("gpu", tmp_path).put("a", algorithm(1))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    store = AlgorithmStore("gpu", tmp_path)
    assert store.get("a") is None
    store.put("b", algorithm(2))
    assert AlgorithmStore("gpu", tmp_path).get("b") is not None


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = AlgorithmStore("gpu", None)
    store.put("a", algorithm(1))
    assert store.get("a") is not None
    assert not list(tmp_path.iterdir())


def test_verdicts_are_kept_beside_algorithms_and_apart_from_them(tmp_path):
    store = AlgorithmStore("gpu", tmp_path)
    store.put("a", algorithm(7))
    store.put_choice("b", True)
    store.put_choice("c", False)
    again = AlgorithmStore("gpu", tmp_path)
    assert [again.choice(key) for key in "abcd"] == [None, True, False, None]
    assert again.get("b") is None and again.get("a") is not None


def test_a_returned_algorithm_is_a_copy():
    store = AlgorithmStore("gpu", None)
    store.put("a", algorithm(1))
    first = store.get("a")
    assert first is not None
    first.data[0] = 99
    second = store.get("a")
    assert second is not None and second.data[0] == 1
