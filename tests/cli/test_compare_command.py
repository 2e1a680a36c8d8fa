"""``bminf-lite compare``: output, the report and refusals. What it computes is tested in tests/evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_checkpoint
from click.testing import CliRunner, Result

import bminf_lite
from bminf_lite.cli import main

TEXT = "The quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("compare") / "source")


@pytest.fixture(scope="module")
def int8(source: Path) -> Path:
    bminf_lite.migrate(source, source.parent / "int8")
    return source.parent / "int8"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def compare(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, arguments), "--device", "cpu"])


def test_lines_for_people_name_the_worst_products(source: Path, int8: Path, text: Path):
    result = compare(int8, source, text)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].startswith("perplexity ") and "ratio 1.0" in lines[0] and "same most likely token" in lines[1]
    losses = [float(line.split("w8a8")[1].split("dB")[0]) for line in lines[4:]]
    assert len(losses) == 5 and losses == sorted(losses)


def test_json_has_every_layer(source: Path, int8: Path, text: Path):
    found = json.loads(compare(int8, source, text, "--json", "--window", 32, "--stride", 16, "--tokens", 100).stdout)
    assert (found["tokens"], len(found["blocks"]), len(found["linears"])) == (100, 2, 9)
    assert {"ratio", "ratio_error", "kl", "kl_median", "kl_p999", "agreement"} <= found.keys()
    assert {"own", "accumulated", "input", "reference_input", "name", "scheme"} <= found["linears"][0].keys()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_report_that_the_disk_does_not_hold_costs_no_result(source: Path, int8: Path, text: Path):
    result = compare(int8, source, text, "--report", "/dev/full", "--json")
    assert result.exit_code == 1 and "/dev/full: cannot be written: No space left" in result.stderr
    assert json.loads(result.stdout)["tokens"] > 100


def test_the_report_is_written(source: Path, int8: Path, text: Path, tmp_path: Path):
    result = compare(int8, source, text, "--report", tmp_path / "r.html")
    assert result.exit_code == 0, result.stderr
    assert str(tmp_path / "r.html") in result.stderr
    assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_what_is_wrong_is_told_before_any_work(source: Path, int8: Path, text: Path, tmp_path: Path):
    other = tiny_checkpoint.write(tmp_path / "other", vocab_size=300)
    (tmp_path / "empty.txt").write_text("")
    for arguments, message in (
        ([int8, other, text], "vocabulary's size is 260, but the reference's is 300"),
        ([int8, source, tmp_path / "empty.txt"], "holds no text"),
        ([int8, source, text, "--window", 1000], "context, 128"),
        ([int8, source, text, "--report", tmp_path / "none" / "r.html"], "does not exist"),
        ([int8, source, text, "--tokens", 1], "--tokens"),
    ):
        result = compare(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert message in result.stderr
    result = compare(int8, tmp_path / "none", text)
    assert result.exit_code == 1
    assert "none: does not exist" in result.stderr
