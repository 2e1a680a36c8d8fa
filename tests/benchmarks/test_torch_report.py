"""Results of ``bench_torch.py`` as tables and plots of the page."""

from __future__ import annotations

from pathlib import Path

import make_benchmarks
import pytest
import torch_report

LAYER = ("q, o", "k, v", "gate, up", "down")


@pytest.fixture
def run() -> torch_report.Run:
    """A run in which every peer takes twice as long, but for square_linear_."""
    results = []

    def add(section: str, case: str, name: str, seconds: float, **extra: float) -> None:
        results.append({"section": section, "case": case, "name": name, "seconds": seconds, **extra})

    for width in (256, 4096):
        for name in ("ours", "torch", "triton"):
            seconds = 1e-4 if name == "ours" else 2e-4
            add("rows", f"softmax float16 {width}", name, seconds, bandwidth_share=1e-4 / seconds)
    add("square", "n=512", "ours", 2e-5)
    add("square", "n=512", "torch", 1e-5)
    for case in LAYER:
        add("linear", f"{case} rows=2048", "w8a8", 1e-4)
        add("linear", f"{case} rows=2048", "torch", 2e-4)
    add("decode", "compiled, static cache", "bf16", 6e-3)
    add("decode", "compiled, static cache", "w8a8", 4e-3)
    add("decode", "engine", "w8a8", 2e-3)
    add("stream", "70B", "forward", 1.0, blocks=50, share=0.93, link=5e10, peak=20 << 30, peak_reserved=21 << 30)
    add("host", "no_grad", "softmax", 1e-5, host_seconds=8e-6)
    about = {
        "gpu": "A GPU",
        "driver": "1",
        "cuda": "13.0",
        "torch": "2.11.0",
        "triton": "3.6",
        "bitsandbytes": "",
        "date": "2026-01-02",
        "command": "python benchmarks/bench_torch.py results.json",
    }
    return torch_report.Run({"about": about, "results": results})


def test_ratios_to_the_peers(run: torch_report.Run) -> None:
    found = {row["what"]: row["value"] for row in torch_report.summary(run)}
    assert found["rows against Triton (softmax float16 256)"].startswith("2.000 times")
    assert found["square_linear_, n up to 4,096, against cuBLAS"].startswith("0.500 times")
    assert found["int8_linear, products of a layer, 2048 rows"].startswith("2.000 times")
    assert found["decoding of the wrapped model, compiled"].startswith("1.500 times")
    assert found["the engine against the wrapped model, decoding"] == "2.00 times"
    assert found["host time of a call under no_grad: softmax"] == "8.0 us"
    assert "20.00 GiB allocated" in found["LLaMA 70B, forward of 2,048 tokens, 50 layers streamed"]


def test_what_was_not_measured_is_left_out(run: torch_report.Run) -> None:
    published = torch_report.published(run)
    assert published.keys() == {"torch-rows", "torch-square", "torch-linear", "torch-models"}
    first = published["torch-rows"]["rows"][0]
    assert first == {
        "microseconds": "softmax fp16 256",
        "bminf_lite.torch": "100",
        "eager torch": "200",
        "Triton": "200",
    }


def test_rows_that_a_run_lacks_stay_with_their_date(run: torch_report.Run) -> None:
    result = torch_report.published(run)["torch-models"]
    again, lora = result["rows"][0]["what"], {"what": "LoRA step", "value": "0.3 s"}
    former = {"date": "2025-12-31", "rows": [lora, {"what": again, "value": "1 token/s"}]}
    merged = torch_report.with_former_rows(result, former)
    assert merged["rows"][0] == result["rows"][0] | {"date": "2026-01-02"} and "date" not in merged
    assert merged["rows"][-1] == lora | {"date": "2025-12-31"} and len(merged["rows"]) == len(result["rows"]) + 1
    assert torch_report.with_former_rows(result, merged) == merged


def test_the_page_has_the_tables_and_plots(run: torch_report.Run, tmp_path: Path) -> None:
    published = torch_report.published(run)
    page = make_benchmarks.page(list(published.values()))
    assert "![softmax fp16](images/torch-softmax-fp16.svg)" in page and "triton 3.6" in page
    pytest.importorskip("matplotlib")
    make_benchmarks.draw_lines(published["torch-rows"]["figures"][0], tmp_path)
    assert (tmp_path / "torch-softmax-fp16.svg").read_text().startswith("<?xml")
