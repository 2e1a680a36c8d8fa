"""``bminf-lite fill-blank``."""

from __future__ import annotations

import json
from pathlib import Path

import cpm_kit
import pytest
from cli_kit import run
from click.testing import Result

import bminf_lite
from bminf_lite.text.infilling import fill_spans

pytest.importorskip("jieba")
TEXT = "今天<span>不错，我们去<span>。"
OPTIONS = ["--max-new-tokens", "7", "--temperature", "1", "--seed", "2", "--frequency-penalty", "0.5"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cpm_kit.write(tmp_path_factory.mktemp("fill") / "model", "cpm2")


def fill(model: Path, *arguments: str, stdin: str | None = None) -> Result:
    return run("fill-blank", model, "--device", "cpu", *arguments, stdin=stdin)


def test_prints_the_whole_text_as_the_api_gives_it(model: Path) -> None:
    result = fill(model, TEXT, *OPTIONS)
    assert result.exit_code == 0, result.stderr
    with bminf_lite.load(model, device="cpu") as loaded:
        fillings = loaded.fill_blank(TEXT, max_new_tokens=7, temperature=1.0, seed=2, frequency_penalty=0.5)
    assert result.stdout == fill_spans(TEXT, fillings) + "\n" and result.stderr == ""
    value = json.loads(fill(model, TEXT, "--json", *OPTIONS).stdout)
    assert value["text"] == fill_spans(TEXT, fillings)
    assert value["fillings"] == [{"position": f.position, "text": f.text} for f in fillings]
    assert fill(model, "-", *OPTIONS, stdin=TEXT + "\n").stdout == result.stdout


def test_wrong_usage(model: Path, source: Path) -> None:
    for arguments, words in [
        (["no blank"], "<span>"),
        ([TEXT, "--temperature", "-1", "--frequency-penalty", "nan"], "frequency_penalty"),
    ]:
        result = fill(model, *arguments)
        assert result.exit_code == 2 and words in result.stderr and "Traceback" not in result.stderr
    result = fill(source, TEXT)
    assert result.exit_code == 2 and "fills no blanks" in result.stderr
