"""The forms of a report: a table for people, JSON, CSV and drawings."""

from __future__ import annotations

import csv
import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.bench import plot
from bminf_lite.bench.calls import ExpertUse
from bminf_lite.bench.model import random_model
from bminf_lite.bench.profiler import Ceilings, Span
from bminf_lite.bench.report import Report
from bminf_lite.bench.runner import KernelTime, Measurement, Trace, Workload
from bminf_lite.errors import UsageError
from bminf_lite.memory.planner import Machine, MemoryPlan, MemoryRequirements
from bminf_lite.memory.step_time import StepWork

SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
CEILINGS = Ceilings(read=4e12, copy=3.5e12, int8=1e15)


def measured(kind: str, tokens: int, depth: int = 0, batch: int = 1, seconds: float = 0.5) -> Measurement:
    times = (seconds, seconds * 1.1, seconds)
    return Measurement(Workload(kind, tokens, depth, batch), times, 8e9, 1.6e10, 9 << 30, None)


@pytest.fixture
def report() -> Report:
    return Report(
        "a device",
        {"bminf-lite": "1"},
        CEILINGS,
        random_model("small", SHAPE, CpuBackend()),
        [measured("pp", 512), measured("tg", 128, depth=512)],
        Trace(512, [Span("embed", 1e-6, 100, 2e-6), Span("matvec<1>", 9e-6, 16_000_000, 0.0)], 8e-6),
        [KernelTime("norm", "4 x 8", 1e-5, 20_000_000, 0, 4e-5), KernelTime("igemm", "1 x 2", 1e-3, 5, 10**12, None)],
    )


def test_markdown(report: Report) -> None:
    text = report.markdown()
    assert "| small " in text and "| pp512 " in text and "tg128 @ d512" in text
    assert "1024.00 ± " in text, "512 tokens in half a second"
    assert "51.2" in text, "128 tokens of 8 GB in half a second are 2.05 of 4 TB/s"
    assert "takes 8.0 us as it is run; its 2 parts take 10.0 us one by one" in text
    assert "2,000 GB/s" in text and "1,000 TOPS" in text and "4.0" in text
    assert "read 4,000.0 GB/s, copy 3,500.0 GB/s, int8 product 1,000 TOPS" in text
    for table in text.split("\n\n")[:4]:
        assert len({len(line) for line in table.splitlines()}) == 1, "columns line up"


def test_the_experts_that_were_read(report: Report) -> None:
    even, uneven = ExpertUse(128, 80.0, 82.4), ExpertUse(128, 41.0, 82.4)
    report.measurements = [replace(m, experts=x) for m, x in zip(report.measurements, (even, uneven), strict=True)]
    text = report.markdown()
    assert "80.0 of 128" in text and "82.4" in text
    assert "tg128 @ d512: the routing is not balanced: a layer reads 41.0 experts" in text
    assert "pp512: the routing" not in text
    row = json.loads(report.json())["tests"][1]
    assert (row["experts"], row["experts_read"], row["experts_expected"]) == (128, 41.0, 82.4)


def test_json(report: Report) -> None:
    data = json.loads(report.json())
    assert data["ceilings"]["read_bytes_per_second"] == 4e12
    assert data["tests"][0]["tokens_per_second"] == 1024
    assert data["tests"][0]["seconds"] == [0.5, 0.55, 0.5]
    assert data["tests"][1]["percent_of_read"] == pytest.approx(100 * 8e9 * 256 / 4e12)
    assert data["trace"][1]["percent_of_read"] == pytest.approx(100 * 16e6 / 9e-6 / 4e12)
    assert [row["name"] for row in data["trace_by_name"]] == ["matvec<1>", "embed"], "the longest first"
    assert data["trace_by_name"][0]["percent_of_step"] == pytest.approx(90)
    assert data["kernels"][0]["percent_of_ceiling"] == pytest.approx(100 * 2e12 / 3.5e12)
    assert data["kernels"][0]["speedup"] == pytest.approx(4)


def test_what_is_streamed_is_told_beside_what_was_planned(report: Report) -> None:
    assert "% link" not in report.markdown(), "nothing was streamed"
    bench_model, machine = report.bench_model, Machine(1 << 30)
    assert bench_model is not None
    requirements = MemoryRequirements((10**9,) * 4, 10**8, 10**7, StepWork(4 * 10**9, 20, 8, 100), (), 100, 100, 1024)
    report.bench_model = replace(bench_model, plan=MemoryPlan(requirements, machine, 256, 1, 32, streamed=(0, 1, 2, 3)))
    report.ceilings = replace(CEILINGS, link=50e9)
    prefill, decode = report.measurements
    prefill, decode = replace(prefill, streamed_bytes=4e9 / 512), replace(decode, streamed_bytes=4e9, seconds=(12.8,))
    report.measurements = [prefill, decode]
    text, (prompt, decoding) = report.markdown(), json.loads(report.json())["tests"]
    assert "from pinned host memory 50.0 GB/s" in text
    assert prompt["predicted_tokens_per_second"] is None
    assert decoding["percent_of_link"] == pytest.approx(80), "4 GB each 100 ms"
    assert decoding["predicted_tokens_per_second"] == pytest.approx(1 / 0.08, rel=0.01)
    row = next(line for line in text.splitlines() if "tg128" in line)
    assert [cell.strip() for cell in row.split("|")[-4:-1]] == ["4000.0", "80.0", "12.49"]


def test_csv(report: Report) -> None:
    tables = [list(csv.DictReader(io.StringIO(part))) for part in report.csv().split("\n\n")]
    assert [len(table) for table in tables] == [2, 2, 2, 2]
    assert float(tables[0][0]["tokens_per_second"]) == 1024
    assert tables[0][0]["peak_reserved_bytes"] == ""


def test_an_empty_report_still_tells_the_limits() -> None:
    report = Report("a device", {}, CEILINGS)
    assert report.markdown().startswith("Measured on this device")
    assert report.csv() == "" and "tests" not in json.loads(report.json())


@pytest.mark.slow
def test_drawings(report: Report, tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    report.measurements += [
        measured("pp", 2048, seconds=2),
        measured("tg", 128, depth=4096, seconds=0.7),
        measured("tg", 128, 512, batch=4),
    ]
    plot.save(report, tmp_path / "all.svg")
    drawn = (tmp_path / "all.svg").read_text()
    assert drawn.count('id="axes_') == 6, "prompt length, context, batch, trace, and kernels by bytes and by operations"
    few = Report("a device", {}, CEILINGS, None, [measured("tg", 128)])
    plot.save(few, tmp_path / "one.svg")
    assert (tmp_path / "one.svg").read_text().count('id="axes_') == 1
    with pytest.raises(UsageError, match="nothing to draw"):
        plot.save(Report("a device", {}, CEILINGS), tmp_path / "none.png")
    with pytest.raises(UsageError, match="nonsense"):
        plot.save(few, tmp_path / "file.nonsense")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'bminf-lite\[plot\]'"):
        plot.check_target(Path("x.png"))
