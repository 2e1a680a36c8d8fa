"""Activations beyond fp16: a calibration scales them into its range, and the model stays the same."""

from __future__ import annotations

from collections import Counter
from importlib import resources
from pathlib import Path

import numpy as np
import outliers
import pytest

import bminf_lite
from bminf_lite.backend.base import Backend
from bminf_lite.backend.values import ForwardBatch
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.layers.cache import KVCache
from bminf_lite.models.spec import Fold
from bminf_lite.quantize.smoothing import LARGEST_INPUT, Smoothing, limit_range

DEMO = Path(str(resources.files("bminf_lite.demo_model")))
LARGE = 1e6


def test_one_power_of_two_for_all_channels() -> None:
    fold = Fold((), (), block=2, repeat=2)
    small, large = np.full(8, LARGEST_INPUT), np.array([1, 5, 1, LARGEST_INPUT * 3, 7, 1, 1, 1])
    found = Smoothing(0.5, np.array([2, 1, 1, 1], np.float32))
    assert limit_range(found, fold, small) is found and limit_range(Smoothing(), fold, small).factors is None
    assert limit_range(found, fold, small * [2, 1, 2, 1, 1, 1, 1, 1]) is found  # what smoothing has divided already
    limited = limit_range(found, fold, large)
    assert limited.exponent == 0.5 and limited.factors is not None and found.factors is not None
    np.testing.assert_array_equal(limited.factors, 4 * found.factors)


@pytest.fixture(scope="module")
def spiked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """The bundled model with a pair of neurons that reaches a million on a frequent token, and tokens."""
    with bminf_lite.load(DEMO, "cpu") as model:
        ids = np.array(model.tokenizer.encode((DEMO / "heldout.txt").read_text(encoding="utf-8"))[:2048])
    folder = tmp_path_factory.mktemp("range") / "source"
    return outliers.write(DEMO, folder, outliers.spike(Counter(ids.tolist()).most_common(1)[0][0], LARGE)), ids


def logits(folder: Path, ids: np.ndarray, dtype: type) -> np.ndarray:
    """Logits with activations rounded as a GPU rounds them, or in fp32."""
    ops = Backend(dtype)
    with open_model(folder) as model, np.errstate(all="ignore"):
        network = model.architecture.Model(model.config, model.weights(), ops)
        shape = model.config.cache_shape
        cache = KVCache.for_sequences(ops, shape, 1, len(ids))
        batch = ForwardBatch.packed(ops.array, [ids], block_tables=cache.tables(1, len(ids)))
        return np.array(network(batch, cache, all_logits=True))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["auto", "w8a8-smooth"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_million_between_gate_and_down(spiked: tuple[Path, np.ndarray], tmp_path: Path, recipe: str) -> None:
    source, ids = spiked
    bminf_lite.migrate(source, tmp_path / "plain", "w8a16")
    bminf_lite.migrate(source, tmp_path / "out", recipe, calibrate=ids.tolist(), device="cpu")
    shown = ids[:512]
    expected = logits(source, shown, np.float32)
    assert not np.isfinite(logits(tmp_path / "plain", shown, np.float16)).all()
    got = logits(tmp_path / "out", shown, np.float16)
    assert np.isfinite(got).all()
    if recipe == "auto":

        def loss(x: np.ndarray) -> float:
            x = x[:-1].astype(np.float64)
            return float(np.mean(np.log(np.exp(x).sum(axis=1)) - x[np.arange(len(x)), shown[1:]]))

        assert abs(np.exp(loss(got) - loss(expected)) - 1) < 0.005
