"""What migration writes opens in transformers with compressed-tensors, and holds the same weights there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bminf_lite.backend.quantization import Int8Weight
from bminf_lite.checkpoint.migrate import migrate
from bminf_lite.checkpoint.reader import open_checkpoint
from bminf_lite.checkpoint.recipe import Recipe, Scheme

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

RECIPES = {
    "w8a8": "w8a8",
    "w8a16": "w8a16",
    "float head": Recipe("float head", Scheme.W8A8, Scheme.FLOAT),
    "mixed": Recipe("mixed", Scheme.W8A8, Scheme.W8A8, {"*down_proj*": Scheme.W8A16, "model.layers.0.*": Scheme.FLOAT}),
}


def make_source(folder: Path, tied: bool, dtype: Any, **changes: Any) -> Any:
    """A tiny random LLaMA, saved by transformers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=99, tie_word_embeddings=tied, max_position_embeddings=64, **changes,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_transformers_sees_the_same_weights(tmp_path: Path, recipe: str, tied: bool) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    original = make_source(source, tied, torch.float32)
    migrate(source, out, RECIPES[recipe])
    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tokens = torch.arange(20)[None] * 4
    with torch.no_grad():
        logits, expected = model(tokens).logits, original(tokens).logits  # the first call decompresses the weights
    # int8 with one scale per row is good for about 40 dB per layer; a wrong scale or packing gives none.
    assert (logits - expected).norm() < 0.05 * expected.norm()
    state = model.state_dict()
    with open_checkpoint(out) as checkpoint:
        compared = 0
        stored = [name.removesuffix("_packed") for name in checkpoint.tensors]
        for name in (name for name in stored if name.endswith(".weight")):
            weight = checkpoint.weight(name)
            if isinstance(weight, Int8Weight):
                compared += 1
                # Decompression multiplies in the type of the scale, fp16: half an ulp of it.
                tolerance = {"rtol": 2**-11, "atol": 2**-25}
                np.testing.assert_allclose(state[name].float().numpy(), weight.dequantize(), **tolerance)
            else:
                np.testing.assert_array_equal(state[name].numpy(), weight)
    layers = 8 if recipe == "mixed" else 14  # the first rule goes first, so layer 0 keeps one int8 matrix
    assert compared == layers + (not tied and recipe != "float head")
