"""``bminf-lite inspect`` on a float and on migrated checkpoints. What it finds is tested in tests/checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import quantized_kit
import tiny_checkpoint
from cli_kit import output
from safetensors.numpy import load_file, save_file

import bminf_lite
from bminf_lite.checkpoint.inspect import inspect


def test_a_float_checkpoint(source: Path) -> None:
    text = output("inspect", source)
    expected = tiny_checkpoint.tensors(tiny_checkpoint.CONFIG)
    assert "llama" in text and f"{sum(t.size for t in expected.values()):,}" in text
    for name, tensor in expected.items():
        (line,) = (x for x in text.splitlines() if x.startswith(f"{name} "))
        assert "F32" in line and str(list(tensor.shape)) in line and "scales" not in line


@pytest.mark.parametrize(("recipe", "activations"), [("w8a8", "int8"), ("w8a16", "float")])
def test_a_migrated_checkpoint(source: Path, tmp_path: Path, recipe: str, activations: str) -> None:
    bminf_lite.migrate(source, tmp_path / "out", recipe)
    text = output("inspect", tmp_path / "out")
    assert f"int8 weights, {activations} activations" in text and f"recipe {recipe}" in text
    assert text.count("scales ") == 2 * 7 + 1  # seven linear layers in each of two blocks, and the head
    assert "[48, 32]" in text  # the shape of the matrix, packed or not
    assert json.loads(output("inspect", tmp_path / "out", "--json")) == inspect(tmp_path / "out")


def test_a_checkpoint_that_others_have_quantized(tmp_path: Path) -> None:
    stored, _ = quantized_kit.model(quantized_kit.FORMS[0])
    config = quantized_kit.CONFIG | {"quantization_config": quantized_kit.FP8}
    text = output("inspect", quantized_kit.save(tmp_path, config, stored))
    assert "quantization  read as float, from FP8 with scales of blocks of 40 x 24" in text


def test_names_cannot_move_the_cursor_or_pass_for_another_line(tmp_path: Path) -> None:
    folder = tiny_checkpoint.write(tmp_path / "m", architectures=[None, "A\x1b[31m"])
    tensors = load_file(folder / "model.safetensors") | {"a\nb\x1b[2J": np.ones(3, np.float32)}
    save_file(tensors, folder / "model.safetensors")
    text = output("inspect", folder)
    assert text.replace("\n", "").isprintable()
    assert "architecture  llama, None, A\\x1b[31m\n" in text and "\na\\nb\\x1b[2J " in text
