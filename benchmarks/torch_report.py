"""Make results for the benchmark page from runs of ``bench_torch.py``, and show the figures that matter most.

    python benchmarks/torch_report.py results.json ... [--write]

The sections of one machine may be in several files. Prints ratios to the peers. ``--write`` writes ``torch-*.json``
into ``benchmarks/results``, from which ``make_benchmarks.py`` makes the page and its plots. A table that the run has
nothing for stays, and so do the rows of models and calls that it did not measure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bminf_lite.bench.report import markdown_table

RESULTS = Path(__file__).parent / "results"
NAMES = {
    "ours": "bminf_lite.torch",
    "w8a8": "w8a8",
    "w8a16": "w8a16",
    "engine": "the engine's kernel",
    "ours, bf16": "bminf_lite.torch, bf16",
    "torch": "eager torch",
    "torch, bf16": "eager torch, bf16",
    "compile": "torch.compile",
    "triton": "Triton",
    "_int_mm": "torch._int_mm",
    "bitsandbytes": "bitsandbytes",
}
"""Columns of tables of times, in this order."""
COUNTS = {"q, o": 2, "k, v": 2, "gate, up": 2, "down": 1}
"""The products of a layer of LLaMA 8B, and how many of each it has."""
GIB = 1 << 30
Found = dict[str, Any]
Rows = list[dict[str, str]]


class Run:
    """The results of runs on one machine, by section, case and name."""

    def __init__(self, *raw: Found) -> None:
        self.about: Found = raw[0]["about"]
        self.results = {(r["section"], r["case"], r["name"]): r for part in raw for r in part["results"]}

    def cases(self, section: str, prefix: str = "") -> list[str]:
        """The cases of a section, in the order of the run."""
        return list(dict.fromkeys(case for s, case, _ in self.results if s == section and case.startswith(prefix)))

    def names(self, section: str) -> list[str]:
        """What was measured in a section, in the order of ``NAMES``."""
        found = {name for s, _, name in self.results if s == section}
        return [name for name in NAMES if name in found]

    def seconds(self, section: str, case: str, name: str) -> float | None:
        """None if it was not measured."""
        found = self.results.get((section, case, name))
        return None if found is None else found["seconds"]

    def ratio(self, section: str, case: str, peer: str, ours: str = "ours") -> float | None:
        """How many times as fast ours is."""
        own, theirs = self.seconds(section, case, ours), self.seconds(section, case, peer)
        return None if own is None or theirs is None else theirs / own


def times(run: Run, section: str) -> Rows:
    """Microseconds of each case by each library."""
    names = run.names(section)

    def cell(case: str, name: str) -> str:
        seconds = run.seconds(section, case, name)
        return "" if seconds is None else f"{seconds * 1e6:.3g}" if seconds < 1e-3 else f"{seconds * 1e6:.0f}"

    def shown(case: str) -> str:
        return case.replace("bfloat", "bf").replace("float", "fp")

    return [
        {"microseconds": shown(case)} | {NAMES[name]: cell(case, name) for name in names} for case in run.cases(section)
    ]


def figures(run: Run) -> list[Found]:
    """A plot for each operation over rows and type: the share of the device's bandwidth by the width."""
    found = []
    for prefix in dict.fromkeys(case.rpartition(" ")[0] for case in run.cases("rows")):
        cases = run.cases("rows", f"{prefix} ")
        series = {
            NAMES[name]: [
                [int(case.rpartition(" ")[2]), 100 * run.results["rows", case, name]["bandwidth_share"]]
                for case in cases
                if ("rows", case, name) in run.results
            ]
            for name in run.names("rows")
        }
        title = prefix.replace("float", "fp")
        found.append(
            {
                "file": f"torch-{title.replace(' ', '-').replace('_', '-')}.svg",
                "title": title,
                "x": "columns",
                "y": "% of the bandwidth of a copy",
                "series": {name: points for name, points in series.items() if points},
            }
        )
    return found


def models(run: Run) -> Rows:
    """Decoding, streaming and training."""
    rows: Rows = []
    for _, case, name in (key for key in run.results if key[0] == "decode"):
        found = run.results["decode", case, name]
        rows.append(
            {
                "what": f"LLaMA 8B, {case}, {name}, one sequence behind 512 tokens",
                "value": f"{1 / found['seconds']:.1f} tokens/s",
            }
        )
    for section, what in (
        ("stream", "LLaMA 70B, forward of 2,048 tokens"),
        ("lora", "LLaMA 8B, LoRA step, 512 tokens"),
    ):
        for case in run.cases(section):
            found = next(r for (s, c, _), r in run.results.items() if (s, c) == (section, case))
            share = f", {found['share']:.1%} of a link of {found['link'] / 1e9:.1f} GB/s" if "share" in found else ""
            rows.append(
                {
                    "what": f"{what}, {found['blocks']} layers streamed",
                    "value": f"{found['seconds']:.3g} s, {found['peak'] / GIB:.2f} GiB allocated, "
                    f"{found['peak_reserved'] / GIB:.2f} GiB reserved{share}",
                }
            )
    for case in run.cases("host"):
        for (section, other, name), found in run.results.items():
            if (section, other) == ("host", case):
                value = f"{found['host_seconds'] * 1e6:.1f} us"
                rows.append({"what": f"host time of a call under {case}: {name}", "value": value})
    return rows


