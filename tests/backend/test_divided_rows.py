"""Sums over GPUs that norms take part in give the bits of sums alone.

A residual stream of many rows may be divided: each GPU has some of them. A sum of few rows may wait for its norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_peers import Ranks, batch

from bminf_lite.backend.quantization import quantize_weight
from bminf_lite.backend.values import Norm

pytestmark = pytest.mark.gpu
ROWS, WIDTH, INNER = 300, 96, 64
Network = Callable[[Any, "Weights", Any], list[Any]]


@pytest.fixture(params=[(0, 1), (0, 1, 2)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with closing(Ranks(request.param, most=1 << 17)) as made:
        yield made


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether streams with 65 rows for each rank are divided."""
    from bminf_lite.backend.cuda import divided_rows

    def choose(is_divided: bool) -> None:
        monkeypatch.setattr(divided_rows, "MIN_ROWS", 65 if is_divided else 1 << 30)
        monkeypatch.setattr(divided_rows, "PIECE_VALUES", 70 * WIDTH)

    return choose


class Weights:
    """A rank's weights: ``into`` reads a norm of the stream, ``out`` has the rank's columns and adds to the stream."""

    def __init__(self, ops: Any, rank: int, width: int, rotation: int = 1):
        random, own = np.random.default_rng(7), np.random.default_rng(8 + rank)

        def weight(rows: int, columns: int, turned: int = 1) -> Any:
            matrix = own.standard_normal((rows, columns)).astype(np.float32) * columns**-0.5
            return ops.weight([replace(quantize_weight(matrix), rotation=turned)])

        self.into = [weight(2 * INNER if i == 2 else INNER, width, rotation) for i in range(3)]
        self.out = [weight(width, INNER) for _ in range(3)]
        self.bias = ops.vector(random.standard_normal(width).astype(np.float32))
        values = [random.uniform(0.5, 2, width).astype(np.float32) for _ in range(4)]
        self.norms = [Norm(ops.vector(v), 1e-5) for v in values[:2]]
        self.norms.append(Norm(ops.vector(values[2]), 1e-5, ops.vector(values[3]), center=True))


def layers(ops: Any, weights: Weights, stream: Any) -> list[Any]:
    """Three layers, the second with LayerNorm and the third gated, and products of the last norm."""
    for i, norm in enumerate((weights.norms[0], weights.norms[2], weights.norms[1])):
        x = ops.norm(stream, norm)
        hidden = ops.gated_linear(x, weights.into[i], "silu") if i == 2 else ops.linear(x, weights.into[i])
        del x
        stream = ops.linear_add_of_ranks(hidden, weights.out[i], weights.bias if i else None, stream)
    last = ops.linear(ops.norm(stream, weights.norms[0]), weights.into[0], fp32=True)
    return [last, stream]


def side_by_side(ops: Any, weights: Weights, stream: Any) -> list[Any]:
    """Two parts read norms of one stream, and both are added to it one after another; the sum is read as it is."""
    first, second = (ops.norm(stream, norm) for norm in weights.norms[:2])
    hidden = ops.linear(first, weights.into[0]), ops.linear(second, weights.into[1])
    del first, second
    stream = ops.linear_add_of_ranks(hidden[0], weights.out[0], None, stream)
    stream = ops.linear_add_of_ranks(hidden[1], weights.out[1], weights.bias, stream)
    x, y = (ops.norm(stream, norm) for norm in weights.norms[:2])
    codes = [ops.linear(x, weights.into[0], fp32=True), ops.linear(y, weights.into[1], fp32=True)]
    again = ops.linear(x, weights.into[1], fp32=True)
    return [*codes, again, stream]


def read_whole(ops: Any, weights: Weights, stream: Any) -> list[Any]:
    """The stream and its norm are read as values, and added to by an operation that every rank does."""
    hidden = ops.linear(ops.norm(stream, weights.norms[0]), weights.into[0])
    stream = ops.linear_add_of_ranks(hidden, weights.out[0], weights.bias, stream)
    normed = ops.norm(stream, weights.norms[1])
    values = ops.soft_cap(normed, 1e6)
    stream = ops.add(stream, values)
    stream = ops.linear_add_of_ranks(hidden, weights.out[1], None, stream)
    return [values, stream]


def outputs(ranks: Ranks, network: Network, width: int = WIDTH, rows: int = ROWS, rotation: int = 1) -> list[Any]:
    start = np.random.default_rng(3).standard_normal((rows, width)).astype(np.float32)

    def work(ops: Any, rank: int) -> list[np.ndarray]:
        weights = Weights(ops, rank, width, rotation)
        with ops.step(batch(rows)):
            return [np.array(ops.host(found)) for found in network(ops, weights, ops.array(start))]

    return ranks.run(work)


def meetings(ranks: Ranks) -> int:
    """How often ranks have met for a divided stream."""
    return int(ranks.backends[0].host(ranks.group.ranks[0].divided.meeting.count)[0]) - 1


def assert_same(found: list[Any], expected: list[Any]) -> None:
    """All ranks have the same results, except those of their own weights."""
    for one, other in zip(found, expected, strict=True):
        for value, defined in zip(one, other, strict=True):
            np.testing.assert_array_equal(value.view(np.int32), defined.view(np.int32))
    np.testing.assert_array_equal(found[0][-1], found[1][-1])


