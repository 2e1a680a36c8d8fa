"""Compare prefill and decoding with other engines, on one shape with random weights, in one run.

transformers runs in bf16: eagerly, and compiled with a static cache. A LLaMA of int8 weights is compiled as gpt-fast
does (:mod:`int8_llama`). This engine runs in int8. Each peer gets random prompts and decodes the same number of tokens
greedily, ignoring end-of-sequence tokens. A round runs every peer once, so that a machine that becomes slower affects
all peers; results are medians over the rounds. Needs torch and transformers (the extra ``parity``), and matplotlib for
--plot.

    python benchmarks/bench_peers.py --shape llama-3-8b -p 512,2048 -n 128 --plot peers.png
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from int8_llama import Int8Llama

import bminf_lite
from bminf_lite import backend
from bminf_lite.bench.model import random_model, read_shape
from bminf_lite.bench.report import markdown_table
from bminf_lite.bench.runner import Workload, make_profiler, run_tests

ENGINE = "bminf-lite int8"
EAGER = "transformers bf16, eager"
COMPILED = "transformers bf16, compiled"
INT8_WEIGHTS = "int8 weights, compiled as gpt-fast"
DECODE_OPTIONS: dict[str, str | int | bool] = {"triton.cudagraphs": True, "coordinate_descent_tuning": True}
"""gpt-fast's: graphs, and products of one row as reductions that are tuned, without which they read slowly."""


@dataclass
class Times:
    """Seconds of each round of a peer: to the first token, and per further token."""

    first: list[float] = field(default_factory=list)
    token: list[float] = field(default_factory=list)

    def medians(self) -> tuple[float, float]:
        """The medians of both."""
        return statistics.median(self.first), statistics.median(self.token)


Peer = Callable[[int, int, int], tuple[float, float]]
"""``(batch, prompt length, new tokens)`` -> seconds to the first token and per further token."""


def clock(device: str) -> float:
    """The time after the device has finished its work."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


class Transformers:
    """transformers' model, run eagerly or compiled."""

    def __init__(self, config: dict[str, Any], device: str, dtype: torch.dtype):
        self.device = device
        known = transformers.AutoConfig.for_model(**config)
        with torch.device(device):
            self.model = transformers.AutoModelForCausalLM.from_config(known, dtype=dtype).eval()
        self.compiled = torch.compile(self.model.forward, mode="reduce-overhead", fullgraph=True)

    @torch.inference_mode()
    def run(self, batch: int, prompt: int, count: int, compiled: bool) -> tuple[float, float]:
        """Decode compiled with a static cache, or eagerly with a growing one; the prompt is always eager."""
        ids = torch.randint(0, self.model.config.vocab_size, (batch, prompt), device=self.device)
        cache: Any = transformers.DynamicCache(config=self.model.config)
        if compiled:
            cache = transformers.StaticCache(config=self.model.config, max_cache_len=prompt + count)
        start = clock(self.device)
        position = torch.arange(prompt, device=self.device)
        token = self._next(self.model.forward, ids, cache, position)
        first = clock(self.device)
        position = position[-1:] + 1
        for _ in range(count - 1):
            token = self._next(self.compiled if compiled else self.model.forward, token, cache, position)
            position = position + 1
        end = clock(self.device)
        return first - start, (end - first) / (count - 1)

    def _next(self, forward: Callable[..., Any], ids: torch.Tensor, cache: Any, position: torch.Tensor) -> torch.Tensor:
        out = forward(ids, past_key_values=cache, position_ids=position[None], use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True).clone()


class CompiledInt8:
    """:class:`Int8Llama` with a graph for prompts and one for decode steps, each compiled as a whole."""

    def __init__(self, config: dict[str, Any], device: str):
        self.device = device
        self.vocab_size: int = config["vocab_size"]
        with torch.device(device):
            self.model = Int8Llama(config).eval().requires_grad_(False)
        self.prefill = torch.compile(self._next, fullgraph=True, dynamic=False)
        self.decode = torch.compile(self._next, fullgraph=True, options=DECODE_OPTIONS)
        self._cache = (0, 0)

    @torch.inference_mode()
    def run(self, batch: int, prompt: int, count: int) -> tuple[float, float]:
        """As a :data:`Peer`. The cache has the size that is needed, and is replaced only for another size."""
        if self._cache != (batch, prompt + count):
            self._cache = batch, prompt + count
            self.model.make_cache(*self._cache)
        ids = torch.randint(0, self.vocab_size, (batch, prompt), device=self.device)
        positions = torch.arange(prompt, device=self.device)
        start = clock(self.device)
        token = self.prefill(ids, positions).clone()
        first = clock(self.device)
        position = positions[-1:] + 1
        for _ in range(count - 1):
            token = self.decode(token, position).clone()
            position = position + 1
        end = clock(self.device)
        return first - start, (end - first) / (count - 1)

    def _next(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, positions).argmax(-1, keepdim=True)


