"""Calibration shows what the float model really computes with, one layer in memory at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting_backend import CountingBackend
from random_values import make_batch

from bminf_lite.backend.base import Backend
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.backend.values import sequential_tables
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.checkpoint.recipe import CalibrationSettings, load_recipe
from bminf_lite.layers.cache import KVCache
from bminf_lite.layers.recording import LinearHooks
from bminf_lite.quantize import calibration
from bminf_lite.quantize.calibration import Observation, make_batches, run_calibration, sample_rows
from bminf_lite.quantize.decisions import Decision, QuantizationSearch

SAMPLES = [np.arange(5, 45, dtype=np.int32), np.arange(100, 117, dtype=np.int32)]


def observations(source: Path, ops: Backend) -> list[Observation]:
    seen: list[Observation] = []
    with open_model(source) as model:
        run_calibration(model, SAMPLES, ops, seen.append)
    return seen


def inputs(seen: list[Observation]) -> dict[tuple[str, ...], np.ndarray]:
    """All of what enters each product."""
    parts: dict[tuple[str, ...], list[np.ndarray]] = {}
    for observation in seen:
        parts.setdefault(observation.tensors, []).append(np.array(observation.x))
        assert len(parts[observation.tensors]) == observation.batch_index + 1
        assert observation.is_last == (observation.batch_index + 1 == observation.num_batches)
    return {tensors: np.concatenate(x) for tensors, x in parts.items()}


@pytest.mark.parametrize("batch_tokens", [1, 1000])
def test_inputs_are_those_of_the_whole_model(source: Path, batch_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample run by itself through the model as it is loaded."""
    monkeypatch.setattr(calibration, "MAX_BATCH_TOKENS", batch_tokens)
    expected: dict[tuple[str, ...], list[np.ndarray]] = {}
    ops = CpuBackend()
    with open_model(source) as model:
        config = model.config

        def keep(product: Any) -> None:
            expected.setdefault(product.tensors, []).append(np.array(product.x))

        hooks = LinearHooks(ops, model.weights(), keep)
        network = model.architecture.Model(config, hooks.weights, hooks.ops)
        for sample in SAMPLES:
            cache = KVCache.for_sequences(ops, config.cache_layout, 1, len(sample))
            step = make_batch(ops, [len(sample)], [0], sequential_tables(1, len(sample)), sample)
            network(step, cache, all_logits=True)
    found = inputs(observations(source, ops))
    assert found.keys() == expected.keys()
    for tensors, x in found.items():
        np.testing.assert_allclose(x, np.concatenate(expected[tensors]), rtol=1e-4, atol=1e-5)


def test_a_weight_lives_as_long_as_its_layer(source: Path) -> None:
    ops = CountingBackend()
    assert len(observations(source, ops)) == 9
    with open_model(source) as model:
        shapes = [p.shape for name, p in model.spec.parameters.items() if ".layers.0." in name and len(p.shape) == 2]
    layer = sum(4 * rows * columns for rows, columns in shapes)
    assert layer <= ops.most < 2 * layer


def test_samples_are_grouped_evenly_and_stay_whole() -> None:
    samples = [np.full(512, i, np.int32) for i in range(17)]
    batches = make_batches(samples)
    assert [len(batch.sequences) for batch in batches] == [5, 6, 6]
    assert [int(s[0]) for batch in batches for s in batch.sequences] == list(range(17))
    assert [len(batch.sequences) for batch in make_batches([np.zeros(9000, np.int32)])] == [1]
    (batch,) = make_batches([np.arange(5), np.arange(4)], start=(7,))
    assert [x.tolist() for x in batch.sources] == [[0, 1, 2], [0, 1]]
    assert [x.tolist() for x in batch.sequences] == [[7, 3, 4], [7, 2, 3]]


def test_the_head_sees_tokens_from_everywhere(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "MAX_BATCH_TOKENS", 1)
    everything = observations(source, CpuBackend())[-1].x
    monkeypatch.setattr(calibration, "HEAD_TOKENS", 7)
    some = observations(source, CpuBackend())[-1].x
    np.testing.assert_array_equal(some, everything[sample_rows(57, 7)])


def test_rows_are_spread_and_always_the_same() -> None:
    assert sample_rows(5, 9).tolist() == [0, 1, 2, 3, 4]
    rows = sample_rows(100_000, 1000)
    assert len(set(rows.tolist())) == 1000 and (np.diff(rows) > 0).all()
    np.testing.assert_array_equal(rows, sample_rows(100_000, 1000))
    assert 400 < (rows < 50_000).sum() < 600 and len(set((rows % 512).tolist())) > 300


def calibrate(source: Path, ops: Backend) -> tuple[list[np.ndarray], list[Decision]]:
    """The input of each product, and the decisions, with float inputs where an error stays above 30 dB."""
    recipe = replace(load_recipe("auto"), calibration=CalibrationSettings(max_error=1e-3))
    samples = [np.random.default_rng(i).integers(0, 256, n).astype(np.int32) for i, n in enumerate((96, 128, 17))]
    seen: list[np.ndarray] = []
    with open_model(source) as model:
        search = QuantizationSearch(model, recipe, ops)

        def both(observation: Observation) -> None:
            seen.append(np.array(ops.host(observation.x), np.float32))
            search(observation)

        run_calibration(model, samples, ops, both)
        search.finish()
    return seen, [option.decision for (option,) in search.options]


def test_every_backend_observes_and_decides_like_the_reference(source: Path, backend: Backend) -> None:
    """The reference rounds where a GPU rounds."""
    seen, decisions = calibrate(source, backend)
    expected_inputs, expected = calibrate(source, Backend(np.float16))
    for got, want in zip(seen, expected_inputs, strict=True):
        assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)
    for decision, other in zip(decisions, expected, strict=True):
        assert (decision.tensors, decision.scheme) == (other.tensors, other.scheme)
        assert 0 < decision.error < 1e-3 and decision.error == pytest.approx(other.error, rel=0.2)
