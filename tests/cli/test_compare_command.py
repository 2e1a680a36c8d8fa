"""``bminf-lite compare``: output, the report and refusals. What it computes is tested in tests/evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_checkpoint
from cli_kit import output, run

from bminf_lite.cli.compare import was_searched

CPU = ("--device", "cpu")


def test_lines_for_people_name_the_worst_products(source: Path, int8: Path, text: Path):
    lines = output("compare", int8, source, text, *CPU).splitlines()
    assert lines[0].startswith("perplexity ") and ": ratio " in lines[0] and "same most likely token" in lines[1]
    end = lines.index("", 4)  # what follows is advice
    losses = [float(line.split("w8a8")[1].split("dB")[0].split()[-1]) for line in lines[4:end]]
    assert "the loss is small" in lines[end + 1]
    assert len(losses) == 5 and losses == sorted(losses)


def test_what_is_advised_depends_on_how_the_model_was_made(int8: Path, tmp_path: Path):
    assert not was_searched(int8) and not was_searched(tmp_path)
    (tmp_path / "bminf_lite.json").write_text(json.dumps({"cost": {"kl": 0.1, "trade": {}}}))
    assert was_searched(tmp_path)


def test_json_has_every_layer(source: Path, int8: Path, text: Path):
    options = ("--json", "--window", 32, "--stride", 16, "--tokens", 100)
    found = json.loads(output("compare", int8, source, text, *options, *CPU))
    assert (found["tokens"], len(found["blocks"]), len(found["linears"])) == (100, 2, 9)
    assert {"ratio", "ratio_error", "kl", "kl_median", "kl_p999", "agreement"} <= found.keys()
    assert {"own", "accumulated", "input", "reference_input", "name", "scheme"} <= found["linears"][0].keys()


def test_the_cache_of_the_model_can_be_int8(source: Path, int8: Path, text: Path):
    found = [
        json.loads(output("compare", int8, source, text, "--json", "--tokens", 100, "--kv-cache", cache, *CPU))
        for cache in ("fp16", "int8")
    ]
    assert found[0]["kl"] != found[1]["kl"] and found[0]["reference_perplexity"] == found[1]["reference_perplexity"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_report_that_the_disk_does_not_hold_costs_no_result(source: Path, int8: Path, text: Path):
    result = run("compare", int8, source, text, "--report", "/dev/full", "--json", *CPU)
    assert result.exit_code == 1 and "/dev/full: cannot be written: No space left" in result.stderr
    assert json.loads(result.stdout)["tokens"] > 100


def test_what_is_wrong_is_told_before_any_work(source: Path, int8: Path, text: Path, tmp_path: Path):
    other = tiny_checkpoint.write(tmp_path / "other", vocab_size=300)
    (tmp_path / "empty.txt").write_text("")
    for arguments, code, message in (
        ([int8, other, text], 2, "vocabulary's size is 260, but the reference's is 300"),
        ([int8, source, tmp_path / "empty.txt"], 2, "holds no text"),
        ([int8, source, text, "--window", 1000], 2, "context, 128"),
        ([int8, source, text, "--report", tmp_path / "none" / "r.html"], 2, "does not exist"),
        ([int8, source, text, "--tokens", 1], 2, "--tokens"),
        ([int8, tmp_path / "none", text], 1, "none: does not exist"),
    ):
        result = run("compare", *arguments, *CPU)
        assert result.exit_code == code and message in result.stderr, (arguments, result.output)
