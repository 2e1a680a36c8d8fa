"""Streaming on a GPU: equal logits, limits that hold, failures that leave everything usable, and the link's speed."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_kit import CONFIG, make_model, prompt_of, request, run

from bminf_lite.api import Model
from bminf_lite.backend.base import Backend
from bminf_lite.backend.values import BLOCK_SIZE, Placement
from bminf_lite.bench.model import random_model
from bminf_lite.checkpoint.opened_model import describe_model
from bminf_lite.checkpoint.recipe import load_recipe
from bminf_lite.cuda.runtime.driver import Device
from bminf_lite.errors import OutOfMemory
from bminf_lite.memory.cache_memory import PAGE_BYTES
from bminf_lite.memory.device import measure_speeds
from bminf_lite.memory.planner import Machine, MemoryPlan, evenly_spaced, plan_memory
from bminf_lite.placement import recipe_schemes, requirements

pytestmark = pytest.mark.gpu

LAYERS = 7
WIDE = {
    "num_hidden_layers": 12,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 1024,
}
"""Twelve layers of about 60 MiB."""


def open_backend(memory_limit: int | str | None = None) -> Any:
    from bminf_lite.backend.cuda.backend import CudaBackend

    return CudaBackend(0, memory_limit)


@pytest.fixture
def streaming() -> Iterator[Backend]:
    """A backend of its own that streams five of seven layers."""
    backend = open_backend()
    backend.placement = Placement(evenly_spaced(LAYERS, 5), 2, 1 << 20, True)
    yield backend
    backend.close()


@pytest.mark.parametrize("quantized", [False, True])
def test_streamed_and_resident_give_equal_results(streaming: Backend, cuda_backend: Backend, quantized: bool) -> None:
    resident = make_model(cuda_backend, num_hidden_layers=LAYERS, quantized=quantized)
    model = make_model(streaming, num_hidden_layers=LAYERS, quantized=quantized)
    for length in (1, 2, 33, 60):
        np.testing.assert_array_equal(model.logits(prompt_of(length)), resident.logits(prompt_of(length)))
    both = [run(m, [request(i, prompt_of(5 + i), max_new_tokens=20) for i in range(3)]) for m in (model, resident)]
    assert [r.output_token_ids for r in both[0]] == [r.output_token_ids for r in both[1]]


@pytest.mark.parametrize("trouble", ["does not pin", "nearly full"])
def test_weights_that_cannot_be_pinned_are_streamed_all_the_same(
    streaming: Backend, cuda_backend: Backend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trouble: str
) -> None:
    from bminf_lite.backend.cuda import streamed_weights

    def refuse(*_: int) -> None:
        raise streamed_weights.runtime.CUDARuntimeError(2)

    if trouble == "nearly full":
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(streamed_weights, "available_memory", lambda: streamed_weights.HOST_RESERVE)
    else:
        monkeypatch.setattr(streamed_weights.runtime, "hostRegister", refuse)
    with pytest.warns(RuntimeWarning, match=trouble):
        model = make_model(streaming, num_hidden_layers=LAYERS)
    resident = make_model(cuda_backend, num_hidden_layers=LAYERS)
    np.testing.assert_array_equal(model.logits(prompt_of(9)), resident.logits(prompt_of(9)))
    assert list(tmp_path.iterdir()) == [], "the file has no name"


@pytest.mark.filterwarnings("ignore:the host's memory")
def test_a_disk_that_is_full_too_is_an_error(streaming: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    from bminf_lite.backend.cuda import streamed_weights

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(streamed_weights, "available_memory", lambda: 0)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfMemory, match=r"neither the host's memory nor .*No space left"):
        make_model(streaming, num_hidden_layers=LAYERS)


@pytest.mark.parametrize("slot_size, message", [(512, "too small"), (1 << 40, "out of device memory")])
def test_slots_that_are_too_small_or_too_large_are_an_error(streaming: Backend, slot_size: int, message: str) -> None:
    streaming.placement = replace(streaming.placement, slot_size=slot_size)
    with pytest.raises(OutOfMemory, match=message):
        make_model(streaming, num_hidden_layers=LAYERS)


def test_after_a_layer_that_fails_weights_are_made_outside_of_slots(streaming: Any) -> None:
    def fail(index: int) -> None:
        raise ValueError("a damaged weight")

    streaming.placement = Placement((0,), 2, 1 << 20)
    with pytest.raises(ValueError, match="damaged"):
        streaming.blocks(fail, 2)
    before = streaming.arena.used
    kept = streaming.weight([np.zeros((64, 64), np.float16)])
    assert kept is not None and streaming.arena.used == before + 64 * 64 * 2


def test_a_plan_holds_what_it_promises() -> None:
    """Under limits that hold more or less of the model, a prompt and completion of the planned length stay within."""
    sizes = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 512}
    streamed = []
    for mebibytes in (52, 58):
        backend = open_backend(mebibytes << 20)
        bench_model = random_model("small", CONFIG | sizes | {"max_position_embeddings": 256}, backend)
        assert bench_model.plan is not None and bench_model.plan.context == 256
        model = Model(bench_model.network, bench_model.engine_config)
        model.generate(prompt_of(252), max_new_tokens=4, seed=1, ignore_eos=True)
        assert backend.memory()["peak_reserved"] <= backend.memory()["limit"] <= mebibytes << 20
        streamed.append(len(bench_model.plan.streamed))
        model.close()
    assert streamed == [8, 5]


WINDOWS = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 128,
    "head_dim": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "sliding_window": 64,
    "sliding_window_pattern": 2,
}
"""A layer with a window, and one without."""


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache", ["fp16", "int8"])
def test_a_plan_counts_the_pages_of_the_cache_and_its_windows(kv_cache: str) -> None:
    """Under the least limit at which nothing is streamed, a sequence of the whole context has room."""
    shape = CONFIG | WINDOWS
    needed = requirements(
        described := describe_model(shape), recipe_schemes(described.spec, load_recipe("w8a8")), kv_cache
    )
    limit = plan_memory(needed, Machine(1 << 34)).total_bytes
    backend = open_backend(-(-limit // PAGE_BYTES) * PAGE_BYTES)
    bench_model = random_model("windows", shape, backend, kv_cache)
    plan = bench_model.plan
    assert plan is not None and plan.context == 4096 and not plan.streamed
    without_windows = sum(group.nbytes(1 + plan.context // BLOCK_SIZE) for group in needed.cache)
    assert plan.cache_bytes < 0.9 * without_windows
    with Model(bench_model.network, bench_model.engine_config) as model:
        model.generate(prompt_of(4080), max_new_tokens=16, seed=1, ignore_eos=True)
        assert backend.memory()["peak_reserved"] <= backend.memory()["limit"]


def wide_model(memory_limit: int) -> tuple[Model, MemoryPlan]:
    """Weights are made on the GPU. The plan has room for the whole context, 1,024 tokens."""
    bench_model = random_model("wide", CONFIG | WIDE, open_backend(memory_limit))
    assert bench_model.plan is not None and bench_model.plan.streamed and bench_model.plan.context == 1024
    return Model(bench_model.network, bench_model.engine_config), bench_model.plan


class LeastFree(threading.Thread):
    """Asks the driver each millisecond how much of the GPU is free, as long as a ``with``; ``nbytes`` is the least."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.device = Device(0)
        self.nbytes = self.device.memory()[0]
        self.samples = 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(1e-3):
            self.nbytes = min(self.nbytes, self.device.memory()[0])
            self.samples += 1

    def __enter__(self) -> LeastFree:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.join()