@pytest.mark.parametrize("network", [layers, side_by_side, read_whole])
def test_a_divided_stream_has_the_bits_of_a_whole_one(
    ranks: Ranks, divided: Callable[[bool], None], network: Network
) -> None:
    rows = ROWS // 2 * len(ranks.backends) + 1
    divided(False)
    expected = outputs(ranks, network, rows=rows)
    assert meetings(ranks) == 0
    divided(True)
    for _ in range(2):
        assert_same(outputs(ranks, network, rows=rows), expected)
    assert meetings(ranks) > 6


def test_norms_of_wide_and_of_rotated_rows(divided: Callable[[bool], None]) -> None:
    for width, rotation in ((4096, 1), (1056, 1), (512, 64)):
        with closing(Ranks((0, 1), most=1 << 20)) as ranks:
            divided(False)
            expected = outputs(ranks, layers, width, rotation=rotation)
            divided(True)
            assert_same(outputs(ranks, layers, width, rotation=rotation), expected)


def test_captured_steps_are_replayed_beside_others(divided: Callable[[bool], None]) -> None:
    """A captured step follows others, and each of its inputs, which it overwrites, is new."""
    rng = np.random.default_rng(4)
    starts = [rng.standard_normal((ROWS, WIDTH)).astype(np.float32) for _ in range(5)]

    def work(ops: Any, rank: int) -> list[np.ndarray]:
        weights, source = Weights(ops, rank, WIDTH), ops.array(starts[0])

        def step() -> Any:
            with ops.step(batch(ROWS)):
                return layers(ops, weights, source)[0]

        def eager(start: np.ndarray) -> np.ndarray:
            with ops.step(batch(ROWS)):
                return np.array(ops.host(layers(ops, weights, ops.array(start))[1]))

        captured, found = ops.capture(step), []
        for start in starts:
            ops.assign(source, start)
            found += [np.array(ops.host(captured())), eager(start)]
        return found

    with closing(Ranks((0, 1))) as ranks:
        divided(False)
        expected = ranks.run(work)
        divided(True)
        assert_same(ranks.run(work), expected)


def test_the_step_after_a_failure_is_right(divided: Callable[[bool], None]) -> None:
    with closing(Ranks((0, 1))) as ranks:
        divided(True)
        expected = outputs(ranks, layers)

        def failing(ops: Any, rank: int) -> None:
            weights = Weights(ops, rank, WIDTH)
            with ops.step(batch(ROWS)):
                stream = ops.array(np.ones((ROWS, WIDTH), np.float32))
                hidden = ops.linear(ops.norm(stream, weights.norms[0]), weights.into[0])
                stream = ops.linear_add_of_ranks(hidden, weights.out[0], None, stream)
                if rank == 1:
                    raise MemoryError("no room")
                ops.host(stream)

        with pytest.raises(MemoryError, match="no room"):
            ranks.run(failing)
        assert_same(outputs(ranks, layers), expected)


@pytest.mark.parametrize("network", [layers, side_by_side, read_whole])
@pytest.mark.parametrize(("rows", "width"), [(2, 96), (7, 512), (64, 96), (3, 4160)])
def test_sums_of_few_rows_are_added_with_their_norm(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, network: Network, rows: int, width: int
) -> None:
    from bminf_lite.cuda.kernels.collective import all_reduce

    launched, launch_norm = [], all_reduce.AllReduce.launch_norm

    def counted(*arguments: Any, **named: Any) -> None:
        launched.append(network)
        launch_norm(*arguments, **named)

    monkeypatch.setattr(all_reduce.AllReduce, "launch_norm", counted)
    rotation = 32 if width == 512 else 1
    found = outputs(ranks, network, width, rows, rotation)
    assert bool(launched) == (network is not read_whole)
    launched.clear()
    monkeypatch.setattr(all_reduce, "NORM_ROWS", 0)
    assert_same(found, outputs(ranks, network, width, rows, rotation))
    assert not launched


def test_a_sum_that_nothing_reads_in_its_step_is_captured_with_it() -> None:
    rng = np.random.default_rng(5)
    starts = [rng.standard_normal((4, WIDTH)).astype(np.float32) for _ in range(5)]
    with closing(Ranks((0, 1))) as ranks:

        def work(ops: Any, rank: int) -> list[np.ndarray]:
            weights, source = Weights(ops, rank, WIDTH), ops.array(starts[0])

            def step() -> Any:
                with ops.step(batch(4)):
                    hidden = ops.linear(ops.norm(source, weights.norms[0]), weights.into[0])
                    return ops.linear_add_of_ranks(hidden, weights.out[0], weights.bias, source)

            captured, found = ops.capture(step), []
            for start in starts:
                ops.assign(source, start)
                found.append(np.array(ops.host(captured())))
            for start in starts:
                ops.assign(source, start)
                found.append(np.array(ops.host(step())))
            return found

        for found in ranks.run(work):
            for one, other in zip(found[:5], found[5:], strict=True):
                np.testing.assert_array_equal(one, other)
