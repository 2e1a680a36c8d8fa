"""Adapters in the engine: names, slots, who shares a step, and the bits of requests in any company."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import random_adapter, write_adapter
from model_kit import CONFIG, WatchedBackend, run
from safetensors.numpy import load_file
from stub_runner import Driver, adapter_named, make_config, make_request
from tiny_models import RandomWeights

import bminf_lite
from bminf_lite import models
from bminf_lite.api import Model
from bminf_lite.backend.adapter_slots import AdapterSlots
from bminf_lite.backend.side_products import Adapter
from bminf_lite.backend.values import BLOCK_SIZE
from bminf_lite.engine.adapters import AdapterRegistry, AdapterSlotTable, LoadedAdapter
from bminf_lite.engine.request import Request
from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.errors import UsageError
from bminf_lite.placement import make_engine_config

WEIGHTS = "adapter_model.safetensors"

# -- names and slots --------------------------------------------------------------------------------------------------


def test_a_name_is_one_adapter_until_it_is_removed() -> None:
    registry = AdapterRegistry()
    first = registry.add("a", "/a", 4, 100, list)
    with pytest.raises(UsageError, match="adapter 'a' is loaded already, from /a: unload it first"):
        registry.add("a", "/b", 4, 100, list)
    second = registry.add("a", "/b", 4, 100, list, replace=True)
    assert registry.find("a") is second and second.serial != first.serial and len(registry) == 1
    assert registry.remove("a") is second
    for name in ("a", 1, None):
        with pytest.raises(UsageError, match="but the model has none: load it first"):
            registry.find(name)  # type: ignore[arg-type]


def test_the_least_recently_used_adapter_that_nobody_uses_gives_its_slot() -> None:
    table, (a, b, c) = AdapterSlotTable(2), map(adapter_named, "abc")
    assert [table.acquire(x) for x in (a, b, a, None)] == [1, 2, 1, 0]
    assert not table.has_room(c) and table.has_room(a) and table.has_room(None)
    assert [(w.slot, w.adapter) for w in table.take_writes()] == [(1, a), (2, b)] and not table.take_writes()
    for adapter in (b, a):
        table.release(adapter)
    assert table.has_room(c)
    assert table.acquire(c) == 2
    assert not table.has_room(b), "one request still uses a"
    table.release(a)
    assert table.acquire(b) == 1
    assert [(w.slot, w.adapter) for w in table.take_writes()] == [(2, c), (1, b)]
    table.clear()
    assert table.acquire(a) == 1


def test_a_request_waits_for_a_slot_and_others_share_one() -> None:
    driver = Driver(make_config(40, num_adapter_slots=1))
    a, b = map(adapter_named, "ab")
    first, second, third = (driver.add(make_request([1, 2, 3, 4, 5], 6, adapter=x)) for x in (a, b, a))
    driver.step()
    assert (first.lora_id, second.lora_id, third.lora_id) == (1, 0, 0), "requests do not pass each other"
    fourth = driver.add(make_request([1, 2, 3, 4, 5], 6, adapter=a, priority=1))
    driver.step()
    assert fourth.lora_id == 1
    driver.run()
    driver.check_results()


def test_requests_with_different_adapters_share_no_blocks() -> None:
    driver = Driver(make_config(40, num_adapter_slots=2))
    a, again = adapter_named("a"), adapter_named("a")
    for adapter, cached in ((None, 0), (a, 0), (None, 8), (a, 8), (again, 0)):
        request = driver.add(make_request(range(9), 2, adapter=adapter))
        driver.run()
        assert request.num_cached_tokens == cached
    driver.check_results()


# -- models -----------------------------------------------------------------------------------------------------------


def adapters_of(slots: AdapterSlots, seed: int, rank: int) -> dict[str, Adapter]:
    """A random adapter of every matrix of a model."""
    rng = np.random.default_rng(seed)
    found = {}
    for site in slots.sites:
        for name, width in zip(site.names, WIDTHS[site.names[0].split(".")[-2]], strict=True):
            features = 48 if "down" in name else 32
            a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((rank, features), (width, rank)))
            found[name] = Adapter(a, b, 0.1)
    return found


WIDTHS = {"q_proj": (32, 16, 16), "o_proj": (32,), "gate_proj": (48, 48), "down_proj": (32,), "lm_head": (61,)}


class AdaptedModel(Model):
    """A tiny model with two adapters, and slots for ``num_slots``."""

    def __init__(self, num_slots: int, num_blocks: int = 40, quantized: bool = True, **options: Any):
        backend = WatchedBackend(1, decode_sizes=(1, 2, 4, 8), prompt_sizes=(16, 64))
        backend.adapter_slots = slots = AdapterSlots(num_slots, 4)
        architecture = models.find(CONFIG)
        config = architecture.parse(CONFIG)
        network = architecture.Model(config, RandomWeights(CONFIG, 3, quantized), backend)
        made = make_engine_config(config, config.cache_layout, None, 8)
        limits = {"num_blocks": (num_blocks,), "num_adapter_slots": num_slots, **options}
        super().__init__(network, replace(made, **limits))
        self.loaded = [None, *(self.adapter(slots, seed, rank) for seed, rank in ((1, 4), (2, 2), (3, 1)))]

    def adapter(self, slots: AdapterSlots, seed: int, rank: int) -> LoadedAdapter:
        prepared = [slots.prepare(adapters_of(slots, seed, rank))]
        return AdapterRegistry().add(str(seed), "", rank, 0, lambda: prepared)


def request(adapter: LoadedAdapter | None, seed: int) -> Request:
    """A prompt that fills a block but for a few tokens. It never ends early, which the engine does not know."""
    tokens = np.random.default_rng(seed).integers(0, 61, BLOCK_SIZE - 4).tolist()
    params = SamplingParams(max_new_tokens=12, seed=seed, temperature=0.0 if seed % 2 else 1.5)
    return Request(0, tokens, params, frozenset([61]), adapter=adapter)


def results(model: AdaptedModel, *wanted: tuple[int, int]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of requests, by the number of an adapter and a seed, that are served together."""
    requests = [request(model.loaded[adapter], seed) for adapter, seed in wanted]
    run(model, requests)
    return [(r.output_token_ids, r.logprobs.tolist()) for r in requests]


