"""``bminf-lite perplexity``: output and refusals. What it computes is tested in tests/evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint
from cli_kit import output, run
from safetensors.numpy import save_file

import bminf_lite
from bminf_lite.evaluation.corpus import leading_tokens
from bminf_lite.evaluation.perplexity import perplexity as measure

CPU = ("--device", "cpu")


def facts(*arguments: object) -> dict[str, Any]:
    """The JSON object, whose numbers are finite."""
    return json.loads(output("perplexity", *arguments, "--json", *CPU), parse_constant=pytest.fail)


def test_it_prints_what_the_function_gives(source: Path, text: Path):
    options = ("--window", 64, "--stride", 16)
    found = facts(source, text, *options)
    with bminf_lite.load(source, device="cpu") as loaded:
        tokenizer = loaded.tokenizer
        expected = measure(loaded, tokenizer.encode(text.read_text()), 64, 16, leading_tokens(tokenizer))
    assert (found["perplexity"], found["standard_error"]) == (expected.value, expected.standard_error)
    assert found["tokens"] == len(text.read_text()) and found["device"] == "cpu"
    assert run("perplexity", source, text, *options, *CPU).stdout == f"perplexity {expected}\n"


def test_int8_and_jsonl(source: Path, int8: Path, text: Path, tmp_path: Path):
    texts = [text.read_text()[i : i + 90] for i in (0, 50, 70)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": part}) for part in texts))
    values = [facts(folder, tmp_path / "texts.jsonl")["perplexity"] for folder in (source, int8)]
    np.testing.assert_allclose(*values, rtol=0.1)


def test_what_is_not_finite_is_null_in_json(tmp_path: Path, text: Path):
    tensors = tiny_checkpoint.tensors(tiny_checkpoint.CONFIG)
    tensors["model.norm.weight"] *= np.float32(1e6)
    save_file(tensors, str(tiny_checkpoint.write(tmp_path / "hot") / "model.safetensors"), {"format": "pt"})
    found = facts(tmp_path / "hot", text)
    assert found["perplexity"] is None and found["standard_error"] is None and found["tokens"] > 2
    (tmp_path / "a.txt").write_text("a")
    assert facts(tmp_path / "hot", tmp_path / "a.txt")["standard_error"] is None


def test_a_bad_text_is_reported_before_a_missing_model(tmp_path: Path, text: Path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n')
    for path, code, message in (
        ("bad.jsonl", 2, "bad.jsonl"),
        ("none.txt", 2, "none.txt"),
        (text, 1, "no-model: does"),
    ):
        result = run("perplexity", tmp_path / "no-model", tmp_path / path, *CPU)
        assert result.exit_code == code and message in result.stderr
        assert code == 1 or "no-model" not in result.stderr
