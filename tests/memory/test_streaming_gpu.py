"""Streaming on a real GPU: equal logits, a limit that holds as the driver sees it, and copies as fast as the link."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint
from model_kit import CONFIG, make_model, prompt_of, request, run
from tiny_models import RandomWeights

from bminf_lite import models
from bminf_lite.api import Model, load
from bminf_lite.backend.base import Backend
from bminf_lite.backend.meta import MetaBackend
from bminf_lite.backend.values import Placement
from bminf_lite.bench.model import random_model
from bminf_lite.checkpoint.migrate import migrate
from bminf_lite.cuda.runtime.driver import Device
from bminf_lite.errors import CheckpointError
from bminf_lite.memory.device import measure_speeds
from bminf_lite.memory.planner import MemoryPlan, evenly_spaced

pytestmark = pytest.mark.gpu

LAYERS = 7
WIDE = {
    "num_hidden_layers": 12, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 1024,
}  # fmt: skip
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


def test_the_survey_counts_what_the_arena_gives() -> None:
    backend, config = open_backend(), CONFIG | {"hidden_size": 96, "intermediate_size": 160, "vocab_size": 320}
    before = backend.arena.used
    architecture = models.find(config)
    parsed, weights, meta = architecture.parse(config), RandomWeights(config, 1, True), MetaBackend()
    architecture.Model(parsed, weights, meta)
    model = architecture.Model(parsed, weights, backend)
    assert backend.arena.used - before == sum(meta.layer_bytes[0]) + meta.non_layer_bytes
    assert model is not None
    backend.close()


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


@pytest.mark.parametrize("how", ["cut short", "written to"])
def test_a_file_that_changes_while_it_is_loaded_is_an_error(tmp_path: Path, how: str) -> None:
    """And no crash: nothing is mapped. The same process then loads another."""
    from bminf_lite.backend.cuda.backend import CudaBackend

    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96}
    migrate(tiny_checkpoint.write(tmp_path / "source", **sizes), tmp_path / "int8")
    shutil.copytree(tmp_path / "int8", tmp_path / "changing")
    file, calls, weight = tmp_path / "changing" / "model.safetensors", [], CudaBackend.weight

    def change(self: CudaBackend, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            os.truncate(file, 5000 if how == "cut short" else file.stat().st_size)
        return weight(self, *arguments)

    def tokens() -> list[int]:
        with load(tmp_path / "int8", "cuda") as model:
            return model.generate([5, 6, 7], max_new_tokens=4, temperature=0).token_ids

    expected = tokens()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match="changed since it was opened"):
        patch.setattr(CudaBackend, "weight", change)
        load(tmp_path / "changing", "cuda")
    assert tokens() == expected


def test_running_out_of_memory_leaves_the_model_usable() -> None:
    model, _ = wide_model(480 << 20)
    expected = model.generate(prompt_of(50), max_new_tokens=5, temperature=0).token_ids
    with pytest.raises(MemoryError):
        for _ in model.stream([prompt_of(900 + i) for i in range(64)], max_new_tokens=50):
            time.sleep(0)
    assert model.generate(prompt_of(50), max_new_tokens=5, temperature=0).token_ids == expected
    model.close()
