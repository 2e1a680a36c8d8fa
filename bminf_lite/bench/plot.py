"""A report as a drawing: cost curves, the parts of a step, kernel speeds by size, or a trade. Needs matplotlib."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files import check_writable, save_result
from .report import Report
from .runner import Measurement
from .serving import ServingResult

CURVES = (
    ("pp", "tokens", "prompt length, tokens"),
    ("enc", "tokens", "source length, tokens"),
    ("tg", "depth", "context length, tokens"),
    ("tg", "batch", "sequences at once"),
)
"""The curves of time: the kind of workload, its field on the horizontal axis, and the label of that axis."""

Drawing = Callable[[Any], None]
"""Draws onto matplotlib's axes."""


def check_target(path: Path) -> None:
    """Raise ``UsageError`` if no drawing can be saved as ``path``; to be called before measuring."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'bminf-lite[plot]'") from None
    suffixes = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in suffixes:
        raise UsageError(f"--plot {path}: its name must end in one of: {', '.join(suffixes)}")
    check_writable(path, "--plot")


def save(report: Report, path: Path) -> None:
    """Draw everything in ``report`` into ``path``, in the format of its suffix; see :func:`check_target`."""
    check_target(path)
    from matplotlib.figure import Figure

    drawings = _curves(report.measurements)
    if report.trace:
        drawings.append(partial(_draw_trace, report=report))
    # Kernels with operations are drawn in operations per second, the others in bytes per second.
    kinds = sorted({bool(k.operations) for k in report.kernels})
    drawings += [partial(_draw_kernels, report=report, operations=kind) for kind in kinds]
    if not drawings:
        raise UsageError("--plot: there is nothing to draw")
    figure = Figure(figsize=(6.5 * len(drawings), 4.5), layout="constrained")
    figure.suptitle(" · ".join(filter(None, (report.bench_model.name if report.bench_model else "", report.device))))
    for axes, draw in zip(figure.subplots(1, len(drawings), squeeze=False)[0], drawings, strict=True):
        draw(axes)
    _save(figure, path)


def save_serving(result: ServingResult, path: Path) -> None:
    """Draw the distributions of the times to the first token and between tokens; see :func:`check_target`."""
    check_target(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.5), layout="constrained")
    figure.suptitle(f"{result.load}: {result.output_rate:,.0f} tokens/s")
    times = {"time to first token": result.first_token, "time between tokens": result.between_tokens}
    for axes, (label, seconds) in zip(figure.subplots(1, 2), times.items(), strict=True):
        ordered = sorted(1e3 * seconds)
        axes.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))])
        axes.set(xlabel=f"{label}, milliseconds", ylabel="share of requests or tokens", ylim=(0, 1))
        axes.grid(alpha=0.3)
    _save(figure, path)


def save_trade(trade: Mapping[str, Any], path: Path) -> None:
    """Draw the divergence of assignments over the time of their products; see :func:`check_target`.

    ``trade`` is that of a migration with a target, see :mod:`bminf_lite.migration.budget`.
    """
    check_target(path)
    from matplotlib.figure import Figure

    points, chosen = trade["points"], trade["points"][trade["chosen"]]
    measured = [point for point in points if point["measured"] is not None]

    def times(some: Sequence[Mapping[str, Any]]) -> list[float]:
        return [1e3 * point["request_seconds"] for point in some]

    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(times(points), [point["expected"] for point in points], ".-", label="expected")
    axes.plot(times(measured), [point["measured"] for point in measured], "x", label="measured")
    axes.plot(times([chosen]), [chosen["measured"]], "o", fillstyle="none", markersize=12, label="kept")
    axes.axhline(trade["target"], color="black", linestyle="--", label="target")
    axes.set(
        xlabel=f"products of a request on {trade['times_of']}, milliseconds", ylabel=f"divergence, {trade['unit']}"
    )
    axes.set_yscale("log")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.removeprefix(".").lower())
    save_result(path, content.getvalue())


def _curves(measurements: Sequence[Measurement]) -> list[Drawing]:
    """A drawing for each curve that has two points; one drawing of all measurements if there is no such curve."""
    drawings: list[Drawing] = []
    for kind, variable, label in CURVES:
        lines: dict[str, list[Measurement]] = defaultdict(list)
        for m in measurements:
            if m.test.kind == kind:
                same = {n: v for n, v in vars(m.test).items() if n not in ("kind", variable)}
                lines[", ".join(f"{n} {v}" for n, v in same.items())].append(m)
        if any(len({getattr(m.test, variable) for m in line}) > 1 for line in lines.values()):
            drawings.append(partial(_draw_curve, lines=lines, variable=variable, label=label))
    if measurements and not drawings:
        drawings.append(partial(_draw_tests, measurements=measurements))
    return drawings


def _draw_curve(axes: Any, lines: dict[str, list[Measurement]], variable: str, label: str) -> None:
    for name, line in lines.items():
        points = sorted((getattr(m.test, variable), 1e3 * m.step_seconds) for m in line)
        axes.plot([x for x, _ in points], [y for _, y in points], "o-", label=name)
    prefill = variable == "tokens"
    axes.set(xlabel=label, ylabel="milliseconds per prompt" if prefill else "milliseconds per step")
    axes.set_xscale("symlog" if variable == "depth" else "log", base=2)
    places = sorted({getattr(m.test, variable) for line in lines.values() for m in line})
    axes.set_xticks(places, [f"{place:,}" for place in places], rotation=30)
    if prefill:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.1 * max(1e3 * m.step_seconds for line in lines.values() for m in line))
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def _draw_tests(axes: Any, measurements: Sequence[Measurement]) -> None:
    axes.barh(
        [str(m.test) for m in measurements], [m.speed for m in measurements], xerr=[m.deviation for m in measurements]
    )
    axes.invert_yaxis()
    axes.set(xlabel="tokens per second")


def _draw_trace(axes: Any, report: Report) -> None:
    """The time of each kind of kernel, the longest first."""
    assert report.trace is not None
    total: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for span in report.trace.spans:
        total[span.name] += span.seconds
        count[span.name] += 1
    names = sorted(total, key=lambda name: -total[name])
    axes.barh([f"{count[n]} x {n}" for n in names], [1e6 * total[n] for n in names])
    axes.axvline(1e6 * report.trace.step_seconds, color="black", linestyle="--", label="the whole step")
    axes.invert_yaxis()
    axes.set(xlabel="microseconds of one decode step")
    axes.legend(fontsize="small")


def _draw_kernels(axes: Any, report: Report, operations: bool) -> None:
    rates: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for kernel, row in zip(report.kernels, report.rows()["kernels"], strict=True):
        if bool(kernel.operations) == operations:
            rates[kernel.kernel].append((kernel.shape, row["rate"]))
    for name, points in rates.items():
        axes.plot([shape for shape, _ in points], [rate for _, rate in points], "o-", label=name)
    limit = report.ceilings.int8 / 1e12 if operations else report.ceilings.copy / 1e9
    axes.axhline(limit, color="black", linestyle="--", label="int8 product" if operations else "copy")
    axes.set(ylabel="TOPS" if operations else "GB/s")
    axes.set_ylim(bottom=0)
    axes.tick_params(axis="x", rotation=75, labelsize="small")
    axes.legend(fontsize="small")
