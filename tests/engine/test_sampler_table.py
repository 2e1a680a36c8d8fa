"""The sampler's table: sequences that come and go choose the tokens that they choose alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.backend.base import Backend
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.backend.sampling import NULL_ROW, SamplerVariant, SequenceSampling, state_of
from bminf_lite.engine.sampler_rows import SamplerRows, TableSize
from bminf_lite.engine.sampler_table import SamplerTable
from bminf_lite.engine.sampling_params import SamplingParams, sequence_sampling

VOCAB, EOS = 45, frozenset({7, 11})
OPTIONS = [
    {},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "presence_penalty": 0.7},
    {"repetition_penalty": 1.4, "logprobs": 5},
    {"temperature": 1.2, "logit_bias": {3: 4.0, 40: -100}, "min_tokens": 3},
]


def logits_of(name: int, step: int) -> np.ndarray:
    """What the model gives a sequence at a step."""
    return np.random.default_rng([name, step]).standard_normal(VOCAB).astype(np.float32) * 3


def mask_of(name: int, step: int) -> np.ndarray:
    words = np.random.default_rng([name, step, 1]).integers(0, 2**32, 2, np.uint32)
    return words | np.uint32(1 << 20)


class Table:
    """The rows on the host and the table on a device, written at once."""

    def __init__(self, ops: Backend, max_num_seqs: int, **limits: int):
        size = TableSize(max_num_seqs, VOCAB, **limits)
        self.rows, self.device = SamplerRows(size), SamplerTable(ops, size)
        self.has_room, self.remove, self.variant = self.rows.has_room, self.rows.remove, self.rows.variant

    def add(self, sequence: SequenceSampling, masked: bool = False) -> int:
        row = self.rows.add(sequence, masked)
        self.device.write(self.rows.take_writes())
        return row

    def write_masks(self, masks: dict[int, np.ndarray]) -> None:
        def fill(target: np.ndarray, places: list[int]) -> None:
            target[places] = list(masks.values())

        self.device.write_masks(self.rows.fill_masks(list(masks), fill))


def make_sequence(name: int, generated: list[int]):
    params = SamplingParams(seed=name // 2, **OPTIONS[name % len(OPTIONS)])
    return params, sequence_sampling(params, name, [name % VOCAB, 1, 1], generated, EOS)


def alone(name: int, steps: int, masked: bool) -> list[list[int]]:
    """The packed results of a sequence that runs by itself."""
    _, sequence = make_sequence(name, [])
    state, results = state_of([sequence], VOCAB), []
    for step in range(steps):
        if masked:
            state.masks = mask_of(name, step)[None]
            state.columns["mask_row"][1] = 0
        results.append(Backend(np.float16).sample(logits_of(name, step)[None], state)[:, 0].tolist())
    return results


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ops(request):
    return request.getfixturevalue("cuda_backend") if request.param == "cuda" else CpuBackend()


@given(st.data())
def test_sequences_that_come_and_go_choose_what_they_choose_alone(ops, data):
    """They join and leave at any step, are preempted and come back, and steps are padded with the null row."""
    table, width = Table(ops, 4, max_penalized=2, max_masked=2), 6
    rows = ops.array(np.zeros(width, np.int32))
    running: dict[int, tuple[int, bool]] = {}
    generated: dict[int, list[int]] = {}
    results: dict[int, list[list[int]]] = {}
    names = iter(range(100))
    for _ in range(data.draw(st.integers(1, 12))):
        for name in [n for n in running if data.draw(st.integers(0, 4)) == 0]:
            table.remove(running.pop(name)[0])
        waiting = [*[n for n in generated if n not in running and n % 3 == 0][:1], next(names)]
        for name in waiting[: data.draw(st.integers(0, 2))]:
            masked = name % 4 == 3
            _, sequence = make_sequence(name, generated.setdefault(name, []))
            if table.has_room(sequence.penalized, masked):
                running[name] = table.add(sequence, masked), masked
        order = data.draw(st.permutations([*running, *[None] * (width - len(running))]))
        index = np.array([NULL_ROW if n is None else running[n][0] for n in order], np.int32)
        ops.write(rows, index)
        table.write_masks({row: mask_of(n, len(generated[n])) for n, (row, masked) in running.items() if masked})
        logits = np.stack([np.full(VOCAB, np.nan) if n is None else logits_of(n, len(generated[n])) for n in order])
        state = table.device.state(rows, table.variant(index.tolist()))
        packed = ops.host(ops.sample(ops.array(logits.astype(np.float32)), state))
        for b, name in enumerate(order):
            if name is not None:
                results.setdefault(name, []).append(packed[:, b].tolist())
                generated[name].append(max(int(packed[0, b]), 0))
    for name, found in results.items():
        for part, expected in zip(found, alone(name, len(found), name % 4 == 3), strict=True):
            assert part[0] == expected[0]
            assert np.allclose(*(np.array(p[1:2], np.int32).view(np.float32) for p in (part, expected)), equal_nan=True)
            if len(part) == len(expected) > 2:
                assert part[2:22] == expected[2:22]


def test_what_changes_logits_is_allocated_once():
    ops = CpuBackend()
    table = Table(ops, 3)
    rows = ops.array(np.zeros(2, np.int32))
    greedy = table.add(make_sequence(0, [])[1])
    before = table.device.state(rows, table.variant([greedy, NULL_ROW]))
    assert before.variant == SamplerVariant.GREEDY and before.counts is None
    penalized = table.add(make_sequence(2, [])[1])
    full = table.device.state(rows, table.variant([greedy, penalized]))
    assert full.variant == SamplerVariant.ADJUST and full.table is before.table
    masked = table.add(make_sequence(0, [])[1], masked=True)
    again = table.device.state(rows, table.variant([masked]))
    assert again.variant == SamplerVariant.ADJUST
    assert again.counts is full.counts and again.masks is full.masks and again.bias is full.bias


def test_rows_counts_and_masks_are_bounded_and_given_back():
    table = Table(CpuBackend(), 3, max_penalized=1, max_masked=1)
    plain, penalized = make_sequence(0, [])[1], make_sequence(2, [])[1]
    row = table.add(penalized, masked=True)
    assert not table.has_room(penalized=True) and not table.has_room(masked=True) and table.has_room()
    others = [table.add(plain), table.add(plain)]
    assert not table.has_room() and {row, *others} == {1, 2, 3}
    table.remove(row)
    assert table.has_room(penalized=True, masked=True)
