"""Draws the Grafana dashboard of examples/serving from what a Prometheus server has stored, without Grafana.

    python tools/draw_dashboard.py --model demo-int8 --minutes 5 docs/images/serving_dashboard.svg

Every panel must have data: an expression that finds none is an error.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import httpx
import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

plt.rcParams["svg.fonttype"] = "none"

DASHBOARD = Path(__file__).parents[1] / "examples" / "serving" / "grafana.json"
RATE_INTERVAL = "20s"
"""Four scrapes of 5 s, as Grafana chooses it."""


def query(prometheus: str, expression: str, minutes: float) -> list[dict[str, Any]]:
    """The series of an expression over the last minutes."""
    end = time.time()
    response = httpx.get(
        f"{prometheus}/api/v1/query_range",
        params={"query": expression, "start": end - 60 * minutes, "end": end, "step": 5},
    )
    response.raise_for_status()
    return list(response.json()["data"]["result"])


def draw_panel(axes: Any, panel: dict[str, Any], prometheus: str, model: str, minutes: float) -> None:
    """One panel: its targets as lines over minutes."""
    for target in panel["targets"]:
        expression = target["expr"].replace("$model_name", model).replace("$__rate_interval", RATE_INTERVAL)
        found = query(prometheus, expression, minutes)
        if not found:
            raise SystemExit(f"{panel['title']}: nothing found by {expression}")
        for series in found:
            name = target["legendFormat"]
            for label, value in series["metric"].items():
                name = name.replace(f"{{{{{label}}}}}", value)
            points = [(float(at), float(value)) for at, value in series["values"]]
            latest = time.time()
            times = [(at - latest) / 60 for at, _ in points]
            axes.plot(times, [v if math.isfinite(v) else math.nan for _, v in points], label=name, linewidth=1.4)
    unit = {"s": "seconds", "percentunit": "share"}.get(panel["fieldConfig"]["defaults"]["unit"], "")
    axes.set_title(panel["title"], fontsize=10, loc="left")
    axes.set_ylabel(unit, fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_xlim(-minutes, 0)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="best", framealpha=0.6)


def main() -> None:
    """Draw all panels, two in a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--model", required=True)
    parser.add_argument("--minutes", type=float, default=5)
    arguments = parser.parse_args()
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    figure, grid = plt.subplots(math.ceil(len(panels) / 2), 2, figsize=(11, 2.3 * math.ceil(len(panels) / 2)))
    for axes, panel in zip(grid.flat, panels, strict=True):
        draw_panel(axes, panel, arguments.prometheus, arguments.model, arguments.minutes)
    for axes in grid[-1]:
        axes.set_xlabel("minutes", fontsize=8)
    figure.tight_layout()
    figure.savefig(arguments.output, metadata={"Date": None})


if __name__ == "__main__":
    main()
