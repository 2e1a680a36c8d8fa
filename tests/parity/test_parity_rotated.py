"""Checkpoints whose layers rotate their input: refused by transformers as they are, and equal once it applies them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity_kit import relative_error as error
from parity_kit import reopened
from tiny_models import RandomWeights, goldens

import bminf_lite
from bminf_lite.checkpoint.compressed_tensors import TRANSFORMED_STATUS

pytest.importorskip("torch", reason="parity needs torch")
import make_goldens

transform = pytest.importorskip("compressed_tensors.transform", reason="parity needs compressed-tensors")

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
DEMO = Path(bminf_lite.__file__).parent / "demo_model"


def without_status(folder: Path, copy: Path) -> dict[str, Any]:
    """A copy that transformers opens without the transforms; returns those."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    assert config["quantization_config"]["quantization_status"] == TRANSFORMED_STATUS
    config["quantization_config"]["quantization_status"] = "compressed"
    found: dict[str, Any] = config["quantization_config"].pop("transform_config")
    (copy / "config.json").write_text(json.dumps(config))
    return found


def test_transformers_refuses_it_by_name(tmp_path: Path) -> None:
    bminf_lite.migrate(DEMO, tmp_path / "out", "w8a8-rotate")
    with pytest.raises(ValueError, match="apply transform_config"):
        reopened(tmp_path / "out")


def test_the_bundled_model_with_its_transforms_applied(tmp_path: Path) -> None:
    bminf_lite.migrate(DEMO, tmp_path / "out", "w8a8-rotate")
    with bminf_lite.load(DEMO, device="cpu") as before, bminf_lite.load(tmp_path / "out", device="cpu") as model:
        ids = np.array(model.tokenizer.encode((DEMO / "heldout.txt").read_text(encoding="utf-8")[:3000]))
        ours, unquantized = model.logits(ids), before.logits(ids)
    config = without_status(tmp_path / "out", tmp_path / "copy")
    hf = reopened(tmp_path / "copy")
    ignored = make_goldens.logits_of(hf, ids)
    transform.apply_transform_config(hf, transform.TransformConfig.model_validate(config))
    theirs = make_goldens.logits_of(hf, ids)
    assert error(ignored, unquantized) > 0.1
    # they round activations by another definition (max / 127.5), and keep a tied head float
    assert error(ours, theirs) < 1.6 * error(theirs, unquantized)
    assert error(theirs, unquantized) < 0.02 and error(ours, unquantized) < 0.02


@pytest.mark.parametrize("family", ["bundled", "llama", "opt", "qwen3"])
def test_rotations_in_the_weights_are_opened_as_they_are(tmp_path: Path, family: str) -> None:
    """transformers opens the folder and gives our logits, without a transform."""
    if family == "bundled":
        source, vocab_size = DEMO, 2048
    else:
        golden = next(goldens(family))
        source = golden.save(tmp_path / "source", RandomWeights(golden.config, golden.seed).tensors)
        vocab_size = golden.config["vocab_size"]
    report = bminf_lite.migrate(source, tmp_path / "out", "w8a8-rotate", offline_only=True)
    assert report.rotated_offline
    ids = np.random.default_rng(0).integers(0, vocab_size, 24)
    with bminf_lite.load(source, device="cpu") as before, bminf_lite.load(tmp_path / "out", device="cpu") as model:
        ours, unquantized = model.logits(ids), before.logits(ids)
    theirs = make_goldens.logits_of(reopened(tmp_path / "out"), ids)
    assert error(ours, theirs) < 1.6 * max(error(theirs, unquantized), error(ours, unquantized))
    assert error(theirs, unquantized) < 0.1


@pytest.mark.parametrize("recipe", ["w8a8-rotate", "w8a8-rotate-all"])
@pytest.mark.parametrize("family", ["opt", "gpt_neox", "qwen3", "gemma3_text"])
def test_other_architectures(tmp_path: Path, family: str, recipe: str) -> None:
    golden = next(goldens(family))
    source = golden.save(tmp_path / "source", RandomWeights(golden.config, golden.seed).tensors)
    bminf_lite.migrate(source, tmp_path / "out", recipe)
    ids = np.random.default_rng(0).integers(0, golden.config["vocab_size"], 24)
    with bminf_lite.load(source, device="cpu") as before, bminf_lite.load(tmp_path / "out", device="cpu") as model:
        ours, unquantized = model.logits(ids), before.logits(ids)
    config = without_status(tmp_path / "out", tmp_path / "copy")
    # transformers 5 has a name of its own for this head, which it maps in tensors but not in transforms
    config = json.loads(json.dumps(config).replace('"embed_out"', '"lm_head"'))
    hf = reopened(tmp_path / "copy")
    transform.apply_transform_config(hf, transform.TransformConfig.model_validate(config))
    theirs = make_goldens.logits_of(hf, ids)
    assert error(ours, theirs) < 1.6 * max(error(theirs, unquantized), error(ours, unquantized))
    assert error(theirs, unquantized) < 0.1
