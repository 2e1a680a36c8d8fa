"""Compare variants of decode attention: bits of outputs, time of a launch, and tokens per second of a model.

    python benchmarks/measure_decode_attention.py before=../before "after=.:LONGEST_ALONE=4096;UNITS=(4,2,1)" --rounds 2

A variant is NAME=FOLDER or NAME=FOLDER:SETTINGS. FOLDER holds a source tree of this package, and SETTINGS are the names
and values of constants of ``cuda/kernels/attention/decode.py``. Each variant runs in processes of its own. First each
is compared with the definition over NumPy, and with the bits of the first variant. Then each round times every variant,
so that a GPU that becomes slower affects all: launches back to back in a graph, each on a cache of its own, at the
shape of LLaMA 3 8B, and decode steps of the whole model. Prints the medians of all rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from variants import Variant, apply_settings

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CASES = (
    (1, 512, 1024), (1, 2048, 4096), (1, 2048, 131072), (1, 32768, 33792), (1, 32768, 131072), (8, 8192, 16384),
    (16, 512, 1024), (16, 512, 4096), (16, 2048, 4096), (32, 2048, 4096), (64, 500, 1024), (64, 2048, 4096),
    (256, 300, 1024), (256, 2048, 4096), (1024, 200, 1024),
)  # fmt: skip
"""Sequences, the tokens in the cache of each, and the bound of the tokens of a sequence that the launch gets."""
CHECKED = (
    [0], [15], [512], [1023], [1500], [2048], [4095], [9000], [70000], [0, 1, 62, 63, 64, 127, 128, 1022, 1023, 700],
    [512] * 16, [5, 3000, 1024, 40], [2047] * 16, [100 * i for i in range(40)],
)  # fmt: skip
MODEL_TESTS = (("-d", "512,2048"), ("-d", "512", "-b", "16"), ("-d", "512,32768", "--kv-cache", "int8"))
"""Arguments of ``bench``."""
MIN_LAYERS, MAX_LAYERS = 16, 32
"""Launches of a graph."""
LEAST_BYTES = 256 << 20
"""Bytes of all caches that the launches of a graph read, which exceed the GPU's cache."""
REPLAYS = 9


# ---- in the process of a variant ------------------------------------------------------------------------------------


