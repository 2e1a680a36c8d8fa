"""The sampling kernels choose the tokens that the definition chooses; they compile everywhere without spills."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checked import repeats
from random_values import random_sampler

from bminf_lite.backend import sampling as definition
from bminf_lite.backend.sampling import SamplerState
from bminf_lite.cuda.kernels import constants
from bminf_lite.cuda.kernels.sampling import sampler as sampling
from bminf_lite.cuda.kernels.sources import SOURCES

INF, NAN = np.float32(np.inf), np.float32(np.nan)
LLAMA = 128256
VOCABS = [1, 2, 31, 1000, 2047, 2048, 2049, 5003, LLAMA]


# ---- without a GPU -----------------------------------------------------------------------------------------------


def test_the_constants_are_the_definitions() -> None:
    source = SOURCES.source("sampling/sample.cuh")

    def values(name: str) -> list[float]:
        match = re.search(rf"{name}\S* = ([^;]+);", source)
        assert match is not None
        return [float.fromhex(text) for text in re.findall(r"(0x[\d.a-f]+p[+-]?\d+)f", match[1])]

    assert values("LOG2_E") == [float(definition.LOG2_E)]
    assert values("EXP2") == [float(c) for c in definition.EXP2_COEFFICIENTS]
    assert f"WEIGHT_BITS = {definition.WEIGHT_BITS};" in source
    assert definition.PROMPT_FLAG == 1 << 30 and "PROMPT_FLAG = 1 << 30;" in source


def test_the_buckets_reach_down_to_the_last_token_of_any_weight() -> None:
    least = np.float32([[0.0, -28.8]])
    assert definition.weights(least, np.float32([0]), np.float32([1]))[0, 1] == 0
    assert 28.8 * definition.LOG2_E * constants.SAMPLING_BUCKETS_PER_OCTAVE < constants.SAMPLING_BUCKETS


# ---- on a GPU ----------------------------------------------------------------------------------------------------

LOGITS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "normal": lambda rng, rows, vocab: rng.normal(0, rng.uniform(0.1, 8), (rows, vocab)),
    "few values": lambda rng, rows, vocab: rng.integers(-3, 4, (rows, vocab)) * rng.choice([0.5, 3, 0.0]),
    "fp16": lambda rng, rows, vocab: rng.normal(0, 3, (rows, vocab)).astype(np.float16),
    "all equal": lambda rng, rows, vocab: np.full((rows, vocab), rng.normal()),
    "peaked": lambda rng, rows, vocab: rng.normal(0, 1, (rows, vocab)) + 30 * (rng.random((rows, vocab)) < 3 / vocab),
    "wide": lambda rng, rows, vocab: rng.normal(0, 1, (rows, vocab)) * 10.0 ** rng.uniform(-30, 30, (rows, vocab)),
    "mostly -inf": lambda rng, rows, vocab: np.where(
        rng.random((rows, vocab)) < 0.9, -np.inf, rng.normal(0, 2, (rows, vocab))
    ),
    "close": lambda rng, rows, vocab: 8 + rng.integers(0, 900, (rows, vocab)) * 2.0**-20,
}


def plain(state: SamplerState) -> SamplerState:
    """The same without top-k and top-p."""
    rows = len(state.step)
    return dataclasses.replace(state, top_k=np.zeros(rows, np.int32), top_p=np.ones(rows, np.float32))


def spoil(rng: np.random.Generator, logits: np.ndarray) -> np.ndarray:
    """Now and then a row from which no token can be chosen."""
    rows, vocab = logits.shape
    for row in np.flatnonzero(rng.random(rows) < 0.1):
        kind = rng.integers(4)
        logits[row, :] = -INF if kind == 0 else logits[row]
        logits[row, rng.integers(vocab)] = (-INF, NAN, INF, -NAN)[kind]
    return logits


class Gpu:
    """Runs the kernels over CuPy arrays, with poison wherever they must not rely on what they find."""

    def __init__(self, device: Any) -> None:
        import cupy

        self.cupy, self.sampler = cupy, sampling.Sampler(device)

    def address(self, array: Any) -> int:
        return 0 if array is None else array.data.ptr

    def array(self, values: np.ndarray) -> Any:
        return self.cupy.asarray(values)

    def host(self, array: Any) -> np.ndarray:
        return self.cupy.asnumpy(array)


class Run:
    """A sampler's arrays on the device, and draws from them."""

    def __init__(self, gpu: Any, state: SamplerState, rows: int, vocab: int, filtered: bool = True) -> None:
        self.gpu, self.rows, self.vocab, self.filtered = gpu, rows, vocab, filtered
        self.state = state.map(gpu.array)
        self.scratch = gpu.array(np.zeros(gpu.sampler.scratch_bytes(rows, vocab, filtered), np.uint8))
        self.result = gpu.array(np.full((2, rows), 77, np.int32))
        self.tokens, self.context_lens = gpu.array(np.full(rows, 77, np.int32)), gpu.array(np.full(rows, 8, np.int32))
        self.pitch = -(-vocab // 16) * 16

    def padded(self, logits: np.ndarray) -> Any:
        """What lies past the last column must not matter."""
        padding = np.full((self.rows, self.pitch - self.vocab), NAN, np.float32)
        return self.gpu.array(np.concatenate([logits, padding], axis=1))

    def launch(self, logits: Any, greedy: bool = False, step: bool = True, stream: int = 0) -> None:
        address = self.gpu.address
        state = [address(getattr(self.state, name)) for name in sampling.STATE_ARRAYS]
        self.gpu.sampler.launch(
            address(logits), self.pitch, self.rows, self.vocab, state, address(self.result),
            address(self.tokens) if step else 0, address(self.context_lens) if step else 0, address(self.scratch),
            stream, greedy, self.filtered,
        )  # fmt: skip


def check(gpu: Any, logits: list[np.ndarray], state: SamplerState, greedy: bool = False, filtered: bool = True) -> None:
    """Draw once from each of ``logits``, and compare everything with the definition each time."""
    rows, vocab = logits[0].shape
    run, expected = Run(gpu, state, rows, vocab, filtered), state.map(np.copy)
    for i, x in enumerate(logits):
        run.launch(run.padded(x), greedy)
        tokens, logprobs = definition.sample(x, expected)
        result = gpu.host(run.result)
        np.testing.assert_array_equal(result[0], tokens)
        # Each of the fp32 numbers that are subtracted is off by some roundings of the largest of them.
        size = 1 + np.abs(np.where(np.isfinite(x), x, 0)).max(axis=1)
        difference = np.abs(result[1].view(np.float32) - logprobs)
        same = (np.isnan(logprobs) & np.isnan(result[1].view(np.float32))) | (result[1].view(np.float32) == logprobs)
        assert np.all(same | (difference <= 1e-6 * size)), (result[1].view(np.float32), logprobs)
        np.testing.assert_array_equal(gpu.host(run.tokens), np.maximum(tokens, 0))
        np.testing.assert_array_equal(gpu.host(run.context_lens), 9 + i)
        np.testing.assert_array_equal(gpu.host(run.state.step), expected.step)
        if expected.counts is not None:
            np.testing.assert_array_equal(gpu.host(run.state.counts), expected.counts)


def check_random(gpu: Any, seed: int, kind: str, rows: int, vocab: int, draws: int = 2) -> None:
    rng = np.random.default_rng(seed)
    penalties, filtered, greedy = rng.random(3) < [0.5, 0.8, 0.1]
    state = random_sampler(rng, rows, vocab, bool(penalties))
    if greedy:
        state.temperature[:] = 0
    if not filtered:
        state = plain(state)
    logits = [spoil(rng, LOGITS[kind](rng, rows, vocab).astype(np.float32)) for _ in range(draws)]
    check(gpu, logits, state, bool(greedy), bool(filtered or rng.random() < 0.5))


@pytest.fixture(scope="module")
def gpu(device: Any) -> Gpu:
    return Gpu(device)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", ["normal", *repeats(*list(LOGITS)[1:])])
def test_draws_what_the_definition_draws(gpu: Gpu, kind: str, vocab: int) -> None:
    for seed in range(2 if vocab > 10000 else 8):
        rows = [1, 3, 33, 8, 2, 16, 5, 33][seed] if vocab <= 10000 else [1, 4][seed]
        check_random(gpu, seed * 1000 + vocab, kind, rows, vocab)


@pytest.mark.gpu
@pytest.mark.repeats
def test_many_random_rows(gpu: Gpu) -> None:
    """Thousands of rows with parameters of their own."""
    rng = np.random.default_rng(5)
    for _ in range(4):
        logits = LOGITS["normal"](rng, 1024, 3001).astype(np.float32)
        check(gpu, [spoil(rng, logits)], random_sampler(rng, 1024, 3001, penalties=bool(rng.random() < 0.5)))


@pytest.mark.gpu
@pytest.mark.repeats
@pytest.mark.parametrize("vocab", [300, 5003])
@pytest.mark.parametrize("spread", [0.02, 1.0, 3.0])
def test_where_the_tail_is_cut(gpu: Gpu, vocab: int, spread: float) -> None:
    """Logits that fall with the id, and random words near 2**32: what is drawn is the last token that is kept."""
    rows, seeds = 64, np.arange(1 << 18, dtype=np.uint64)
    zeros = np.zeros(len(seeds), np.int32)
    rng = np.random.default_rng(vocab)
    logits = -np.sort(-rng.standard_normal((rows, vocab)).astype(np.float32) * np.float32(spread), axis=1)
    logits[: rows // 4] = np.rint(4 * logits[: rows // 4]) / 4
    for _ in range(3):
        state = random_sampler(rng, rows, vocab, penalties=False)
        state.temperature[:], state.min_p[:] = rng.choice(np.float32([0.7, 1, 2]), rows), 0
        state.step[:], state.sequence[:] = 0, 0
        state.seed[:] = seeds[np.argsort(definition.random_words(seeds, zeros, zeros))[-rows:]]
        state.top_k[:] = rng.integers(0, vocab, rows)
        state.top_p[:] = rng.choice(np.float32([1, 0.5, 0.9, 0.99, 1 - 2**-20]), rows)
        check(gpu, [logits], state)


@pytest.mark.gpu
def test_a_graph_of_the_launches_draws_anew_each_time(gpu: Gpu) -> None:
    rng = np.random.default_rng(6)
    rows, vocab = 5, 4000
    state = random_sampler(rng, rows, vocab, penalties=True)
    x = LOGITS["normal"](rng, rows, vocab).astype(np.float32)
    run, expected = Run(gpu, state, rows, vocab), state.map(np.copy)
    logits = run.padded(x)
    run.launch(logits)
    definition.sample(x, expected)
    stream = gpu.cupy.cuda.Stream(non_blocking=True)
    gpu.cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        run.launch(logits, stream=stream.ptr)
        graph = stream.end_capture()
        for _ in range(5):
            graph.replay()
            tokens, _ = definition.sample(x, expected)
            stream.synchronize()
            np.testing.assert_array_equal(gpu.host(run.result)[0], tokens)


@pytest.mark.gpu
def test_a_launch_without_a_step_leaves_it_alone(gpu: Gpu) -> None:
    run = Run(gpu, random_sampler(np.random.default_rng(7), 3, 50, penalties=False), 3, 50)
    run.launch(run.padded(np.zeros((3, 50), np.float32)), step=False)
    assert gpu.host(run.tokens).tolist() == [77] * 3 and gpu.host(run.context_lens).tolist() == [8] * 3
