"""Measures up to how many rows a w8a16 product of bminf_lite.torch is faster without dequantizing its weight.

    python benchmarks/measure_float_products.py [table.json]

Writes the rows for this GPU, by type and by the weight's size, into the table that the package reads, or into a copy of
it. Weights are read from memory, not from the L2 cache: several of them take turns. Takes about 20 seconds.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bminf_lite.cuda.runtime.libraries import driver_release
from bminf_lite.torch import _kernels
from bminf_lite.torch._choices import FLOAT_PRODUCTS
from bminf_lite.torch.measuring import measure

GPU = torch.device("cuda", 0)
COLUMNS = 4096
DTYPES = torch.float16, torch.bfloat16
ELEMENTS = [1 << power for power in (20, 22, 24, 26, 27)]
ROWS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)
COLD_BYTES = 128 << 20
"""The bytes of all weights that take turns: more than the L2 cache holds."""
Product = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], object]


def seconds(product: Product, rows: int, weights: list[Tensor], scale: Tensor, dtype: torch.dtype) -> float:
    """The device time of one product with a weight that is not in the cache."""
    x = torch.randn(rows, COLUMNS, device=GPU, dtype=dtype)
    out = torch.empty(rows, len(scale), device=GPU, dtype=dtype)

    def all_weights(x: Tensor) -> None:
        for codes in weights:
            product(x, codes, scale, None, out)

    return measure(all_weights, x, batches=5, seconds=0.02, graph=True).seconds / len(weights)


def most_rows(elements: int, dtype: torch.dtype) -> int:
    """The last of ``ROWS`` before the first at which dequantizing is faster; 0 if it always is."""
    n = elements // COLUMNS
    count = max(1, COLD_BYTES // elements)
    weights = [torch.randint(-127, 128, (n, COLUMNS), device=GPU, dtype=torch.int8) for _ in range(count)]
    scale = torch.rand(n, device=GPU)
    faster = []
    for rows in ROWS:
        few, dequantized = (
            seconds(product, rows, weights, scale, dtype)
            for product in (_kernels.gemv_linear, _kernels.dequantized_linear)
        )
        print(f"{dtype} {elements:11,} {rows:3} rows: {few * 1e6:8.1f} us, dequantized {dequantized * 1e6:8.1f} us")
        if few > dequantized:
            break
        faster.append(rows)
    return faster[-1] if faster else 0


def merged(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """``pairs`` of elements and rows without those that repeat the rows before."""
    return [next(group) for _, group in itertools.groupby(pairs, key=lambda pair: pair[1])]


def main(arguments: list[str]) -> None:
    path = Path(arguments[0] if arguments else str(FLOAT_PRODUCTS))
    about = {
        "driver": driver_release(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "command": "python benchmarks/measure_float_products.py",
        "date": time.strftime("%Y-%m-%d"),
    }
    table = json.loads(FLOAT_PRODUCTS.read_text())
    table[torch.cuda.get_device_name(0)] = {"about": about} | {
        str(dtype): merged([(elements, most_rows(elements, dtype)) for elements in ELEMENTS]) for dtype in DTYPES
    }
    path.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