class Attention:
    """Decode attention of ``layers`` layers with caches of their own, filled with random numbers."""

    def __init__(
        self, context_lens: list[int], int8: bool, layers: int, bound: int | None = None, rotated: bool = False
    ) -> None:
        import cupy as cp

        from bminf_lite.backend.cache_values import LayerCache
        from bminf_lite.backend.values import BLOCK_SIZE, AttentionSpec, Rope
        from bminf_lite.cuda.kernels.attention.decode import AttentionDecode
        from bminf_lite.cuda.kernels.launcher import Launcher
        from bminf_lite.cuda.runtime.driver import Device

        self.stream = cp.cuda.Stream(non_blocking=True)
        self.decode = AttentionDecode(Launcher(Device(0), self.stream.ptr))
        rope = Rope(cp.asarray(5e5 ** -np.linspace(0, 1, HEAD_DIM // 2), cp.float32)) if rotated else None
        self.spec = AttentionSpec(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5, rope=rope)
        counts = [length // BLOCK_SIZE + 1 for length in context_lens]
        rng, count = cp.random.default_rng(7), len(context_lens)
        order = np.random.default_rng(3).permutation(sum(counts)) + 1
        self.tables = np.zeros((count, bound // BLOCK_SIZE if bound else max(counts)), np.int32)
        for row, part in zip(self.tables, np.split(order, np.cumsum(counts)[:-1]), strict=True):
            row[: len(part)] = part
        size = sum(counts) + 1, KV_HEADS, BLOCK_SIZE
        self.caches: list[Any] = []
        for _ in range(layers):
            pools: list[Any] = []
            for _ in range(2):
                width = HEAD_DIM // 2 if int8 else HEAD_DIM
                bits = (rng.random((*size, width), np.float32) * (1 << 16)).astype(np.uint16)
                # fp16: numbers of both signs, from 2^-7 to 2
                pools.append(bits.view(np.int8) if int8 else (bits & 0x9FFF | 0x2000).view(np.float16))
            if int8:
                pools += [(rng.random(size, np.float32) * 0.02).astype(np.float16) for _ in range(2)]
            self.caches.append(LayerCache(*pools))
        self.qkv = rng.standard_normal((count, self.spec.qkv_features), np.float32).astype(np.float16)
        self.context_lens = cp.asarray(context_lens, np.int32)
        self.max_context_len = self.tables.shape[1] * BLOCK_SIZE
        self.table = cp.asarray(self.tables)
        elements = self.decode.record_elements(self.spec, count, self.max_context_len)
        self.records = cp.full(elements, cp.nan, np.float32)
        self.arrivals = cp.zeros(self.decode.arrival_elements(self.spec, count), np.int32)
        self.out = cp.full((count, HEADS * HEAD_DIM), cp.nan, np.float16)
        cp.cuda.Device().synchronize()

    def launch(self, layers: int | None = None) -> None:
        """The first ``layers`` in one step, by default all."""
        from bminf_lite.cuda.kernels.launcher import StepContext

        step = StepContext()
        for cache in self.caches[:layers]:
            self.decode.launch(
                step,
                self.qkv,
                self.spec,
                cache,
                self.context_lens,
                self.table,
                self.records,
                self.arrivals,
                self.out,
                self.max_context_len,
            )

    def seconds(self) -> float:
        """One launch in a row of launches: what a graph of all layers takes longer than one of half, per layer."""
        half = len(self.caches) // 2
        return (self._graph_seconds(len(self.caches)) - self._graph_seconds(half)) / (len(self.caches) - half)

    def _graph_seconds(self, layers: int) -> float:
        """The median over replays of a graph."""
        import cupy as cp

        from bminf_lite.cuda.runtime.graphs import CudaGraph

        self.launch(layers)
        self.stream.synchronize()
        graph, found = CudaGraph(lambda: self.launch(layers), self.stream.ptr), []
        for _ in range(REPLAYS + 2):
            start, end = cp.cuda.Event(), cp.cuda.Event()
            start.record(self.stream)
            graph.replay(self.stream.ptr)
            end.record(self.stream)
            end.synchronize()
            found.append(cp.cuda.get_elapsed_time(start, end) / 1e3)
        graph.close()
        return float(statistics.median(found[2:]))


def is_chosen(name: str, cases: list[str]) -> bool:
    """Whether ``name`` starts with one of ``cases``, or there are none."""
    return not cases or any(name.startswith(case) for case in cases)


def check(cases: list[str]) -> dict[str, Any]:
    """For each checked batch: a digest of the output's bits and of the cache, and the error against the definition."""
    from bminf_lite.backend.attention import attend, cached
    from bminf_lite.backend.cache_values import LayerCache

    digests: dict[str, str] = {}
    errors: dict[str, float] = {}
    for int8 in (False, True):
        for context_lens in CHECKED:
            name = f"{'int8' if int8 else 'fp16'} {str(context_lens)[:40]}"
            if not is_chosen(name, cases):
                continue
            tried = Attention(context_lens, int8, layers=1)
            tried.launch()
            tried.stream.synchronize()
            arrays = [tried.out, *(x for x in vars(tried.caches[0]).values() if hasattr(x, "get"))]
            digests[name] = hashlib.sha256(b"".join(x.get().tobytes() for x in arrays)).hexdigest()
            assert not tried.arrivals.get().any(), name
            cache = LayerCache(*(x.get() for x in arrays[1:]))
            for b in np.argsort(context_lens)[:3]:
                length = context_lens[b]
                keys, values = cached(cache, tried.tables[b], length + 1, np.float16)
                q = tried.qkv.get()[b : b + 1, : HEADS * HEAD_DIM].reshape(1, HEADS, HEAD_DIM)
                expected = attend(q, keys, values, tried.spec.scale, length, weight_dtype=np.float16).ravel()
                found = tried.out.get()[b].astype(np.float32)
                error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
                errors[name] = max(errors.get(name, 0.0), error)
    return {"digests": digests, "errors": errors}


def launch_times(cases: list[str]) -> dict[str, float]:
    """Microseconds of a launch."""
    found = {}
    for int8 in (False, True):
        for batch, context_len, bound in CASES:
            name = f"{batch} x {context_len} of {bound} {'int8' if int8 else 'fp16'}"
            if not is_chosen(name, cases):
                continue
            nbytes = batch * context_len * KV_HEADS * 2 * HEAD_DIM * (1 if int8 else 2)
            layers = max(MIN_LAYERS, min(MAX_LAYERS, -(-LEAST_BYTES // nbytes)))
            seconds = Attention([context_len] * batch, int8, layers, bound, rotated=True).seconds()
            found[name] = seconds * 1e6
    return found


def model_speeds(cases: list[str]) -> dict[str, float]:
    """Tokens per second of ``bench``."""
    import contextlib
    import io

    from bminf_lite.cli import main

    found = {}
    for arguments in MODEL_TESTS:
        if not is_chosen(" ".join(arguments), cases):
            continue
        output = io.StringIO()
        sys.argv = ["bminf-lite", "bench", "--shape", "llama-3-8b", "-p", "0", "-n", "64", "-r", "3", *arguments]
        sys.argv += ["--device", "cuda", "-o", "json"]
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            main()
        kind = "int8" if "int8" in arguments else "fp16"
        for test in json.loads(output.getvalue())["tests"]:
            found[f"{test['test']} {kind}"] = test["tokens_per_second"]
    return found


WORKS: dict[str, Callable[[list[str]], Any]] = {"check": check, "launches": launch_times, "model": model_speeds}


def work(name: str, settings: dict[str, Any], cases: list[str]) -> None:
    """Print the result of one of ``WORKS`` with the launcher's constants set."""
    from bminf_lite.cuda.kernels.attention import decode

    apply_settings([decode], settings)
    print(json.dumps(WORKS[name](cases)))


# ---- all variants ----------------------------------------------------------------------------------------------------


def report_check(variants: list[Variant], cases: list[str]) -> None:
    """Print which batches differ from the definition, or from the first variant."""
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda variant: variant.run(__file__, "--work", "check", "--cases", *cases), variants))
    first: dict[str, str] | None = None
    for variant, result in zip(variants, results, strict=True):
        if result is None:
            continue
        if not result["errors"]:
            print(f"{variant.name}: no batch of the check has a name that starts with one of {cases}", flush=True)
            continue
        first = first or result["digests"]
        wrong = [name for name, error in result["errors"].items() if not error <= 2**-10]
        other = [name for name, digest in result["digests"].items() if digest != first[name]]
        worst = max(result["errors"].values())
        print(f"{variant.name}: largest error {worst:.2e}, wrong {wrong}, other bits {other}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", metavar="NAME=FOLDER:SETTINGS")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--parts", default="check,launches,model", help="comma-separated parts of the work")
    parser.add_argument("--cases", nargs="*", default=[], metavar="NAME", help="how the names of cases start")
    parser.add_argument("--work", choices=WORKS, help=argparse.SUPPRESS)
    parser.add_argument("--settings", default="{}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, json.loads(args.settings), args.cases)
        return
    if not args.variants:
        parser.error("give one variant at least, NAME=FOLDER")
    variants, parts = [Variant.parse(text) for text in args.variants], args.parts.split(",")
    if "check" in parts:
        report_check(variants, args.cases)
    for part in [part for part in parts if part != "check"]:
        times: dict[str, dict[str, list[float]]] = {}
        for _ in range(args.rounds):
            for variant in variants:
                for name, value in (variant.run(__file__, "--work", part, "--cases", *args.cases) or {}).items():
                    times.setdefault(name, {}).setdefault(variant.name, []).append(value)
        print(f"\n{'microseconds of a launch' if part == 'launches' else 'tokens per second'}")
        print(f"{'':28}" + "".join(f"{variant.name:>16}" for variant in variants))
        for name, values in times.items():
            medians = [statistics.median(values.get(variant.name, [float("nan")])) for variant in variants]
            print(f"{name:28}" + "".join(f"{value:16.2f}" for value in medians), flush=True)


if __name__ == "__main__":
    main()