WANTED = [(adapter, seed) for seed in (1, 2) for adapter in (0, 1, 2, 3)]


@pytest.fixture(scope="module")
def alone() -> Iterator[dict[tuple[int, int], Any]]:
    """What each request gets by itself, of a model that keeps nothing."""
    with closing(AdaptedModel(3, prefix_cache=False)) as model:
        yield {key: results(model, key)[0] for key in WANTED}


def test_adapters_change_what_a_request_gets(alone: dict[tuple[int, int], Any]) -> None:
    for seed in (1, 2):
        assert len({tuple(alone[adapter, seed][1]) for adapter in range(4)}) == 4


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_the_bits_of_a_request_do_not_depend_on_who_shares_the_step(
    num_slots: int, alone: dict[tuple[int, int], Any]
) -> None:
    with closing(AdaptedModel(num_slots)) as model:
        for order in (WANTED, WANTED[::-1], WANTED[::2]):
            assert results(model, *order) == [alone[key] for key in order]


@pytest.mark.parametrize("options", [{"num_blocks": 4}, {"num_draft_tokens": 3}, {"max_num_batched_tokens": 7}])
def test_nor_on_preemption_drafts_and_pieces(options: dict[str, Any], alone: dict[tuple[int, int], Any]) -> None:
    with closing(AdaptedModel(2, **options)) as model:
        for order in (WANTED, WANTED[::-1]):
            assert results(model, *order) == [alone[key] for key in order]
        stats = model.stats()
        assert stats.preemptions > 0 if "num_blocks" in options else stats.preemptions == 0


