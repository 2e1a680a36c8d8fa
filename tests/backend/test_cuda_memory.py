"""The GPU's memory as a model uses it: decoding takes no more of it, a limit holds, arrays come and go."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
import pytest
from model_kit import make_model, prompt_of

from bminf_lite.api import Model
from bminf_lite.backend.base import Backend
from bminf_lite.errors import OutOfMemory

TOKENS = prompt_of(33)


def model_on(ops: Backend, context: int = 4096) -> Model:
    return make_model(ops, quantized=True, max_position_embeddings=context)


@pytest.fixture
def small_gpu():
    """A backend of its own with little memory."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from bminf_lite.backend.cuda.backend import CudaBackend

    backend = CudaBackend(0, "48MiB")
    yield backend
    backend.close()


@pytest.mark.gpu
def test_decoding_in_the_steady_state_takes_no_memory(cuda_backend):
    """The sampler's arrays come from blocks that the step before has given back."""
    model = model_on(cuda_backend)
    model.generate([1, 2, 3], max_new_tokens=100, seed=1, ignore_eos=True)
    peaks = [
        (cuda_backend.memory()["peak_used"], cuda_backend.memory()["peak_reserved"])
        for _ in model.stream([1, 2, 3], max_new_tokens=100, seed=1, ignore_eos=True)
    ]
    assert len(set(peaks[10:])) == 1


@pytest.mark.gpu
def test_running_out_is_told_and_leaves_the_model_usable(small_gpu):
    model = model_on(small_gpu, 2**20)
    expected = model.generate([1, 2, 3], max_new_tokens=8, temperature=0).token_ids
    with pytest.raises(OutOfMemory, match="allowed"):
        model.generate([[1] * 400_000] * 16, max_new_tokens=2)
    assert model.generate([1, 2, 3], max_new_tokens=8, temperature=0).token_ids == expected
    assert small_gpu.memory()["peak_reserved"] <= small_gpu.memory()["limit"] <= 48 << 20


@pytest.mark.gpu
def test_device_arrays_come_and_go_without_a_copy(cuda_backend):
    import cupy as cp

    model = model_on(cuda_backend)
    ids = np.array(TOKENS)
    expected = model.logits(ids)
    for given in (cp.asarray(ids), cp.asarray(ids.astype(np.int32))):
        logits = model.logits(given, device=True)
        assert isinstance(logits, cp.ndarray)
        other = cp.from_dlpack(logits)
        assert other.data.ptr == logits.data.ptr
        np.testing.assert_array_equal(cp.asnumpy(other), expected)


@pytest.mark.gpu
def test_what_writes_token_ids_on_another_stream_has_ended_before_they_are_read(cuda_backend):
    import cupy as cp

    class Interface:
        """An array that only CUDA's array interface gives access to, with the stream that writes it."""

        def __init__(self, array: cp.ndarray):
            self.array = array

        @property
        def __cuda_array_interface__(self) -> dict[str, object]:
            return self.array.__cuda_array_interface__

    model = model_on(cuda_backend)
    expected = model.logits(TOKENS)
    ids, right, large = cp.full(len(TOKENS), -1), cp.asarray(TOKENS), cp.empty(1 << 22, np.float32)
    for offered in (ids, Interface(ids)):
        with cp.cuda.Stream(non_blocking=True) as stream:
            ids[...] = -1
            for _ in range(200):
                large[...] = 1  # some milliseconds in all
            ids[...] = right
            found = model.logits(offered)
            stream.synchronize()
        np.testing.assert_array_equal(found, expected)


@pytest.mark.gpu
def test_two_models_in_one_process_do_not_tread_on_each_other(small_gpu, cuda_backend):
    prompts = [[1, 2, 3], [4, 5]]
    models_ = [model_on(small_gpu), model_on(cuda_backend)]
    alone = [[r.token_ids for r in m.generate(prompts, max_new_tokens=20, seed=1)] for m in models_]
    streams = [m.stream(prompts, max_new_tokens=20, seed=1) for m in models_]
    found: list[list[list[int]]] = [[[], []], [[], []]]
    for pieces in zip(*streams, strict=True):
        for which, piece in enumerate(pieces):
            found[which][piece.index] += piece.token_ids
    assert found == alone


def test_arrays_of_other_libraries_are_token_ids(backend):
    class Foreign:
        """An array that only DLPack gives access to."""

        def __init__(self, values: np.ndarray):
            self.values = values

        def __dlpack__(self, **options: Any) -> Any:
            return self.values.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.values.__dlpack_device__()

    if backend.name != "cpu":
        pytest.skip("host memory is not this backend's")
    model = model_on(backend)
    ids = np.array(TOKENS, np.int64)
    np.testing.assert_array_equal(model.logits(Foreign(ids)), model.logits(ids))
    assert model.memory() == {}


def used_at_rest(ops: Backend, expected: int) -> int:
    """The bytes in use once they are ``expected``, or after a second: the thread of the engine drops a step's arrays
    after it has given the logits to their reader."""
    end = time.monotonic() + 1
    while ops.memory()["used"] != expected and time.monotonic() < end:
        time.sleep(1e-3)
    return ops.memory()["used"]


@pytest.mark.gpu
def test_a_step_gives_its_memory_back_without_the_garbage_collector(small_gpu):
    model = model_on(small_gpu)
    for ids in ([1, 2, 3], [4]):
        model.logits(ids)
    time.sleep(0.05)  # see used_at_rest
    gc.collect()
    gc.disable()
    try:
        before = small_gpu.memory()["used"]
        for ids in ([1, 2, 3], [4]):
            model.logits(ids)
            assert used_at_rest(small_gpu, before) == before
    finally:
        gc.enable()


@pytest.mark.gpu
def test_what_only_the_first_run_allocates_does_not_shape_a_recording(cuda_backend):
    """As where a product is timed at first: then its memory must fit a recording that has none of that."""
    empty, first = cuda_backend.arrays.empty, [True]

    def work():
        if first and first.pop():
            empty((3000,), np.uint8)
            return empty((1000,), np.uint8)
        kept = empty((2000,), np.uint8)
        empty((1000,), np.uint8)
        return kept, empty((5000,), np.uint8)

    repeated = cuda_backend.capture(work)
    for _ in range(5):
        repeated()
