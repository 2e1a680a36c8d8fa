"""Weights whose products exceed fp32: refused by a migration with the tensor, the row and the value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiny_checkpoint
from safetensors.numpy import save_file
from tiny_checkpoints import CONFIG, MakeCheckpoint

import bminf_lite
from bminf_lite.checkpoint.conversion import LARGEST_WEIGHT
from bminf_lite.checkpoint.migrate import migrate
from bminf_lite.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("error")
KEYS = "model.layers.0.self_attn.k_proj.weight"
MATRIX, NORM, EMBEDDING = "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"


def with_value(name: str, value: float, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    tensors = tiny_checkpoint.tensors(CONFIG, dtype=dtype)
    tensors[name][(5,) + (3,) * (tensors[name].ndim - 1)] = value
    return tensors


@pytest.mark.parametrize("recipe", ["w8a8", "w8a16"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", [MATRIX, NORM, EMBEDDING])
@pytest.mark.parametrize("value", [3e38, -3e38, 1.4e36])
def test_they_are_refused(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str, value: float, dtype: Any, recipe: str
) -> None:
    folder = make_checkpoint(tensors=with_value(name, value, dtype))
    with pytest.raises(CheckpointError) as caught:
        migrate(folder, tmp_path / "out", recipe)
    where = ", first in row 5" if name != NORM else ""
    shown = float(np.asarray(value, dtype).astype(np.float32))
    assert f"tensor {name!r} holds {shown:.3g}{where}, and sums of such values are infinite" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [MATRIX, NORM, EMBEDDING])
def test_what_is_no_number_is_said_to_be_none(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str, value: float
) -> None:
    tensors = with_value(name, 3e38)
    tensors[name][(5,) + (4,) * (tensors[name].ndim - 1) if name != NORM else (6,)] = value
    with pytest.raises(CheckpointError, match=re.escape(f"tensor {name!r} holds a NaN or an infinity")):
        migrate(make_checkpoint(tensors=tensors), tmp_path / "out")


@pytest.mark.parametrize("name", [MATRIX, NORM])
def test_the_largest_that_is_taken(make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str) -> None:
    """The power of two makes the comparison exact."""
    migrate(make_checkpoint(tensors=with_value(name, float(LARGEST_WEIGHT))), tmp_path / "out")


@pytest.mark.parametrize("recipe", ["w8a8-smooth", "w8a8-rotate"])
@pytest.mark.parametrize(
    ("name", "value"),
    [(MATRIX, 3e38), (KEYS, 3e38), (NORM, 3e38), (EMBEDDING, 3e38), (MATRIX, np.nan), (MATRIX, 1e36)],
)
def test_a_calibration_sees_them_first(tmp_path: Path, name: str, value: float, recipe: str) -> None:
    folder = tiny_checkpoint.write(tmp_path / "float")
    tensors = tiny_checkpoint.tensors(tiny_checkpoint.CONFIG)
    tensors[name][(5,) + (3,) * (tensors[name].ndim - 1)] = value
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    (tmp_path / "text.txt").write_text(tiny_checkpoint.WORDS * 20)
    options: dict[str, Any] = {"calibrate": tmp_path / "text.txt", "device": "cpu", "samples": 2}
    if value == 1e36:
        bminf_lite.migrate(folder, tmp_path / "out", recipe, **options)
        return
    # A rotation is folded into the weights before they are looked at.
    with pytest.raises(CheckpointError, match=r"holds (-?[\d.]+e\+3[678]|a NaN or an infinity)"):
        bminf_lite.migrate(folder, tmp_path / "out", recipe, **options)
    assert not (tmp_path / "out").exists()
