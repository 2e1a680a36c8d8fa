"""The public functions that measure checkpoints: they are the commands, called from Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_kit import output, run

import bminf_lite
from bminf_lite.errors import UsageError

CONFIGS = Path(__file__).parents[2] / "configs"
ON_CPU = ("--device", "cpu")


def test_perplexity_is_that_of_the_command(int8: Path, text: Path) -> None:
    result = run("perplexity", int8, text, *ON_CPU, "--tokens", "200", "--window", "64").stdout
    found = bminf_lite.perplexity(str(int8), str(text), tokens=200, window=64, device="cpu")
    assert result == f"perplexity {found}\n" and found.tokens == 200
    calls: list[tuple[int, int, str]] = []
    with bminf_lite.load(int8, device="cpu") as model:
        same = bminf_lite.perplexity(
            model, [text.read_text()], tokens=200, window=64, progress=lambda *c: calls.append(c)
        )
        assert same == found and calls[-1][0] == calls[-1][1]
        assert model.generate("x", max_new_tokens=1).token_ids, "the model is still open"


def test_a_comparison_is_that_of_the_command(source: Path, int8: Path, text: Path, tmp_path: Path) -> None:
    result = json.loads(output("compare", int8, source, text, *ON_CPU, "--tokens", "200", "--json"))
    report = tmp_path / "report.html"
    found = bminf_lite.compare(int8, source, text, tokens=200, device="cpu", report=report)
    assert found.to_dict() == result and str(found) == found.divergence.summary()
    assert report.read_text().startswith("<!")
    without = bminf_lite.compare(int8, source, [text.read_text()], tokens=200, device="cpu", layers=False)
    assert without.divergence == found.divergence and not without.blocks


def test_a_plan_is_that_of_the_command() -> None:
    shape = CONFIGS / "llama-3-8b.json"
    arguments = ("--gpu-memory", "6GiB", "--link", "25", "--bandwidth", "360")
    made = bminf_lite.plan(shape, gpu_memory="6GiB", link=25e9, bandwidth=360e9)
    assert output("plan", shape, *arguments) == f"{made}\n"
    assert made.tokens_per_second is not None and made.streamed


@pytest.mark.parametrize("text", [3, [], ["a", ""], None, b"x"])
def test_texts_of_another_type_are_refused(int8: Path, text: object) -> None:
    with pytest.raises(UsageError, match="the text must be"):
        bminf_lite.perplexity(int8, text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["one line\nand another", "word " * 1000])
def test_a_text_in_place_of_a_path_is_refused_and_not_repeated(int8: Path, text: str) -> None:
    with pytest.raises(UsageError, match="must be the path of a file; put the text itself into a list"):
        bminf_lite.perplexity(int8, text)


def test_a_report_s_folder_is_looked_for_first(source: Path, int8: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist; make it first"):
        bminf_lite.compare(int8, source, text, report=tmp_path / "none" / "report.html")


@pytest.mark.parametrize("lengths", [{"window": "64"}, {"stride": 1.5}, {"tokens": 0}])
def test_lengths_that_are_none_are_refused_by_name(int8: Path, source: Path, lengths: dict[str, Any]) -> None:
    ((name, value),) = lengths.items()
    for call in (
        lambda: bminf_lite.perplexity(int8, ["a b"], **lengths),
        lambda: bminf_lite.compare(int8, source, ["a b"], **lengths),
    ):
        with pytest.raises(UsageError, match=f"^{name} is {value!r}, but must be a whole number, 1 or more"):
            call()