@pytest.mark.alone
def test_the_limit_holds_as_the_driver_sees_it() -> None:
    """During load, a prompt of the whole context, and decoding; beside the CUDA context and the kernels' code, which
    are there from a first run of the same model.
    """
    limit = 480 << 20
    for first in (True, False):
        before = Device(0).memory()[0]
        with LeastFree() as least:
            model, plan = wide_model(limit)
            model.generate(prompt_of(1000), max_new_tokens=24, seed=1, ignore_eos=True)
        if not first:
            assert least.samples > 50 and before - least.nbytes <= limit
        assert model.ops.memory()["peak_reserved"] <= limit
        assert plan.total_bytes <= limit
        model.close()


def test_ctrl_c_in_the_middle_of_a_step_leaves_the_model_usable(
    streaming: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever in a step it comes: between two layers, before a copy is awaited, before a slot is released."""
    model = make_model(streaming, num_hidden_layers=LAYERS, quantized=True)
    expected = model.logits(prompt_of(20))
    link = streaming.loader._links[0]  # type: ignore[attr-defined]
    for name in ("await_copy", "release", "copy"):
        for count in (1, 4, 7):
            calls = iter([False] * count + [True])
            method = getattr(link, name)

            def interrupted(*arguments: int, calls: Iterator[bool] = calls, method: Any = method) -> None:
                if next(calls, False):
                    raise KeyboardInterrupt
                method(*arguments)

            with monkeypatch.context() as patch:
                patch.setattr(link, name, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    for _ in model.stream(prompt_of(9), max_new_tokens=30, ignore_eos=True):
                        pass
            np.testing.assert_array_equal(model.logits(prompt_of(20)), expected)


@pytest.mark.alone
def test_a_step_takes_what_the_link_allows() -> None:
    """85 % is the mark; the link is measured in the same run."""
    link = measure_speeds(Device(0)).link
    model, plan = wide_model(480 << 20)
    plan = replace(plan, machine=replace(plan.machine, link=link))
    run(model, [request(0, prompt_of(8), max_new_tokens=8, ignore_eos=True)])
    requests = [request(0, prompt_of(8), max_new_tokens=65, ignore_eos=True)]
    run(model, requests)
    seconds = (requests[0].last_token_time - requests[0].first_token_time) / 64
    model.close()
    assert plan.link_seconds is not None
    print(f"link {link / 1e9:.1f} GB/s, {plan.streamed_bytes / 2**20:.0f} MiB in {seconds * 1e3:.2f} ms")
    assert seconds <= plan.link_seconds / 0.85


def test_running_out_of_memory_leaves_the_model_usable() -> None:
    backend = open_backend(72 << 20)
    backend.placement = Placement(evenly_spaced(LAYERS, 5), 2, 1 << 20, True)
    model = make_model(backend, num_hidden_layers=LAYERS, max_position_embeddings=1 << 17)
    expected = model.generate(prompt_of(50), max_new_tokens=5, temperature=0).token_ids
    with pytest.raises(OutOfMemory):
        model.generate([[1] * 60_000] * 64, max_new_tokens=2)
    assert model.generate(prompt_of(50), max_new_tokens=5, temperature=0).token_ids == expected
    model.close()
