"""Make ``docs/benchmarks.md`` and the picture of README from the results in ``benchmarks/results``.

Each result is a JSON file with ``title``, ``note``, ``gpu`` or ``cpu``, ``versions``, ``rows``, and for all rows or
in each a ``date`` (ISO) and a ``command``. A row has ``what`` and further columns. ``figures`` are plots: each has
``file``, ``title``, the labels ``x`` and ``y``, and ``series``, lists of points by name; with ``linear`` the sizes
are not drawn as powers of two. Needs matplotlib.

    python benchmarks/make_benchmarks.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bminf_lite.bench.report import markdown_table

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
PAGE = REPOSITORY / "docs" / "benchmarks.md"
PICTURE = REPOSITORY / "docs" / "images" / "speed.svg"
PEERS = "peers-llama-3-8b.json"
SPEED = "decode, tokens/s"

HEADER = """# Benchmarks

Each table names its machine, versions, date and command. This page is made from `benchmarks/results/` by
`python benchmarks/make_benchmarks.py`. More figures, with how they came about, are in
[dev/measurements.md](dev/measurements.md).
"""


def page(results: list[dict[str, Any]]) -> str:
    """The page, a section per result."""
    return "\n".join([HEADER, *map(section, results)])


def section(result: dict[str, Any]) -> str:
    """A result as a heading, where and how it was measured, and a table."""
    rows = [{key: text(key, value) for key, value in row.items()} for row in result["rows"]]
    where = ", ".join(result[key] for key in ("gpu", "cpu", "date") if key in result)
    lines = [f"## {result['title']}", "", f"{where}; {result['versions']}. {result['note']}", ""]
    if "command" in result:
        lines += [f"    {result['command']}", ""]
    lines += [markdown_table(rows), ""]
    if figures := result.get("figures"):
        lines += [*(f"![{figure['title']}](images/{figure['file']})" for figure in figures), ""]
    return "\n".join(lines)


def text(key: str, value: str | float) -> str:
    """A cell of a table."""
    return f"`{value}`" if key == "command" else f"{value:,}" if isinstance(value, (int, float)) else value


def plotting() -> Any:
    """matplotlib's ``pyplot`` for SVGs that are the same in every run."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "bminf-lite", "svg.fonttype": "path", "font.size": 11}
    from matplotlib import pyplot

    return pyplot


def draw(result: dict[str, Any], path: Path) -> None:
    """Speeds as bars."""
    pyplot = plotting()
    rows = result["rows"][::-1]
    figure, axes = pyplot.subplots(figsize=(8, 0.55 * len(rows) + 0.9), layout="constrained")
    colors = ["#9aa5b1"] * (len(rows) - 1) + ["#2563eb"]
    bars = axes.barh([row["what"] for row in rows], [row[SPEED] for row in rows], color=colors)
    axes.bar_label(bars, fmt="{:,.0f}", padding=4)
    title = f"LLaMA 3 8B on one {result['gpu']}: decoded tokens per second, batch 1"
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=12)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_xticks([])
    axes.margins(x=0.08)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def draw_lines(described: dict[str, Any], folder: Path) -> None:
    """A plot with a line for each series, over sizes that are powers of two unless it is ``linear``."""
    pyplot = plotting()
    figure, axes = pyplot.subplots(figsize=(5.5, 3.6), layout="constrained")
    for name, points in described["series"].items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=4, label=name)
    if not described.get("linear"):
        axes.set_xscale("log", base=2)
    axes.set(xlabel=described["x"], ylabel=described["y"], title=described["title"], ylim=(0, None))
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(folder / described["file"], metadata={"Date": None})
    pyplot.close(figure)


def read(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """All results, comparisons with others first."""
    files = sorted(
        folder.glob("*.json"),
        key=lambda path: (
            path.name != PEERS,
            not path.name.startswith("peers"),
            path.name == "demo-model.json",
            path.stem,
        ),
    )
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]


def main() -> None:
    results = read()
    PAGE.write_text(page(results), encoding="utf-8")
    draw(results[0], PICTURE)
    for result in results:
        for figure in result.get("figures", []):
            draw_lines(figure, PICTURE.parent)


if __name__ == "__main__":
    main()
