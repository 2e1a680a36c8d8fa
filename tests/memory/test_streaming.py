"""Streaming on a simulated device: equal numbers, no slot overwritten while in use, copies and compute overlapped."""

from __future__ import annotations

import functools
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_kit import make_model, prompt_of, request, run
from simulated import SimulatedDevice, SimulatedLink
from tiny_models import DECODERS, FAMILIES, GPTS, RandomWeights, TinyEncoderDecoder, TinyModel, goldens

from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.engine.request import Request
from bminf_lite.memory.planner import evenly_spaced, step_time
from bminf_lite.memory.streaming import Prefetcher, StreamedBlocks

LAYERS = 7


def stack(layers: int, streamed: int, slots: int, copy: float) -> tuple[SimulatedLink, StreamedBlocks[int]]:
    """Blocks that are their own numbers, and copies that take ``copy`` seconds."""
    link = SimulatedLink(slots, copy)
    return link, StreamedBlocks(range(layers), evenly_spaced(layers, streamed), link, slots)


def decode(
    link: SimulatedLink, blocks: StreamedBlocks[int], streamed: tuple[int, ...], layer: float, head: float
) -> float:
    """A step whose layers compute for ``layer`` seconds each; returns when it ends."""
    for block in blocks:
        link.compute(layer, streamed.index(block) if block in streamed else None)
    link.compute(head)
    return link.compute_time


shapes = st.tuples(st.integers(3, 40), st.integers(2, 4)).flatmap(
    lambda s: st.tuples(st.just(s[0]), st.integers(min(s[1] + 1, s[0]), s[0]), st.just(s[1]))
)
"""Layers, how many of them are streamed, and slots."""


@given(shapes, st.floats(4, 200), st.floats(0, 2))
def test_a_step_takes_what_the_plan_says(shape: tuple[int, int, int], copy: float, head: float) -> None:
    """The busier of link and compute never waits. ``copy`` and ``head`` are in times of a layer's compute, and
    a link is 10 to 100 times as slow as a GPU's memory.
    """
    assert measured(shape, copy, head) == pytest.approx(predicted(shape, copy, head), rel=0.05)


@given(shapes, st.floats(0.01, 10), st.floats(0, 2))
def test_a_link_about_as_fast_as_compute_loses_little(shape: tuple[int, int, int], copy: float, head: float) -> None:
    """Where neither is always the slower one, two slots cannot hide every unevenness."""
    assert measured(shape, copy, head) <= 1.25 * predicted(shape, copy, head)


def measured(shape: tuple[int, int, int], copy: float, head: float) -> float:
    """Simulated time of a step in the steady state."""
    layers, count, slots = shape
    link, blocks = stack(layers, count, slots, copy)
    ends = [decode(link, blocks, evenly_spaced(layers, count), 1.0, head) for _ in range(30)]
    return (ends[-1] - ends[9]) / 20


def predicted(shape: tuple[int, int, int], copy: float, head: float) -> float:
    layers, count, slots = shape
    return step_time(count, layers, slots, count * copy, layers + head)


@given(shapes, st.floats(0.01, 10))
def test_copies_go_round_in_order_and_leave_slots_in_use_alone(shape: tuple[int, int, int], copy: float) -> None:
    layers, count, slots = shape
    link, blocks = stack(layers, count, slots, copy)
    for _ in range(3):
        decode(link, blocks, evenly_spaced(layers, count), 1.0, 0.5)
    assert [(s.layer, s.slot) for s in link.copies] == [
        (i % count, i % count % slots) for i in range(3 * count + min(slots, count))
    ]
    assert all(a.end <= b.start for a, b in pairwise(link.copies))
    for slot in range(slots):
        spans = sorted((s for s in link.spans if s.slot == slot), key=lambda s: (s.start, s.end))
        assert all(a.end <= b.start for a, b in pairwise(spans))
        assert all(a.layer == b.layer for a, b in pairwise(spans) if b.what == "compute")


def test_the_next_step_s_first_copy_starts_before_this_step_ends() -> None:
    link, blocks = stack(8, 4, 2, 1.0)
    first_end = decode(link, blocks, evenly_spaced(8, 4), 0.1, 3.0)
    early = [s for s in link.copies if s.start < first_end][4:]
    assert [s.layer for s in early] == [0, 1]
    assert max(s.end for s in early) <= first_end


def test_a_chunk_of_a_prompt_passes_each_layer_once() -> None:
    device = SimulatedDevice(evenly_spaced(LAYERS, 5))
    model = make_model(device, num_hidden_layers=LAYERS)
    model.logits(prompt_of(60))
    assert len(device.link.copies) == 5 + 2


# -- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.sets(st.integers(0, LAYERS - 1), min_size=1), st.integers(1, 3), st.booleans())
def test_streamed_and_resident_give_equal_tokens_and_logits(streamed: set[int], slots: int, quantized: bool) -> None:
    device = SimulatedDevice(sorted(streamed), slots)
    model = make_model(device, num_hidden_layers=LAYERS, quantized=quantized)
    logits, requests = resident_results(quantized)
    for _ in range(2):
        np.testing.assert_array_equal(model.logits(prompt_of(20)), logits)
    found = run(model, short_requests())
    assert [r.output_token_ids for r in found] == [r.output_token_ids for r in requests]
    assert [r.logprobs for r in found] == [r.logprobs for r in requests]


