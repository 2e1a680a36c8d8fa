"""Tensors whose names all differ alike: one line that says how, not one for each tensor."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint
from tiny_checkpoints import CONFIG, MakeCheckpoint

from bminf_lite import models
from bminf_lite.checkpoint.misnamed import misnamed
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.errors import CheckpointError

TENSORS = tiny_checkpoint.tensors(CONFIG)


def message(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_model(folder)
    return str(caught.value)


CHANGES: dict[str, tuple[Callable[[str], str], str]] = {
    "compiled": (lambda name: f"_orig_mod.{name}", "have '_orig_mod.' in their names"),
    "data parallel": (lambda name: f"module.{name}", "have 'module.' in their names"),
    "both": (lambda name: f"module._orig_mod.{name}", "have 'module._orig_mod.' in their names"),
    "trained by Lightning": (lambda name: f"state_dict.model.{name}", "have 'state_dict.model.' in their names"),
    "each layer compiled": (
        lambda name: name.replace("layers.0.", "layers.0._orig_mod.").replace("layers.1.", "layers.1._orig_mod."),
        "have '_orig_mod.' in their names",
    ),
    "an adapter's base": (lambda name: f"base_model.model.{name}", "have 'base_model.model.' in their names"),
    "the body alone": (lambda name: name.removeprefix("model."), "lack 'model.' before their names"),
    "another name of the body": (
        lambda name: name.replace("model.", "transformer."),
        "have the prefix 'transformer.', not 'model.'",
    ),
}


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("name", CHANGES)
def test_one_line_says_how_the_names_differ(make_checkpoint: MakeCheckpoint, name: str, form: str) -> None:
    rename, expected = CHANGES[name]
    renamed = {rename(tensor): values for tensor, values in TENSORS.items()}
    text = message(make_checkpoint(tensors=renamed, form=form))
    assert expected in text and len(text.splitlines()) == 1 and len(text) < 600, text
    count = sum(new != old for old, new in zip(TENSORS, renamed, strict=True))
    assert f"{count} tensors " in text and "rename them" in text


def test_what_is_wrong_beside_the_names_is_listed_too(make_checkpoint: MakeCheckpoint) -> None:
    renamed = {f"_orig_mod.{name}": values for name, values in TENSORS.items()}
    del renamed["_orig_mod.model.norm.weight"]
    renamed["_orig_mod.lm_head.weight"] = np.zeros((2, 3), np.float32)
    lines = message(make_checkpoint(tensors=renamed)).splitlines()
    assert "have '_orig_mod.' in their names" in lines[1] and len(lines) == 5
    assert any("missing tensor 'model.norm.weight'" in line for line in lines)
    assert any("'lm_head.weight' has shape" in line for line in lines)


def test_another_model_is_not_called_misnamed(make_checkpoint: MakeCheckpoint) -> None:
    """Too few names that fit after a change are chance."""
    renamed = {
        (f"_orig_mod.{name}" if "layers.0." in name and "norm" in name else f"x{i}"): values
        for i, (name, values) in enumerate(TENSORS.items())
    }
    text = message(make_checkpoint(tensors=renamed))
    assert "in their names" not in text and "missing tensor 'model.norm.weight'" in text


def test_right_names_are_not_misnamed() -> None:
    architecture = models.find(CONFIG)
    spec = architecture.spec(architecture.parse(CONFIG))
    assert misnamed(spec, TENSORS) is None
    assert misnamed(spec, []) is None
    assert misnamed(spec, ["a" * 1000, ".".join("a" * 500), "", "."]) is None


def test_the_work_is_bounded() -> None:
    architecture = models.find(CONFIG)
    spec = architecture.spec(architecture.parse(CONFIG))
    start = time.process_time()
    assert misnamed(spec, [f"{i}" + ".x" * 500 for i in range(20_000)]) is None
    assert time.process_time() - start < 5, "it takes 0.1 s"
