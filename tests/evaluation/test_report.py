"""The report: one file that needs nothing else, with the worst layer in plain sight, whatever the numbers are."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bminf_lite.errors import BminfError
from bminf_lite.evaluation.compare import BlockReport, Comparison, LinearReport
from bminf_lite.evaluation.divergence import Divergence, DivergenceAccumulator
from bminf_lite.evaluation.fidelity import ActivationStats, Fidelity
from bminf_lite.evaluation.report import log_axis, number, render, rows, write_report

EXACT = Fidelity(math.inf, 1.0)


def divergence(noise: float = 0.01, tokens: int = 300) -> Divergence:
    rng = np.random.default_rng(0)
    logits, change = rng.standard_normal((2, tokens, 11)).astype(np.float32)
    total = DivergenceAccumulator()
    total.add(logits, logits + np.float32(noise) * change, np.zeros(tokens, int))
    return total.result()


def linear(name: str, snr_db: float = 40.0, largest: float = 9.0) -> LinearReport:
    profile = ActivationStats(largest, ((3, largest), (1, largest / 2)), 2.0)
    return LinearReport((f"{name}.weight",), "w8a8", Fidelity(snr_db, 0.999), Fidelity(30.0, 0.99), profile, profile)


def comparison(layers: int = 3, **changes: object) -> Comparison:
    blocks = tuple(
        BlockReport(
            i,
            Fidelity(35.0, 0.999),
            Fidelity(33.0, 0.998),
            tuple(
                linear(f"model.layers.{i}.{name}", 20.0 if (i, name) == (1, "mlp.down_proj") else 40.0 + i)
                for name in ("self_attn.o_proj", "mlp.down_proj")
            ),
        )
        for i in range(layers)
    )
    return replace(Comparison(divergence(), blocks, (linear("lm_head"),), "cpu"), **changes)


class Checker(HTMLParser):
    """Tags that close what they open, and the addresses that a browser would load."""

    VOID = ("meta", "link", "br", "img", "rect", "line", "circle", "path")

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.links += [str(values[key]) for key in ("src", "href") if key in values]
        self.ids |= {str(values["id"])} if "id" in values else set()
        if tag not in self.VOID or tag == "rect":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.VOID and tag != "rect":
            return
        assert self.open.pop() == tag


@pytest.mark.parametrize("layers", [0, 1, 3, 80])
def test_it_is_whole_and_needs_nothing_else(layers: int):
    html = render(comparison(layers), "int8", "float", "text.txt")
    found = Checker(html)
    assert all(link.startswith("#") and link[1:] in found.ids for link in found.links)
    assert not re.search(r"https?:|@import|url\(", html)
    assert "nan" not in html.lower().replace("nann", "")


def test_the_worst_product_is_named_first_and_framed():
    html = render(comparison(), "int8", "float", "text.txt")
    tile = html[html.index('class="tile worst"') :]
    assert tile.index("model.layers.1.mlp.down_proj") < tile.index("</div></div>") + 400
    assert html.count('<rect class="frame"') == html.count('<tr id="p3" class="worst">') == 1
    worst = max(rows(comparison()), key=lambda row: row.percent)
    assert (worst.layer, worst.kind, worst.percent) == (1, "mlp.down_proj", pytest.approx(10))


def test_it_has_the_comparison_s_numbers_and_escapes_names():
    found = comparison()
    html = render(found, "<script>alert(1)</script>", "a&b", '"x"')
    d = found.divergence
    for text in (f"{d.ratio:.4f}", f"{d.kl:.5f}", f"{d.kl_p999:.4f}", f"{100 * d.agreement:.2f} %", "300 tokens"):
        assert text in html
    assert "<script>alert" not in html and "a&amp;b" in html


DECIBELS = st.one_of(st.just(math.inf), st.floats(-40, 200))


@settings(max_examples=8)
@given(st.lists(st.tuples(DECIBELS, st.floats(0, 1e6)), min_size=2, max_size=2))
@example([(40.0, 4.97e-197), (40.0, 4.97e-197)])
@example([(40.0, 5e-324), (40.0, 0.0)])
def test_any_numbers_make_a_page(values):
    linears = tuple(linear(f"h.0.{i}", snr, largest) for i, (snr, largest) in enumerate(values))
    block = BlockReport(0, Fidelity(values[0][0], 1), Fidelity(values[1][0], 1), linears)
    for found in (divergence(0.0), divergence(3.0, 2)):
        Checker(render(Comparison(found, (block,), (), "cpu"), "a", "b", "c"))


def test_a_model_without_any_error():
    exact = replace(linear("h.0.mlp"), own=EXACT, accumulated=EXACT)
    html = render(Comparison(divergence(0.0), (BlockReport(0, EXACT, EXACT, (exact,)),), (), "cpu"), "a", "b", "c")
    assert "equal" in html


def test_names_that_are_not_utf_8(tmp_path: Path):
    write_report(tmp_path / "r.html", comparison(), Path("a\udcff"), Path("b"), Path("c"))
    assert "a\\udcff" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_where_it_cannot_be_written(tmp_path: Path):
    with pytest.raises(BminfError, match="cannot be written"):
        write_report(tmp_path / "none" / "r.html", comparison(), Path("a"), Path("b"), Path("c"))


@given(st.lists(st.floats(1e-12, 1e12), min_size=1), st.integers(1, 8))
@example([131.0], 1)
@example([4.97e-197], 5)
@example([1e-300, 1.1e-300], 1)
def test_an_axis_holds_its_values(values, decades):
    axis = log_axis(values, 10, 110, decades=decades)
    assert all(10 <= axis(v) <= 110 for v in values)
    assert all(10 <= at <= 110 for at, _ in axis.marks())
    assert axis.marks() and len(axis.marks()) <= 12
    ordered = sorted(values)
    assert [axis(v) for v in ordered] == sorted(axis(v) for v in ordered)


def test_labels():
    assert [number(x) for x in (1e-5, 3e-7, 0.001, 0.3, 50, 10000.0, 1e6)] == [
        "10⁻⁵",
        "3·10⁻⁷",
        "0.001",
        "0.3",
        "50",
        "10000",
        "10⁶",
    ]
