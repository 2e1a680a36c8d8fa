"""The page of benchmarks is the one that the results make, and each result says how it came about."""

from __future__ import annotations

import datetime
from pathlib import Path

import make_benchmarks
import pytest


def test_the_page_is_up_to_date() -> None:
    assert make_benchmarks.PAGE.read_text(encoding="utf-8") == make_benchmarks.page(make_benchmarks.read())


@pytest.mark.parametrize("result", make_benchmarks.read(), ids=lambda result: result["title"])
def test_each_figure_has_its_machine_versions_date_and_command(result: dict) -> None:
    assert result["rows"] and result["versions"] and (result.get("gpu") or result["cpu"])
    for row in result["rows"]:
        described = result | row
        datetime.date.fromisoformat(described["date"])
        assert described["command"]


def test_the_picture_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    make_benchmarks.draw(make_benchmarks.read()[0], tmp_path / "speed.svg")
    assert (tmp_path / "speed.svg").read_text().startswith("<?xml")
