"""A model that checks its activations names the layer, and otherwise computes what it always does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint
from safetensors.numpy import load_file, save_file

import bminf_lite
from bminf_lite.errors import BminfError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BLOCK = "model.layers.1."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint.write(tmp_path / "model")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("migrated", [False, True])
def test_finite_numbers_are_computed_as_ever(folder: Path, device: str, migrated: bool) -> None:
    if migrated:
        bminf_lite.migrate(folder, folder.with_name("int8"))
        folder = folder.with_name("int8")
    results = []
    for check in (False, True):
        with bminf_lite.load(folder, device, check=check) as model:
            results.append(model.generate(["hello", "a longer one"], max_new_tokens=8, temperature=0, logprobs=0))
    for plain, checked in zip(*results, strict=True):
        assert plain.token_ids == checked.token_ids
        np.testing.assert_allclose(plain.logprobs, checked.logprobs, atol=0 if device == "cpu" else 2e-2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of just these numbers
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("tensor", "factor", "reader"),
    [
        ("post_attention_layernorm.weight", np.inf, "mlp.gate_proj.weight, model.layers.1.mlp.up_proj.weight"),
        ("mlp.up_proj.weight", 1e30, "mlp.down_proj.weight"),
        ("self_attn.v_proj.weight", np.nan, "self_attn.o_proj.weight"),
    ],
)
def test_what_is_no_number_is_an_error_that_names_the_layer(
    folder: Path, device: str, tensor: str, factor: float, reader: str
) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[BLOCK + tensor] *= np.float32(factor)
    if "up_proj" in tensor:  # the product of two finite numbers
        tensors[BLOCK + "mlp.gate_proj.weight"] *= np.float32(factor)
    save_file(tensors, folder / "model.safetensors")
    with bminf_lite.load(folder, device) as model, pytest.raises(BminfError, match="check=True"):
        model.generate("hello")
    with bminf_lite.load(folder, device, check=True) as model:
        for _ in range(2):
            with pytest.raises(BminfError, match=f"^{BLOCK}{reader}: the input holds"):
                model.generate("hello")