def engine_peer(config: dict[str, Any], device: str) -> tuple[Peer, Callable[[], None]]:
    """This engine as a peer, and the function that closes it."""
    ops = backend.create(device)
    bench_model, profiler = random_model("shape", config, ops), make_profiler(ops)

    def run(batch: int, prompt: int, count: int) -> tuple[float, float]:
        tests = [Workload("pp", prompt, 0, batch), Workload("tg", count - 1, prompt, batch)]
        prefill, decode = run_tests(bench_model, profiler, tests, 1)
        return prefill.seconds[0], decode.seconds[0] / (count - 1)

    return run, ops.close


def measure(
    peers: dict[str, Peer], prompts: list[int], batch: int, count: int, rounds: int
) -> dict[int, dict[str, Times]]:
    """Times by prompt length and peer. The first round compiles kernels and does not count."""
    found = {prompt: {name: Times() for name in peers} for prompt in prompts}
    for prompt in prompts:
        for index in range(rounds + 1):
            for name, run in peers.items():
                first, token = run(batch, prompt, count)
                if index:
                    found[prompt][name].first.append(first)
                    found[prompt][name].token.append(token)
    return found


def rows(found: dict[int, dict[str, Times]], batch: int) -> list[dict[str, Any]]:
    """A row for each peer and prompt length; the ratios say how many times faster this engine is."""
    result = []
    for prompt, times in found.items():
        own_first, own_token = times[ENGINE].medians()
        for name, t in times.items():
            first, token = t.medians()
            spread = statistics.pstdev([batch / s for s in t.token])
            result.append(
                {
                    "prompt": prompt,
                    "peer": name,
                    "first_token_ms": 1e3 * first,
                    "tokens_per_second": batch / token,
                    "deviation": spread,
                    "times_faster_first_token": first / own_first,
                    "times_faster_decode": token / own_token,
                }
            )
    return result


def table(found: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    return markdown_table(
        [
            {
                "prompt": str(r["prompt"]),
                "peer": r["peer"],
                "first token ms": f"{r['first_token_ms']:.1f}",
                "decode t/s": f"{r['tokens_per_second']:.1f} ± {r['deviation']:.1f}",
                "first token, ours is faster": f"{r['times_faster_first_token']:.2f} times",
                "decode, ours is faster": f"{r['times_faster_decode']:.2f} times",
            }
            for r in found
        ]
    )


def plot(found: list[dict[str, Any]], path: Path, title: str) -> None:
    """Bars of both figures, by prompt length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    figure.suptitle(title)
    prompts, peers = sorted({r["prompt"] for r in found}), list(dict.fromkeys(r["peer"] for r in found))
    left, right = figure.subplots(1, 2)
    for axes, key, label in (
        (left, "tokens_per_second", "decoded tokens per second"),
        (right, "first_token_ms", "first token, ms"),
    ):
        for i, peer in enumerate(peers):
            values = [r[key] for p in prompts for r in found if (r["prompt"], r["peer"]) == (p, peer)]
            axes.bar(np.arange(len(prompts)) + i / (len(peers) + 1), values, 1 / (len(peers) + 1), label=peer)
        axes.set_xticks(np.arange(len(prompts)) + 0.3, [f"prompt {p}" for p in prompts])
        axes.set_ylabel(label)
    right.legend(fontsize="small")
    figure.savefig(path)


def numbers(text: str) -> list[int]:
    """Whole numbers separated by commas."""
    return [int(part) for part in text.split(",")]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Run everything and print it; returns the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", required=True, help="a shape of bminf-lite bench, or a config.json")
    parser.add_argument("-p", type=numbers, default=[512], metavar="N,...", help="prompt lengths")
    parser.add_argument("-n", type=int, default=128, help="tokens to decode, 2 at least")
    parser.add_argument("-b", type=int, default=1, help="sequences at once")
    parser.add_argument("-r", type=int, default=3, help="rounds")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled peers out")
    parser.add_argument("--no-eager", action="store_true", help="leave the eager peer out")
    parser.add_argument("-o", choices=["md", "json"], default="md")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    options = parser.parse_args(arguments)
    if options.n < 2:
        parser.error("-n must be 2 at least")
    config = read_shape(options.shape)
    other = Transformers(config, options.device, torch.bfloat16)
    peers: dict[str, Peer] = {}
    if not options.no_eager:
        peers[EAGER] = lambda *size: other.run(*size, compiled=False)
    if not options.no_compile:
        peers[COMPILED] = lambda *size: other.run(*size, compiled=True)
        if config["model_type"] == "llama":
            peers[INT8_WEIGHTS] = CompiledInt8(config, options.device).run
    peers[ENGINE], close = engine_peer(config, options.device)
    try:
        found = rows(measure(peers, options.p, options.b, options.n, options.r), options.b)
    finally:
        close()
    device = torch.cuda.get_device_name() if options.device != "cpu" else "CPU"
    title = f"{options.shape} on {device}, batch {options.b}, {options.n} tokens"
    versions = {
        "bminf-lite": bminf_lite.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if options.o == "json":
        print(json.dumps({"title": title, "versions": versions, "rows": found}, indent=2))
    else:
        print(f"{title}\n\n{table(found)}\n\n" + ", ".join(f"{name} {version}" for name, version in versions.items()))
    if options.plot:
        plot(found, options.plot, title)
    return found


if __name__ == "__main__":
    main()