def test_a_request_without_an_adapter_has_the_bits_of_a_model_without_room_for_them(
    alone: dict[tuple[int, int], Any],
) -> None:
    with closing(AdaptedModel(1)) as model:
        ops = model.ops
        ops.adapter_slots = None
        architecture = models.find(CONFIG)
        network = architecture.Model(architecture.parse(CONFIG), RandomWeights(CONFIG, 3, True), ops)
        with closing(Model(network, replace(model.engine_config, num_adapter_slots=0))) as plain:
            for seed in (1, 2):
                made = request(None, seed)
                run(plain, [made])
                assert (made.output_token_ids, made.logprobs.tolist()) == alone[0, seed]


def test_a_draft_model_knows_no_adapter_and_changes_no_token(source: Path, int8: Path, tmp_path: Path) -> None:
    """It guesses what the model says without one, which is right more often for a request that has none."""
    adapters = {"a": random_adapter(tmp_path / "a", source, lora_alpha=1)}
    drafts = {"model": str(source), "num_speculative_tokens": 3, "adaptive": False}
    found = []
    for speculative in (None, drafts):
        with bminf_lite.load(int8, device="cpu", adapters=adapters, speculative=speculative) as model:
            wanted = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
            found.append([model.generate("hello there", adapter=name, **wanted) for name in ("a", None)])
    (adapted, plain), (drafted, plainly_drafted) = found
    assert (drafted.token_ids, plainly_drafted.token_ids) == (adapted.token_ids, plain.token_ids)
    assert plainly_drafted.accepted_tokens > drafted.accepted_tokens and drafted.drafts > 0


# -- a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["w8a8", "float"])
def test_on_a_gpu_in_any_company(source: Path, int8: Path, tmp_path: Path, kind: str) -> None:
    """Captured and not, with more adapters than slots: about the logits of a CPU, and for w8a8 the same bits."""
    folders = {str(i): random_adapter(tmp_path / str(i), source, rank, i) for i, rank in enumerate((4, 16, 3))}
    weights, low_rank = (load_file(file) for file in (source / "model.safetensors", folders["2"] / WEIGHTS))
    ends = {name: weights[f"{name}.weight"][::-1].copy() for name in ("lm_head", "model.embed_tokens")}
    saved = {f"base_model.model.{name}.weight": values for name, values in ends.items()}
    write_adapter(folders["2"], {**low_rank, **saved}, r=3)
    folder = int8 if kind == "w8a8" else source
    tokens = np.random.default_rng(3).integers(0, 250, 24)
    wanted = [*enumerate((None, "0", "1", "2", "0", None, "2", "1"), start=5)]
    with bminf_lite.load(folder, device="cpu", adapters=folders) as model:
        expected = {name: model.logits(tokens, adapter=name) for name in (None, *folders)}
    options = {"memory_limit": "512MiB", "max_batch": 8, "adapters": folders, "max_adapters": 2}
    with bminf_lite.load(folder, device="cuda", **options) as model:
        model.warm_up()
        for name, logits in expected.items():
            found = model.logits(tokens, adapter=name)
            assert np.linalg.norm(found - logits) < 0.02 * np.linalg.norm(logits), name

        def served(*wanted: tuple[int, str | None]) -> dict[int, tuple[list[int], list[float]]]:
            requests = [
                Request(
                    0,
                    tokens[:length].tolist(),
                    SamplingParams(max_new_tokens=6, seed=1),
                    adapter=None if name is None else model._with_adapters.registry.find(name),
                )
                for length, name in wanted
            ]
            run(model, requests)
            return {len(r.prompt_token_ids): (r.output_token_ids, r.logprobs.tolist()) for r in requests}

        alone = {length: result for one in wanted for length, result in served(one).items()}
        for order in (wanted, wanted[::-1]):
            together = served(*order)
            assert together == alone if kind == "w8a8" else together.keys() == alone.keys()
