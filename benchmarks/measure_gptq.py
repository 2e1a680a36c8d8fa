"""GPTQ on a device: whether it equals its definition, and how long the products of a layer take.

    python benchmarks/measure_gptq.py --device cuda [--shape llama-3-8b] [--tokens 65536] [--equality OUT,IN OUT,IN ...]

The first part rounds random matrices ``[OUT, IN]``, with inputs that depend on each other, on the device and by the
definition in NumPy. From the same root, codes of the first block must be equal. It prints the share of equal codes over
all blocks, and the square of each product's error, relative to plain rounding, with the device's root and with the
definition's. The second part times the Hessian of ``--tokens`` tokens, its root, and the rounding of each product of a
layer of the shape, with random numbers, and multiplies by the number of layers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np

from bminf_lite import backend
from bminf_lite.backend.base import Backend
from bminf_lite.backend.gptq import Root, hessian, inverse_root
from bminf_lite.backend.quantization import Int8Weight, quantize_weight
from bminf_lite.backend.values import GPTQ_BLOCK
from bminf_lite.bench.model import read_shape

BATCH_TOKENS = 4096


def correlated(random: np.random.Generator, rows: int, inputs: int) -> np.ndarray:
    """Inputs that a few directions explain, fp16 ``[rows, inputs]``."""
    few = max(inputs // 4, 1)
    x = random.standard_normal((rows, few), np.float32) @ random.standard_normal((few, inputs), np.float32)
    x = x / few**0.5 + 0.3 * random.standard_normal(x.shape, np.float32)
    found: np.ndarray = x.astype(np.float16)
    return found


def error(x: np.ndarray, weight: np.ndarray, rounded: Int8Weight) -> float:
    """The squared error of the product."""
    return float(np.square(x.astype(np.float32) @ (rounded.dequantize() - weight).T).sum(dtype=np.float64))


def check(ops: Backend, outputs: int, inputs: int) -> None:
    """Compare the device with the definition on one matrix, and print a line. Raises ``SystemExit`` if it differs."""
    random, calibration_ops = np.random.default_rng(inputs), ops.calibration_ops()
    x, weight = correlated(random, 2 * inputs, inputs), random.standard_normal((outputs, inputs), np.float32)
    total = calibration_ops.add_hessian(ops.array(x), len(x))
    root = calibration_ops.gptq_root(total, None, 1)
    exact = inverse_root(hessian(x.astype(np.float32)))
    used = Root(np.asarray(ops.host(root.order)), np.array(ops.host(root.values)))
    found = calibration_ops.gptq_weight(calibration_ops.matrix(weight), root, None, 1)
    by_definition = Backend().calibration_ops()
    same_root, defined = (by_definition.gptq_weight(weight, r, None, 1) for r in (used, exact))
    first = used.order[:GPTQ_BLOCK]
    differing = int((found.codes[:, first] != same_root.codes[:, first]).sum())
    if differing:
        raise SystemExit(f"{outputs} x {inputs}: {differing} codes of the first block differ from the definition's")
    plain = error(x, weight, quantize_weight(weight))
    errors = [error(x, weight, rounded) / plain for rounded in (found, same_root, defined)]
    print(
        f"{outputs} x {inputs}: first block equal; {np.mean(found.codes == same_root.codes):.4%} of all codes equal "
        f"with the same root; error of plain rounding's: {errors[0]:.4f}, by the definition {errors[1]:.4f} with that "
        f"root and {errors[2]:.4f} with its own",
        flush=True,
    )
    if not errors[0] < 1.02 * errors[2]:
        raise SystemExit(f"{outputs} x {inputs}: the device's error is larger than the definition's")


def seconds(ops: Backend, work: Callable[[], object]) -> float:
    """Seconds of ``work()``, until its last number is on the host."""
    marker = ops.array(np.zeros(1, np.float32))
    ops.host(marker)
    start = time.perf_counter()
    work()
    ops.host(marker)
    return time.perf_counter() - start


def layer_products(shape: str) -> list[tuple[int, tuple[int, ...]]]:
    """The products of a LLaMA's layer: inputs, and the outputs of the matrices that share them."""
    config = read_shape(shape)
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = hidden // heads
    kv = kv_heads * head_dim
    return [
        (hidden, (heads * head_dim, kv, kv)),
        (heads * head_dim, (hidden,)),
        (hidden, (wide,) * 2),
        (wide, (hidden,)),
    ]


def time_layer(ops: Backend, shape: str, tokens: int) -> None:
    """Print the time of each part of each product of a layer, and of all layers; the second of two runs."""
    random, calibration_ops, whole = np.random.default_rng(0), ops.calibration_ops(), 0.0
    for inputs, outputs in layer_products(shape):
        x = ops.array(correlated(random, BATCH_TOKENS, inputs).astype(ops.activation_dtype))
        matrices = [calibration_ops.matrix(random.standard_normal((n, inputs), np.float32)) for n in outputs]
        for _ in range(2):
            kept: list[object] = []

            def add_hessians(x: object = x, kept: list[object] = kept) -> None:
                total = None
                for _ in range(tokens // BATCH_TOKENS):
                    total = calibration_ops.add_hessian(x, BATCH_TOKENS, total)
                kept.append(total)

            def make_root(kept: list[object] = kept) -> None:
                kept.append(calibration_ops.gptq_root(kept[0], None, 1))

            def round_all(kept: list[object] = kept, matrices: Sequence[object] = matrices) -> None:
                for matrix in matrices:
                    calibration_ops.gptq_weight(matrix, kept[1], None, 1)

            parts = [seconds(ops, work) for work in (add_hessians, make_root, round_all)]
        whole += sum(parts)
        print(
            f"{inputs} inputs, {' + '.join(map(str, outputs))} outputs: Hessian {1e3 * parts[0]:.1f} ms, "
            f"root {1e3 * parts[1]:.1f} ms, rounding {1e3 * parts[2]:.1f} ms",
            flush=True,
        )
    layers = read_shape(shape)["num_hidden_layers"]
    print(f"a layer: {whole:.2f} s; {layers} layers: {layers * whole / 60:.2f} minutes")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--equality", nargs="*", default=["96,128", "256,1000", "512,4096"], metavar="OUT,IN")
    parser.add_argument("--no-times", action="store_true")
    options = parser.parse_args()
    with closing(backend.create(options.device)) as ops:
        for matrix in options.equality:
            outputs, inputs = map(int, matrix.split(","))
            check(ops, outputs, inputs)
        if not options.no_times:
            time_layer(ops, options.shape, options.tokens)


if __name__ == "__main__":
    main()
