"""Times int8 products of many rows with every plausible tile, on compute capability 9.0.

    python benchmarks/measure_gemm_tiles.py [--products 6144x4096,28672x4096:gated] [--rows 66,128,512] [--json FILE]

Prints the configuration that the model of the cost chooses (``GemmTileConfig.cost``) beside the fastest one, and how
much longer the chosen ones take. ``SLOWER``, ``NARROW`` and ``EXCHANGE`` of ``gemm_hopper.py`` were fitted to such
times. Weights are read from memory, not from the L2 cache: several of them take turns. Takes about 30 seconds.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bminf_lite import backend
from bminf_lite.bench.report import markdown_table
from bminf_lite.bench.runner import make_profiler
from bminf_lite.cuda.kernels.arrays import pitch_of
from bminf_lite.cuda.kernels.constants import GEMM_STAGE_COLUMNS, Epilogue
from bminf_lite.cuda.kernels.gemm.gemm_hopper import FLOAT_EPILOGUES, TILE_CONFIGS, GemmTileConfig, PitchedPointer
from bminf_lite.errors import BminfError

EPILOGUES = {"half": Epilogue.TO_HALF, "float": Epilogue.TO_FLOAT, "add": Epilogue.ADD, "gated": Epilogue.GATED}
PRODUCTS = (
    "6144x4096,4096x4096:add,28672x4096:gated,4096x14336:add,"  # LLaMA 3 8B
    "16384x2048:gated,2048x8192:add,35840x5120:gated,7680x5120,8192x28672:add"  # 3.2 1B, Phi-4, 3 70B
)
"""Channels and columns of the weights, and what becomes of the results."""
ROWS = "66,96,128,192,256,384,512,640,768,1024,1280,1536,2048"
COST_BOUND = 1.35
"""Configurations of a higher cost, relative to the least, are not timed."""
COLD_BYTES = 256 << 20
"""The bytes of all weights that take turns: more than the L2 cache holds."""


@dataclass(frozen=True)
class Product:
    """``[rows, columns] @ [channels, columns].T`` with an epilogue."""

    channels: int
    columns: int
    epilogue: Epilogue

    @classmethod
    def parse(cls, text: str) -> Product:
        """From ``CHANNELSxCOLUMNS[:EPILOGUE]``; raises ``ValueError`` if it is not of this form."""
        form = re.fullmatch(r"(\d+)x(\d+)(?::(\w+))?", text)
        if form is None:
            raise ValueError(f"{text!r} is not of the form CHANNELSxCOLUMNS[:EPILOGUE]")
        channels, columns, epilogue = form.groups("half")
        if epilogue not in EPILOGUES:
            raise ValueError(f"{text!r}: {epilogue!r} is not one of {', '.join(EPILOGUES)}")
        return cls(int(channels), int(columns), EPILOGUES[epilogue])

    def __str__(self) -> str:
        return f"{self.channels} x {self.columns}, {self.epilogue.name.lower()}"

    def costs(self, rows: int, num_sms: int) -> dict[GemmTileConfig, float]:
        """The modelled cost of each configuration that can compute it and may be the fastest."""
        stages = -(-self.columns // GEMM_STAGE_COLUMNS)
        costs = {
            config: config.cost(rows, self.channels, stages, self.epilogue, num_sms)
            for config in TILE_CONFIGS
            if config.serves(self.epilogue, stages)
        }
        return {config: cost for config, cost in costs.items() if cost <= COST_BOUND * min(costs.values())}


def loss(seconds: dict[GemmTileConfig, float], costs: dict[GemmTileConfig, float]) -> float:
    """How much longer the configuration of the least cost takes than the fastest, as a fraction of the latter."""
    return seconds[min(costs, key=costs.__getitem__)] / min(seconds.values()) - 1


class Timer:
    """Times products by the benchmark's profiler. Ends the script where the kernel does not run."""

    def __init__(self) -> None:
        try:
            ops = backend.create("cuda")
        except BminfError as error:
            sys.exit(f"error: {error}")
        from bminf_lite.backend.cuda.backend import CudaBackend

        assert isinstance(ops, CudaBackend)
        self.ops, self.profiler, self.gemm = ops, make_profiler(ops), ops.fused.scaled_gemm
        self.num_sms = ops.kernels.num_sms
        if not self.gemm.supported:
            sys.exit(f"error: {ops.device.name}: gemm_hopper.cu needs a GPU of compute capability 9.0")

    def seconds(self, product: Product, rows: int, configs: list[GemmTileConfig]) -> dict[GemmTileConfig, float]:
        """The time of a product in a row of products, by configuration."""
        channels, arrays = product.channels, self.ops.arrays
        count = max(2, COLD_BYTES // (channels * product.columns))
        weights, x = [self._codes(channels, product.columns) for _ in range(count)], self._codes(rows, product.columns)
        scales = arrays.zeros((max(rows, channels),), np.float32)
        width = channels // (2 if product.epilogue is Epilogue.GATED else 1)
        out = arrays.rows(rows, width, np.float32 if product.epilogue in FLOAT_EPILOGUES else np.float16)

        def run(config: GemmTileConfig, i: int) -> None:
            self.gemm.launch(
                pointer(x),
                scales.data.ptr,
                pointer(weights[i % count]),
                scales.data.ptr,
                0,
                pointer(out),
                rows=rows,
                channels=channels,
                in_features=product.columns,
                epilogue=product.epilogue,
                tile_config=config,
                stream=self.ops.stream.ptr,
            )

        return {config: self.profiler.median_seconds(partial(run, config)) for config in configs}

    def _codes(self, rows: int, columns: int) -> Any:
        matrix = self.ops.arrays.rows(rows, columns, np.int8)
        self.ops.kernels.pointwise.fill_random(matrix, seed=0)
        return matrix


def pointer(matrix: Any) -> PitchedPointer:
    """The address of a padded matrix, and the elements from row to row."""
    return matrix.data.ptr, pitch_of(matrix)


def label(config: GemmTileConfig) -> str:
    """Width, blocks of a cluster, and blocks that share a tile."""
    return f"{config.width}, {config.cluster}, {config.split_k}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--products", default=PRODUCTS)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    try:
        products = [Product.parse(text) for text in options.products.split(",")]
        all_rows = [int(text) for text in options.rows.split(",")]
    except ValueError as error:
        parser.error(str(error))
    timer, table, losses, record = Timer(), [], [], []
    for product in products:
        for rows in all_rows:
            costs = product.costs(rows, timer.num_sms)
            seconds = timer.seconds(product, rows, list(costs))
            chosen, best = min(costs, key=costs.__getitem__), min(seconds, key=seconds.__getitem__)
            losses.append(loss(seconds, costs))
            table.append(
                {
                    "product": str(product),
                    "rows": str(rows),
                    "chosen": label(chosen),
                    "us": f"{1e6 * seconds[chosen]:.2f}",
                    "fastest": label(best),
                    "its us": f"{1e6 * seconds[best]:.2f}",
                }
            )
            times = {label(config): [seconds[config], costs[config]] for config in costs}
            record.append({"product": str(product), "rows": rows, "seconds and costs": times})
    print(markdown_table(table))
    print(f"\nThe chosen ones take {100 * fmean(losses):.1f} % longer in the mean, {100 * max(losses):.1f} % at most.")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