def published(run: Run) -> dict[str, Found]:
    """The results for the page, by the names of their files."""
    about = run.about
    peers = ", ".join(f"{name} {about[name]}" for name in ("triton", "bitsandbytes") if about.get(name))
    common = {
        "gpu": about["gpu"],
        "date": about["date"],
        "command": about["command"],
        "versions": f"driver {about['driver']}, CUDA {about['cuda']}, torch {about['torch']}"
        + (f", {peers}" if peers else ""),
    }
    graphs = "Device times of CUDA graphs' replays."
    files: dict[str, tuple[str, str, Callable[[], Rows]]] = {
        "torch-rows": (
            "PyTorch: softmax and norms",
            f"128 MiB of rows in fp16, 256 MiB in fp32. {graphs} The Triton kernels are those of "
            "`benchmarks/triton_peers.py`.",
            lambda: times(run, "rows"),
        ),
        "torch-square": (
            "PyTorch: square_linear_",
            f"8,192 rows, fp16. {graphs} The peers write to other memory.",
            lambda: times(run, "square"),
        ),
        "torch-linear": (
            "PyTorch: int8_linear",
            f"Products of LLaMA 8B, bf16 input; eager torch is `F.linear` in bf16. {graphs} bitsandbytes takes fp16, "
            "and torch.compile gets w8a8 written with `torch._int_mm`, whose own column is the product alone.",
            lambda: times(run, "linear"),
        ),
        "torch-dot": (
            "PyTorch: dot",
            f"2,048 x 4,096 by 4,096 x 4,096, int8 with scales and bf16. {graphs}",
            lambda: times(run, "dot"),
        ),
        "torch-backward": (
            "PyTorch: gradients",
            "Input gradients of the products with 2,048 rows, bf16"
            + (", and gradients of RMSNorm over 64 MiB." if run.cases("backward", "rms_norm") else "."),
            lambda: times(run, "backward"),
        ),
        "torch-models": (
            "PyTorch: models and calls",
            "Random weights; the rows may be of several runs."
            + (
                " The compiled models run `torch.compile` in the mode `reduce-overhead` with a static cache."
                if run.cases("decode", "compiled")
                else ""
            ),
            lambda: models(run),
        ),
    }
    found = {}
    for name, (title, note, make) in files.items():
        if rows := make():
            extra = {"figures": figures(run)} if name == "torch-rows" else {}
            found[name] = {"title": title, "note": note, **common, "rows": rows, **extra}
    return found


def with_former_rows(result: Found, former: Found) -> Found:
    """``result`` with the rows of ``former`` that it lacks at the end; each row has its date."""
    measured = {row["what"] for row in result["rows"]}
    kept = [row for row in former["rows"] if row["what"] not in measured]
    rows = [row | {"date": result["date"]} for row in result["rows"]]
    rows += [row | {"date": row.get("date", former.get("date"))} for row in kept]
    return {key: value for key, value in result.items() if key != "date"} | {"rows": rows}


def summary(run: Run) -> Rows:
    """The ratios to the peers, the worst case of each."""
    rows: Rows = []

    def add(what: str, ratios: Iterable[float | None], unit: str = "times as fast, the worst case") -> None:
        known = [ratio for ratio in ratios if ratio is not None]
        if known:
            rows.append({"what": what, "value": f"{min(known):.3f} {unit}"})

    for peer in ("engine", "torch", "compile", "triton"):
        cases = [(run.ratio("rows", case, peer) or float("inf"), case) for case in run.cases("rows")]
        if cases and min(cases)[0] < float("inf"):
            add(f"rows against {NAMES[peer]} ({min(cases)[1]})", [min(cases)[0]])
    up_to_4096 = [case for case in run.cases("square") if int(case.removeprefix("n=")) <= 4096]
    add("square_linear_, n up to 4,096, against cuBLAS", (run.ratio("square", case, "torch") for case in up_to_4096))
    add("int8_linear, gate and up, 2,048 rows", [run.ratio("linear", "gate, up rows=2048", "torch", "w8a8")])
    for count in (1, 2048):
        add(f"int8_linear, products of a layer, {count} rows", [_of_layer(run, "linear", f" rows={count}", "w8a8")])
    add("input gradient", (run.ratio("backward", case, "torch") for case in COUNTS))
    add("input gradient, products of a layer", [_of_layer(run, "backward", "", "ours")])
    compiled = "compiled, static cache"
    add("decoding of the wrapped model, compiled", [run.ratio("decode", compiled, "bf16", "w8a8")])
    engine, wrapped = run.seconds("decode", "engine", "w8a8"), run.seconds("decode", compiled, "w8a8")
    if engine and wrapped:
        rows.append(
            {"what": "the engine against the wrapped model, decoding", "value": f"{wrapped / engine:.2f} times"}
        )
    return rows + [row for row in models(run) if not row["what"].startswith("LLaMA 8B, c")]


def _of_layer(run: Run, section: str, suffix: str, ours: str) -> float | None:
    """The ratio of the sums over the products of a layer of LLaMA 8B."""
    sums = []
    for name in ("torch", ours):
        seconds = [(run.seconds(section, case + suffix, name), count) for case, count in COUNTS.items()]
        if any(own is None for own, _ in seconds):
            return None
        sums.append(sum((own or 0.0) * count for own, count in seconds))
    return sums[0] / sums[1]


def main(arguments: list[str]) -> None:
    files = [Path(argument) for argument in arguments if not argument.startswith("--")]
    run = Run(*(json.loads(file.read_text(encoding="utf-8")) for file in files))
    print(markdown_table(summary(run)))
    if "--write" in arguments:
        for name, result in published(run).items():
            path = RESULTS / f"{name}.json"
            if name == "torch-models" and path.exists():
                result = with_former_rows(result, json.loads(path.read_text(encoding="utf-8")))
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
