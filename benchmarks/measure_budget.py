"""A migration with a target, and what its assignment would cost a model of another shape.

    python benchmarks/measure_budget.py [MODEL] [--share 0.5] [--shape llama-3-8b] [--plot FILE]

MODEL, by default the bundled one, is migrated with w8a8 and then with ``auto`` and a target of ``share`` of the
divergence of w8a8, both measured on the same part of the held-out text in its folder. The assignment is then carried
over to the shape by kind of product: a kind's time is the mean over its products of the bundled model, each with the
shape's sizes. Times are modelled (:func:`bminf_lite.bench.product_times.modelled_time`). The quotients are those of
uniform w8a8's time, of the products alone: attention and norms, which are the same, would bring them nearer to 1.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bminf_lite
from bminf_lite.bench.model import read_shape
from bminf_lite.bench.plot import save_trade
from bminf_lite.bench.product_times import ProductMethod, ProductTime, modelled_time
from bminf_lite.checkpoint.opened_model import describe_model
from bminf_lite.checkpoint.recipe import Scheme
from bminf_lite.cli.migrate import cost_line, trade_lines
from bminf_lite.models.spec import Role, Spec

DEMO = Path(bminf_lite.__file__).parent / "demo_model"


def kind_of(tensors: Iterable[str]) -> str:
    """The kind of a product: the names of its matrices without the numbers of layers."""
    return ", ".join(re.sub(r"\.\d+\.", ".N.", name) for name in tensors)


def shape_products(spec: Spec, products: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, ProductMethod]]:
    """The kinds of products of a model with ``spec``, each with its number and one of them in plain w8a8.

    ``products`` are those of a model of the same architecture, which say what is stacked.
    """
    found = {}
    kinds = {kind_of(product["tensors"]): product["tensors"] for product in products}
    for kind, tensors in kinds.items():
        patterns = [re.compile(re.escape(part).replace(r"\.N\.", r"\.\d+\.")) for part in kind.split(", ")]
        names = [[name for name in spec.parameters if pattern.fullmatch(name)] for pattern in patterns]
        shapes = [spec.parameters[matching[0]].shape for matching in names]
        assert len(tensors) == len(shapes)
        is_head = spec.parameters[names[0][0]].role is Role.HEAD
        method = ProductMethod(sum(s[0] for s in shapes), shapes[0][1], Scheme.W8A8, is_head=is_head)
        found[kind] = len(names[0]), method
    return found


def shape_time(spec: Spec, products: Sequence[Mapping[str, Any]]) -> tuple[ProductTime, ProductTime]:
    """The time of all products of a model with ``spec``: with the assignment of ``products``, and in w8a8."""
    of_kind: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for product in products:
        of_kind[kind_of(product["tensors"])].append(product)
    totals = [[0.0, 0.0], [0.0, 0.0]]
    for kind, (count, plain) in shape_products(spec, products).items():
        for product in of_kind[kind]:
            chosen = replace(
                plain,
                scheme=Scheme(product["scheme"]),
                rotation=product["rotation"],
                outliers=len(product["outlier_columns"]),
            )
            for total, method in zip(totals, (chosen, plain), strict=True):
                time = modelled_time(method)
                total[0] += count / len(of_kind[kind]) * time.prompt
                total[1] += count / len(of_kind[kind]) * time.step
    chosen_total, plain_total = (ProductTime(*total) for total in totals)
    return chosen_total, plain_total


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=DEMO)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--offline-only", action="store_true")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    text = options.model / "heldout.txt"
    with tempfile.TemporaryDirectory() as folder:
        given = {"calibrate": text, "samples": 16, "device": "cpu"}
        plain = bminf_lite.migrate(options.model, Path(folder) / "w8a8", "w8a8", **given)  # type: ignore[arg-type]
        target = options.share * plain.cost["kl"]
        print(f"w8a8: {plain.cost['kl']:.6f} nats per token; target: {target:.6f}", flush=True)
        report = bminf_lite.migrate(
            options.model,
            Path(folder) / "out",
            "auto",
            target_divergence=target,
            offline_only=options.offline_only,
            **given,  # type: ignore[arg-type]
        )
    trade = report.cost["trade"]
    print("\n".join([*trade_lines(trade), cost_line(report.cost)]))
    spec = describe_model(read_shape(options.shape)).spec
    chosen, uniform = shape_time(spec, report.calibration["products"])
    for name, one, other in (("prompt", chosen.prompt, uniform.prompt), ("request", chosen.request, uniform.request)):
        print(
            f"{options.shape}, products of a {name}: {1e3 * one:.2f} ms, w8a8 {1e3 * other:.2f} ms, "
            f"speed {other / one:.1%} of w8a8's"
        )
    if options.plot:
        save_trade(trade, options.plot)


if __name__ == "__main__":
    main()
