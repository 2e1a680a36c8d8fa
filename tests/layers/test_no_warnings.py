"""A model that overflows or holds a NaN says so in its results, not by NumPy's warnings."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint
from safetensors.numpy import load_file, save_file

import bminf_lite
from bminf_lite.errors import BminfError


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_a_model_of_huge_or_invalid_numbers_raises_one_error_and_no_warning(tmp_path: Path, value: float) -> None:
    folder = tiny_checkpoint.write(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    for name, values in tensors.items():
        if "norm" in name or "up_proj" in name:
            values.reshape(-1)[3:5] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with bminf_lite.load(folder, device="cpu") as model:
            with pytest.raises(BminfError, match="logits there hold a NaN or an infinity"):
                model.generate("hi", max_new_tokens=3, temperature=1.0)
            assert not np.isfinite(model.logits([1, 2, 3])).all()