@functools.cache
def resident_results(quantized: bool) -> tuple[np.ndarray, list[Request]]:
    model = make_model(CpuBackend(), num_hidden_layers=LAYERS, quantized=quantized)
    return model.logits(prompt_of(20)), run(model, short_requests())


def short_requests() -> list[Request]:
    return [request(i, prompt_of(5 + i), max_new_tokens=6) for i in range(3)]


@pytest.mark.parametrize("family", [*FAMILIES, *GPTS, *DECODERS])
def test_every_decoder_can_be_streamed(family: str) -> None:
    golden = next(goldens(family))
    weights = RandomWeights(golden.config, golden.seed)
    device = SimulatedDevice(range(20))
    logits = [TinyModel(b, golden.config, weights).run(golden.tokens) for b in (device, CpuBackend())]
    np.testing.assert_array_equal(*logits)
    assert device.link.spans


@pytest.mark.parametrize("family", ["t5", "mt5", "umt5"])
def test_an_encoder_and_a_decoder_have_slots_of_their_own(family: str) -> None:
    golden = next(goldens(family))
    assert golden.source is not None
    weights = RandomWeights(golden.config, golden.seed)
    device, results = SimulatedDevice(range(20)), []
    for backend in (device, CpuBackend()):
        model = TinyEncoderDecoder(backend, golden.config, weights)
        for _ in range(2):
            model.clear()
            model.read(golden.source)
            results.append(np.concatenate([model.run(golden.tokens[i : i + 1]) for i in range(len(golden.tokens))]))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    assert len(device.links) == 2 and all(link.spans for link in device.links)


@pytest.mark.parametrize("first", range(1, 8))
def test_ctrl_c_at_any_call_leaves_the_model_usable(first: int) -> None:
    """Before and after the work of every call of the link, in the first steps."""
    ids = prompt_of(9)
    expected = make_model(CpuBackend(), num_hidden_layers=LAYERS).logits(ids)
    for refuse_at in range(first, 60, 7):
        device = SimulatedDevice(evenly_spaced(LAYERS, 5))
        model = make_model(device, num_hidden_layers=LAYERS)
        device.link.refuse_at = refuse_at
        with pytest.raises(KeyboardInterrupt) as caught:
            for _ in range(3):
                np.testing.assert_array_equal(model.logits(ids), expected)
        for _ in range(2):
            np.testing.assert_array_equal(model.logits(ids), expected)
        assert caught.tb, "which keeps the iteration that was left early"


def test_a_failing_operation_leaves_the_model_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(evenly_spaced(LAYERS, 5))
    model = make_model(device, num_hidden_layers=LAYERS)
    ids = prompt_of(9)
    expected = model.logits(ids)
    attention, calls = device.attention, []

    def fail(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError("out of memory")
        return attention(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(device, "attention", fail)
    with pytest.raises(MemoryError):
        model.logits(ids)
    np.testing.assert_array_equal(model.logits(ids), expected)


def test_a_later_iteration_ends_the_one_before() -> None:
    _, blocks = stack(6, 4, 2, 1.0)
    early = iter(blocks)
    next(early)
    assert list(blocks) == list(range(6))
    assert list(early) == []


def test_a_fresh_start_copies_after_all_compute() -> None:
    """After a step that ended early, compute that was not recorded may still run."""
    streamed = evenly_spaced(8, 4)
    link, blocks = stack(8, 4, 2, 1.0)
    for block in blocks:
        if block == streamed[1]:
            link.compute(100.0, 1)
            break
    link.refuse_at = link.calls + 1
    with pytest.raises(KeyboardInterrupt):
        iter(blocks)
    busy_until, before = link.compute_time, len(link.copies)
    decode(link, blocks, streamed, 1.0, 0.0)
    assert link.copies[before].layer == 0 and link.copies[before].start >= busy_until


@pytest.mark.parametrize("mistake", ["compute does not wait", "the slot is released too early"])
def test_the_simulation_finds(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    acquire = Prefetcher.acquire

    def acquire_and_release(self: Prefetcher, layer: int) -> None:
        acquire(self, layer)
        self.release(layer)

    if mistake == "compute does not wait":
        monkeypatch.setattr(SimulatedLink, "await_copy", lambda self, slot: None)
    else:
        monkeypatch.setattr(Prefetcher, "acquire", acquire_and_release)
    model = make_model(SimulatedDevice(evenly_spaced(LAYERS, 5)), num_hidden_layers=LAYERS)
    ids = prompt_of(9)
    with np.errstate(all="ignore"):
        assert not np.array_equal(model.logits(ids), make_model(CpuBackend(), num_hidden_layers=LAYERS).logits(ids))
