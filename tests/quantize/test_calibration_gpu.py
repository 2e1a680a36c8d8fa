"""Calibration on a GPU sees and decides what it does on the reference that rounds where a GPU rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint

from bminf_lite.backend.base import Backend
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.checkpoint.recipe import load_recipe
from bminf_lite.quantize.calibration import Observation, run_calibration
from bminf_lite.quantize.decisions import Decision, QuantizationSearch

pytestmark = pytest.mark.gpu


def calibrate(source: Path, ops: Backend) -> tuple[list[np.ndarray], list[Decision]]:
    """What each product saw, and what was decided."""
    samples = [np.random.default_rng(i).integers(0, 256, n).astype(np.int32) for i, n in enumerate((96, 128, 17))]
    seen: list[np.ndarray] = []
    with open_model(source) as model:
        search = QuantizationSearch(model, load_recipe("auto"), ops)

        def both(observation: Observation) -> None:
            seen.append(np.array(ops.host(observation.x), np.float32))
            search(observation)

        run_calibration(model, samples, ops, both)
    return seen, search.decisions


def test_a_gpu_calibrates_like_the_reference(cuda_backend: Backend, tmp_path: Path) -> None:
    source = tiny_checkpoint.write(tmp_path / "source")
    seen, decisions = calibrate(source, cuda_backend)
    expected_inputs, expected = calibrate(source, Backend(np.float16))
    for got, want in zip(seen, expected_inputs, strict=True):
        assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)
    for decision, other in zip(decisions, expected, strict=True):
        assert (decision.tensors, decision.scheme) == (other.tensors, other.scheme)
        assert decision.error == pytest.approx(other.error, rel=0.2)
