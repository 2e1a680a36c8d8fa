"""A benchmark's results as Markdown tables, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .model import BenchModel
from .profiler import Ceilings, Span
from .runner import KernelTime, Measurement, Trace, Workload

Row = Mapping[str, Any]
UNKNOWN = Ceilings(math.nan, math.nan, math.nan)


@dataclass
class Report:
    """The results of one run of the benchmark.

    Of a model on several devices, the bytes and shares are those of the first, and ``ceilings`` the limits of one.
    """

    device: str
    versions: Mapping[str, str]
    ceilings: Ceilings = UNKNOWN
    bench_model: BenchModel | None = None
    measurements: list[Measurement] = field(default_factory=list)
    trace: Trace | None = None
    kernels: list[KernelTime] = field(default_factory=list)

    def rows(self) -> dict[str, list[Row]]:
        """The tables by name, each a list of rows with the same keys."""
        tables = {
            "tests": [self._test_row(m) for m in self.measurements],
            "trace": [self._span_row(i, s) for i, s in enumerate(self.trace.spans)] if self.trace else [],
            "trace_by_name": self._name_rows(self.trace) if self.trace else [],
            "kernels": [self._kernel_row(k) for k in self.kernels],
        }
        return {name: rows for name, rows in tables.items() if rows}

    def _test_row(self, m: Measurement) -> Row:
        assert self.bench_model is not None
        return {
            "model": self.bench_model.name,
            "size_bytes": self.bench_model.nbytes,
            "parameters": self.bench_model.parameters,
            "device": self.device,
            "test": str(m.test),
            "tokens_per_second": m.speed,
            "deviation": m.deviation,
            "milliseconds": 1e3 * m.step_seconds,
            "bytes_per_token": round(m.token_bytes),
            "percent_of_read": 100 * m.bandwidth / self.ceilings.read,
            "percent_of_int8": 100 * m.operations * m.speed / self.ceilings.int8,
            "experts": None if m.experts is None else m.experts.num_experts,
            "experts_read": None if m.experts is None else m.experts.counted,
            "experts_expected": None if m.experts is None else m.experts.expected,
            "streamed_bytes_per_token": round(m.streamed_bytes),
            "percent_of_link": self._percent_of_link(m),
            "predicted_tokens_per_second": self._prediction(m.test),
            "peak_used_bytes": m.peak_used,
            "peak_reserved_bytes": m.peak_reserved,
        }

    def _percent_of_link(self, m: Measurement) -> float | None:
        """None but for decoding with streamed layers, where few copies begin before or end after the measured time."""
        if self.ceilings.link is None or m.test.kind != "tg":
            return None
        return 100 * m.streamed_bytes * m.speed / self.ceilings.link

    def _prediction(self, test: Workload) -> float | None:
        """The speed of decoding that ``plan`` predicts from the limits measured here; None without a plan."""
        plan = self.bench_model.plan if self.bench_model is not None else None
        if plan is None or test.kind != "tg":
            return None
        machine = replace(plan.machine, link=self.ceilings.link, bandwidth=self.ceilings.read)
        context = test.depth + test.tokens // 2
        return replace(plan, machine=machine, context=context, batch=test.batch).tokens_per_second

    def _span_row(self, index: int, span: Span) -> Row:
        return {
            "launch": index,
            "name": span.name,
            "microseconds": 1e6 * span.seconds,
            "bytes": span.nbytes or None,
            "percent_of_read": 100 * span.nbytes / span.seconds / self.ceilings.read if span.nbytes else None,
            "gap_microseconds": 1e6 * span.gap,
        }

    def _name_rows(self, trace: Trace) -> list[Row]:
        """The parts of a trace grouped by name, the longest total first."""
        groups: dict[str, list[Span]] = {}
        for span in trace.spans:
            groups.setdefault(span.name, []).append(span)
        rows = []
        for name, spans in groups.items():
            seconds, nbytes = sum(s.seconds for s in spans), sum(s.nbytes for s in spans)
            rows.append(
                {
                    "name": name,
                    "launches": len(spans),
                    "microseconds": 1e6 * seconds,
                    "percent_of_step": 100 * seconds / trace.alone,
                    "percent_of_read": 100 * nbytes / seconds / self.ceilings.read if nbytes else None,
                }
            )
        return sorted(rows, key=lambda row: -row["microseconds"])

    def _kernel_row(self, k: KernelTime) -> Row:
        rate = k.operations / k.seconds / 1e12 if k.operations else k.nbytes / k.seconds / 1e9
        limit = self.ceilings.int8 / 1e12 if k.operations else self.ceilings.copy / 1e9
        return {
            "kernel": k.kernel,
            "shape": k.shape,
            "microseconds": 1e6 * k.seconds,
            "rate": rate,
            "unit": "TOPS" if k.operations else "GB/s",
            "percent_of_ceiling": 100 * rate / limit,
            "plain_microseconds": 1e6 * k.plain_seconds if k.plain_seconds else None,
            "speedup": k.plain_seconds / k.seconds if k.plain_seconds else None,
            "allocated_bytes": k.allocated,
        }

    # -- forms --------------------------------------------------------------------------------------------------------

    def markdown(self) -> str:
        """Rounded tables, and below them the limits of the device."""
        parts = [markdown_table([ROW_FORMATTERS[name](row) for row in rows]) for name, rows in self.rows().items()]
        if self.trace:
            parts.append(
                f"One decode step after {self.trace.depth} tokens takes {1e6 * self.trace.step_seconds:.1f} us as it "
                f"is run; its {len(self.trace.spans)} parts take {1e6 * self.trace.alone:.1f} us one by one."
            )
        parts += [
            f"{m.test}: the routing is not balanced: a layer reads {m.experts.counted:.1f} experts on average, and "
            f"{m.experts.expected:.1f} if each token chose at random."
            for m in self.measurements
            if m.experts is not None and not m.experts.is_balanced
        ]
        c = self.ceilings
        link = "" if c.link is None else f"from pinned host memory {c.link / 1e9:,.1f} GB/s, "
        parts.append(
            f"Measured on this device: read {c.read / 1e9:,.1f} GB/s, copy {c.copy / 1e9:,.1f} GB/s, {link}"
            f"int8 product {_number(c.int8 / 1e12)} TOPS.\n"
            + ", ".join(f"{name} {version}" for name, version in self.versions.items())
        )
        return "\n\n".join(parts)

    def json(self) -> str:
        """One object with unrounded figures."""
        whole: dict[str, Any] = {
            "device": self.device,
            "versions": dict(self.versions),
            "ceilings": {
                "read_bytes_per_second": self.ceilings.read,
                "copy_bytes_per_second": self.ceilings.copy,
                "link_bytes_per_second": self.ceilings.link,
                "int8_operations_per_second": self.ceilings.int8,
            },
            **self.rows(),
        }
        for row, m in zip(whole.get("tests", []), self.measurements, strict=False):
            row["seconds"] = list(m.seconds)
        if self.trace:
            whole["step_microseconds"] = 1e6 * self.trace.step_seconds
        return json.dumps(whole, indent=2)

    def csv(self) -> str:
        """A header and rows for each table; an empty line separates tables."""
        parts = []
        for rows in self.rows().values():
            text = io.StringIO()
            writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            parts.append(text.getvalue())
        return "\n".join(parts).rstrip("\n")


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def _number(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _figure(value: float | None, digits: int = 1) -> str:
    """A number with ``digits`` digits after the point; empty for None."""
    return "" if value is None else f"{value:.{digits}f}"


def _format_test_row(row: Row) -> Row:
    parameters, reserved = row["parameters"], row["peak_reserved_bytes"]
    streaming = {
        "streamed MB/token": _figure(row["streamed_bytes_per_token"] / 1e6),
        "% link": _figure(row["percent_of_link"]),
        "planned t/s": _figure(row["predicted_tokens_per_second"], 2),
    }
    experts = {
        "experts read": f"{_figure(row['experts_read'])} of {_figure(row['experts'], 0)}",
        "if balanced": _figure(row["experts_expected"]),
    }
    return {
        "model": row["model"],
        "size": _size(row["size_bytes"]),
        "params": f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M",
        "device": row["device"],
        "test": row["test"],
        "t/s": f"{row['tokens_per_second']:.2f} ± {row['deviation']:.2f}",
        "ms": f"{row['milliseconds']:.3f}",
        "MB/token": f"{row['bytes_per_token'] / 1e6:.2f}",
        "% read": f"{row['percent_of_read']:.1f}",
        "% int8": f"{row['percent_of_int8']:.1f}",
        "peak used": _size(row["peak_used_bytes"]),
        "peak reserved": "" if reserved is None else _size(reserved),
        **(experts if row["experts"] is not None else {}),
        **(streaming if row["streamed_bytes_per_token"] else {}),
    }


def _format_span_row(row: Row) -> Row:
    return {
        "launch": str(row["launch"]),
        "name": row["name"],
        "us": f"{row['microseconds']:.2f}",
        "MB": "" if row["bytes"] is None else f"{row['bytes'] / 1e6:.3f}",
        "% read": _figure(row["percent_of_read"]),
        "us to the next": f"{row['gap_microseconds']:.2f}",
    }


def _format_name_row(row: Row) -> Row:
    return {
        "name": row["name"],
        "launches": str(row["launches"]),
        "us": f"{row['microseconds']:.1f}",
        "% of all": f"{row['percent_of_step']:.1f}",
        "% read": _figure(row["percent_of_read"]),
    }


def _format_kernel_row(row: Row) -> Row:
    allocated = row["allocated_bytes"]
    return {
        "kernel": row["kernel"],
        "shape": row["shape"],
        "us": f"{row['microseconds']:.1f}",
        "rate": f"{_number(row['rate'])} {row['unit']}",
        "% of ceiling": f"{row['percent_of_ceiling']:.1f}",
        "plain us": _figure(row["plain_microseconds"]),
        "times faster": _figure(row["speedup"]),
        "MB taken": _figure(None if allocated is None else allocated / 1e6),
    }


ROW_FORMATTERS = {
    "tests": _format_test_row,
    "trace": _format_span_row,
    "trace_by_name": _format_name_row,
    "kernels": _format_kernel_row,
}


def markdown_table(rows: Sequence[Row]) -> str:
    """Rows with the same keys as a Markdown table with aligned columns; columns of figures are aligned to the right."""
    names = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    right = {name: all(row[name][:1].isdigit() or not row[name] for row in rows) for name in names}

    def line(cells: Mapping[str, str]) -> str:
        padded = (cells[n].rjust(widths[n]) if right[n] else cells[n].ljust(widths[n]) for n in names)
        return f"| {' | '.join(padded)} |"

    rule = {n: "-" * (widths[n] - right[n]) + ":" * right[n] for n in names}
    return "\n".join([line({n: n for n in names}), line(rule), *(line(row) for row in rows)])
