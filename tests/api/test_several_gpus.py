"""A model divided among ranks on the CPU, as it is loaded, planned and given options."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import random_adapter
from click.testing import CliRunner

import bminf_lite
from bminf_lite import backend
from bminf_lite.backend.adapter_slots import AdapterSlots, Part
from bminf_lite.bench.model import read_shape
from bminf_lite.cli import main
from bminf_lite.cuda.runtime import driver
from bminf_lite.errors import DeviceError, UsageError

PROMPTS = ["hello", "a longer one", "hello again and again"]


def test_a_float_model_gives_the_same_tokens(source: Path) -> None:
    with bminf_lite.load(source, device="cpu") as model:
        expected, logits = model.generate(PROMPTS, max_new_tokens=12), model.logits(model.encode(PROMPTS[2]))
    with bminf_lite.load(source, device="cpu", gpus=2) as model:
        found = model.generate(PROMPTS, max_new_tokens=12)
        np.testing.assert_allclose(model.logits(model.encode(PROMPTS[2])), logits, atol=1e-4 * np.abs(logits).max())
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]


def test_drafts_grammars_and_penalties_work(source: Path) -> None:
    options = {"max_new_tokens": 12, "temperature": 0.9, "seed": 5, "repetition_penalty": 1.2}
    results = []
    for speculative in ("none", "ngram"):
        with bminf_lite.load(source, device="cpu", gpus=2, speculative=speculative) as model:
            results.append([result.token_ids for result in model.generate(PROMPTS, **options)])  # type: ignore[arg-type]
            assert model.generate("hello", choice=["yes", "no"]).text in ("yes", "no")
    assert results[0] == results[1]


def test_a_draft_model_is_divided_too(source: Path) -> None:
    drafts = {"model": str(source), "num_speculative_tokens": 3, "adaptive": False}
    with bminf_lite.load(source, device="cpu") as model:
        expected = [result.token_ids for result in model.generate(PROMPTS, max_new_tokens=12, temperature=0)]
    with bminf_lite.load(source, device="cpu", gpus=2, speculative=drafts) as model:
        found = [result.token_ids for result in model.generate(PROMPTS, max_new_tokens=12, temperature=0)]
        assert model.stats().accepted_tokens > 0
    assert found == expected


def test_adapters_prefixes_and_drafts_together(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one slot for two adapters, of which one comes later: between two steps, as the ranks' drivers need it."""
    threads: list[str] = []
    prepare = AdapterSlots.prepare

    def watched(slots: AdapterSlots, parts: Mapping[str, Part]) -> list[Any]:
        threads.append(threading.current_thread().name)
        return prepare(slots, parts)

    folders = {name: random_adapter(tmp_path / name, source, seed=i) for i, name in enumerate("ab")}
    prompts, options = ["hello again and again " * 4 + end for end in "xyz"], {"max_new_tokens": 12, "temperature": 0}
    monkeypatch.setattr(AdapterSlots, "prepare", watched)
    results = []
    for gpus, speculative in ((1, "none"), (2, "ngram")):
        with bminf_lite.load(
            source,
            device="cpu",
            gpus=gpus,
            speculative=speculative,
            adapters={"a": folders["a"]},
            max_adapters=1,
            max_batch=16,
        ) as model:
            threads.clear()
            model.load_adapter("b", folders["b"])
            inside = [name == "bminf-lite-engine" for name in threads]
            assert inside == ([False] if gpus == 1 else [True, True])
            streams = [
                model.stream(p, adapter=name, **options) for _ in range(2) for p in prompts for name in ("a", None, "b")
            ]
            results.append(["".join(piece.text for piece in stream) for stream in streams])
            assert model.stats().cached_tokens > 0
    assert results[0] == results[1] and results[0][:9] == results[0][9:]
    assert len(set(results[0][:3])) == 3


def test_each_gpu_of_a_plan_has_its_part(tmp_path: Path) -> None:
    shape = Path(bminf_lite.__file__).parent / "configs" / "llama-3-70b.json"
    one, two = (bminf_lite.plan(shape, gpu_memory="141GB", link=5e10, bandwidth=4e12, gpus=n) for n in (1, 2))
    assert 0.48 < two.resident_bytes / one.resident_bytes < 0.55
    assert two.requirements.cache_per_token * 2 == one.requirements.cache_per_token
    assert read_shape("llama-3-70b")["num_key_value_heads"] % 2 == 0


@pytest.mark.parametrize("gpus", [0, -1, 1.5, "two", 65])
def test_a_number_of_gpus_is_checked(source: Path, gpus: object) -> None:
    with pytest.raises(UsageError, match="gpus"):
        bminf_lite.load(source, device="cpu", gpus=gpus)  # type: ignore[arg-type]


def test_a_number_that_does_not_divide_the_model(source: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be divided among 3 ranks: .* Numbers of ranks that would do: 1, 2"):
        bminf_lite.load(source, device="cpu", gpus=3)


@pytest.mark.skipif(backend.create("auto").name != "cpu", reason="this machine has a GPU")
def test_threads_are_no_gpus_unless_the_cpu_is_named(source: Path) -> None:
    with pytest.raises(DeviceError, match=r"2 GPUs were asked for \(gpus=2\), but this machine has none"):
        bminf_lite.load(source, gpus=2)


def test_the_option_of_the_commands(source: Path) -> None:
    arguments = ["generate", str(source), "hello", "--device", "cpu", "--max-new-tokens", "5"]
    one, two = (CliRunner().invoke(main, [*arguments, *more]) for more in ((), ("--gpus", "2")))
    assert (one.exit_code, two.exit_code) == (0, 0) and one.stdout == two.stdout


def test_a_gpu_that_cannot_be_used_frees_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Gpu:
        def __init__(self, name: str):
            self.name = name

        def make_current(self) -> None:
            pass

        def close(self) -> None:
            closed.append(self.name)

    def create(device: str, memory_limit: object) -> Gpu:
        if device == "cuda:2":
            raise DeviceError("of the third")
        return Gpu(device)

    monkeypatch.setattr(backend, "create", create)
    monkeypatch.setattr(driver, "device_count", lambda: 4)
    with pytest.raises(DeviceError, match="of the third"):
        backend.create_apart(4, "cuda:0")
    assert closed == ["cuda:0", "cuda:1"]
