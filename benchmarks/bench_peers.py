"""Compare prefill and decoding with other engines, on one shape with random weights, in one run.

transformers runs in bf16: eagerly, and compiled with a static cache. ``--compile model`` compiles the model for decode
steps; ``--compile layers`` compiles one layer, whose code all layers run, for prompts and for decode steps, and runs
decode steps as a CUDA graph. A mixture's experts are grouped products in prompts, and products with the chosen experts'
weights in decode steps, as transformers' ``generate`` chooses. A LLaMA of int8 weights is compiled as gpt-fast does
(:mod:`int8_llama`). This engine runs in int8. Each peer gets random prompts and decodes the same number of tokens
greedily, ignoring end-of-sequence tokens. A round runs every peer once, so that a machine that becomes slower affects
all peers; results are medians over the rounds. A peer that fails is left out, and a line says why. Needs torch and
transformers (the extra ``parity``), and matplotlib for --plot.

    python benchmarks/bench_peers.py --shape llama-3-8b -p 512,2048 -n 128 --plot peers.png
    python benchmarks/bench_peers.py --shape qwen3-30b-a3b -p 512,2048 -n 64,1 --compile layers -r 3
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

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
LAYERS = "transformers bf16, compiled layers"
TUNED = "transformers bf16, compiled layers, tuned as gpt-fast"
INT8_WEIGHTS = "int8 weights, compiled as gpt-fast"
DECODE_OPTIONS: dict[str, str | int | bool] = {"triton.cudagraphs": True, "coordinate_descent_tuning": True}
"""gpt-fast's: graphs, and products of one row as reductions that are tuned, without which they read slowly."""
TUNED_OPTIONS: dict[str, str | int | bool] = {"coordinate_descent_tuning": True}
"""The same without graphs. A product with a chosen expert's weights then reads them where they are."""
PROMPT_EXPERTS, DECODE_EXPERTS = "grouped_mm", "batched_mm"
"""transformers' implementations of experts that its ``generate`` chooses on a GPU."""
RECOMPILATIONS = 64
"""Of one layer: for each prompt length, size of a cache and way to compile."""


@dataclass
class Times:
    """Seconds of each round of a peer: to the first token, and per further token, if there are any."""

    first: list[float] = field(default_factory=list)
    token: list[float] = field(default_factory=list)

    def medians(self) -> tuple[float, float | None]:
        """The medians of both."""
        return statistics.median(self.first), statistics.median(self.token) if self.token else None


Found = tuple[float, float | None]
"""Seconds to the first token, and per further token: None if there is none."""
Peer = Callable[[int, int, int], Found]
"""``(batch, prompt length, new tokens)`` -> what was found."""


def clock(device: str) -> float:
    """The time after the device has finished its work."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(start: float, first: float, end: float, count: int) -> Found:
    """The times between a start, the first of ``count`` new tokens and the end."""
    return first - start, (end - first) / (count - 1) if count > 1 else None


def choose_experts(model: Any, implementation: str) -> None:
    """Let a mixture of transformers compute its experts so; other models have no choice."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation(implementation)


class Transformers:
    """transformers' model, run eagerly or compiled."""

    def __init__(self, config: dict[str, Any], device: str, dtype: torch.dtype):
        self.device = device
        known = transformers.AutoConfig.for_model(**config)
        with torch.device(device):
            self.model = transformers.AutoModelForCausalLM.from_config(known, dtype=dtype).eval()
        self.compiled = torch.compile(self.model.forward, mode="reduce-overhead", fullgraph=True)

    @torch.inference_mode()
    def run(self, batch: int, prompt: int, count: int, compiled: bool) -> Found:
        """Decode compiled with a static cache, or eagerly with a growing one; the prompt is always eager."""
        ids = torch.randint(0, self.model.config.vocab_size, (batch, prompt), device=self.device)
        cache: Any = transformers.DynamicCache(config=self.model.config)
        if compiled:
            cache = transformers.StaticCache(config=self.model.config, max_cache_len=prompt + count)
        choose_experts(self.model, PROMPT_EXPERTS)
        start = clock(self.device)
        position = torch.arange(prompt, device=self.device)
        token = self._next(self.model.forward, ids, cache, position)
        first = clock(self.device)
        choose_experts(self.model, DECODE_EXPERTS)
        position = position[-1:] + 1
        for _ in range(count - 1):
            token = self._next(self.compiled if compiled else self.model.forward, token, cache, position)
            position = position + 1
        return seconds(start, first, clock(self.device), count)

    def _next(self, forward: Callable[..., Any], ids: torch.Tensor, cache: Any, position: torch.Tensor) -> torch.Tensor:
        out = forward(ids, past_key_values=cache, position_ids=position[None], use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True).clone()


class CompiledLayers:
    """transformers' model whose layers run the code of one compiled layer; decode steps are a CUDA graph on a GPU.

    A layer gets a cache of its own, so that the code does not depend on the layer's number. ``options`` are those of
    ``torch.compile`` for decode steps.
    """

    def __init__(self, model: Any, device: str, options: dict[str, str | int | bool] | None = None):
        torch._dynamo.config.recompile_limit = RECOMPILATIONS
        self.model = model
        self.device = device
        self.prefill = torch.compile(layer_forward, fullgraph=True, dynamic=False)
        self.decode = torch.compile(layer_forward, fullgraph=True, dynamic=False, options=options)
        self._size: tuple[int, int, int] | None = None

    @torch.inference_mode()
    def run(self, batch: int, prompt: int, count: int) -> Found:
        """As a :data:`Peer`. Steps of another size are compiled first, which is not timed."""
        if self._size != (batch, prompt, count):
            self._make_steps(batch, prompt, count)
        self.ids.random_(self.model.config.vocab_size)
        self.tokens = []
        start = clock(self.device)
        self._prefill()
        first = clock(self.device)
        self.tokens.append(self.token.clone())
        for _ in range(count - 1):
            self._decode_step()
            self.tokens.append(self.token.clone())
        return seconds(start, first, clock(self.device), count)

    def _make_steps(self, batch: int, prompt: int, count: int) -> None:
        self._size = None
        self._decode_step = self._step  # a graph of another size is released
        config = self.model.config
        self.ids = torch.randint(0, config.vocab_size, (batch, prompt), device=self.device)
        self.token = torch.zeros((batch, 1), dtype=torch.long, device=self.device)
        self.positions = torch.arange(prompt, device=self.device)
        self.position = self.positions[-1:] + 1
        self.cache: Any = transformers.StaticCache(config=config, max_cache_len=prompt + count)
        for layer in self.cache.layers:
            shape = batch, config.num_key_value_heads, 0, self.model.model.layers[0].self_attn.head_dim
            empty = torch.empty(shape, dtype=self.model.dtype, device=self.device)
            layer.lazy_initialization(empty, empty)
            for array in (layer.keys, layer.values, layer.cumulative_length):
                torch._dynamo.mark_static_address(array, guard=False)  # else a layer is compiled for each address
        self._prefill()
        if count > 1:
            self._decode_step = self._captured(self._step)
        self._size = batch, prompt, count

    def _captured(self, step: Callable[[], None]) -> Callable[[], None]:
        """``step`` as a CUDA graph, or itself on a CPU. Compiles it."""
        step()
        if self.device == "cpu":
            return step
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._prefill()  # steps before the timed ones must not leave the cache
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            step()
        return graph.replay

    def _prefill(self) -> None:
        choose_experts(self.model, PROMPT_EXPERTS)
        cache: Any = transformers.DynamicCache(config=self.model.config)
        self._next(self.prefill, self.ids, cache, self.positions)
        self.position.copy_(self.positions[-1:] + 1)
        for own, layer in zip(self.cache.layers, cache.layers, strict=True):
            length = layer.keys.shape[2]
            own.keys[:, :, :length].copy_(layer.keys)
            own.values[:, :, :length].copy_(layer.values)
            own.cumulative_length.fill_(length)

    def _step(self) -> None:
        choose_experts(self.model, DECODE_EXPERTS)
        self._next(self.decode, self.token, self.cache, self.position)
        self.position.add_(1)

    def _next(self, forward: Callable[..., Any], ids: torch.Tensor, cache: Any, positions: torch.Tensor) -> None:
        with compiled_layers(self.model.model.layers, forward, cache):
            out = self.model(ids, past_key_values=cache, position_ids=positions[None], use_cache=True, logits_to_keep=1)
        self.token.copy_(out.logits[:, -1].argmax(-1, keepdim=True))


def layer_forward(layer: torch.nn.Module, hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """A layer's computation. It is compiled."""
    result: torch.Tensor = type(layer).forward(layer, hidden, **arguments)
    return result


@contextmanager
def compiled_layers(layers: torch.nn.ModuleList, forward: Callable[..., Any], cache: Any) -> Iterator[None]:
    """Let each layer run ``forward`` as the first layer of a cache that has the layer's part of ``cache`` only."""
    with ExitStack() as stack:
        for layer, part in zip(layers, cache.layers, strict=True):
            stack.enter_context(patch.object(layer.self_attn, "layer_idx", 0))
            stack.enter_context(patch.object(layer, "forward", with_cache(forward, layer, transformers.Cache([part]))))
        yield


def with_cache(forward: Callable[..., Any], layer: Any, cache: Any) -> Callable[..., Any]:
    """``forward`` of ``layer`` with ``cache`` instead of the one that is given."""

    def run(hidden: torch.Tensor, **arguments: Any) -> Any:
        return forward(layer, hidden, **(arguments | {"past_key_values": cache}))

    return run


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
    def run(self, batch: int, prompt: int, count: int) -> Found:
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
        return seconds(start, first, clock(self.device), count)

    def _next(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, positions).argmax(-1, keepdim=True)


def engine_peer(config: dict[str, Any], device: str) -> tuple[Peer, Callable[[], None]]:
    """This engine as a peer, and the function that closes it."""
    ops = backend.create(device)
    bench_model, profiler = random_model("shape", config, ops), make_profiler(ops)

    def run(batch: int, prompt: int, count: int) -> Found:
        tests = [Workload("pp", prompt, 0, batch), Workload("tg", count - 1, prompt, batch)]
        prefill, *decode = run_tests(bench_model, profiler, tests if count > 1 else tests[:1], 1)
        return prefill.seconds[0], decode[0].seconds[0] / (count - 1) if decode else None

    return run, ops.close


def measure(
    peers: dict[str, Peer], prompts: list[int], batch: int, counts: list[int], rounds: int
) -> dict[int, dict[str, Times]]:
    """Times by prompt length and peer. The first round compiles kernels and does not count.

    Each time is also written to stderr when it is known. A peer that fails is left out from then on, with its times.
    Nothing is collected meanwhile, since objects of compilers are many, and a capture permits no freed graphs.
    """
    found: dict[int, dict[str, Times]] = {prompt: {name: Times() for name in peers} for prompt in prompts}
    failed = set[str]()
    for prompt, count in zip(prompts, counts, strict=True):
        for index in range(rounds + 1):
            for name, run in peers.items():
                if name in failed:
                    continue
                start = time.perf_counter()
                gc.collect()
                gc.disable()
                try:
                    first, token = run(batch, prompt, count)
                except Exception as error:
                    if name == ENGINE:
                        raise
                    log(f"{name}: left out, because {type(error).__name__}: {str(error)[:2000]}")
                    log("".join(traceback.format_tb(error.__traceback__)[-4:]))
                    failed.add(name)
                    continue
                finally:
                    gc.enable()
                each = "" if token is None else f", a token {1e3 * token:.3f} ms"
                took = f"{time.perf_counter() - start:.1f} s in all"
                log(f"prompt {prompt}, round {index}, {name}: first token {1e3 * first:.2f} ms{each}; {took}")
                if index:
                    found[prompt][name].first.append(first)
                    found[prompt][name].token += [] if token is None else [token]
    return {prompt: {name: t for name, t in times.items() if name not in failed} for prompt, times in found.items()}


def log(line: str) -> None:
    """Write a line to stderr now."""
    print(line, file=sys.stderr, flush=True)


def rows(found: dict[int, dict[str, Times]], batch: int) -> list[dict[str, Any]]:
    """A row for each peer and prompt length; the ratios say how many times faster this engine is.

    Figures of decoding are None where no token was decoded.
    """
    result = []
    for prompt, times in found.items():
        own_first, own_token = times[ENGINE].medians()
        for name, t in times.items():
            first, token = t.medians()
            result.append(
                {
                    "prompt": prompt,
                    "peer": name,
                    "first_token_ms": 1e3 * first,
                    "tokens_per_second": batch / token if token else None,
                    "deviation": statistics.pstdev([batch / s for s in t.token]) if token else None,
                    "times_faster_first_token": first / own_first,
                    "times_faster_decode": token / own_token if token and own_token else None,
                }
            )
    return result


def table(found: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""

    def cells(r: dict[str, Any]) -> dict[str, str]:
        decoded, faster = r["tokens_per_second"] is not None, r["times_faster_decode"]
        return {
            "prompt": str(r["prompt"]),
            "peer": r["peer"],
            "first token ms": f"{r['first_token_ms']:.1f}",
            "decode t/s": f"{r['tokens_per_second']:.1f} ± {r['deviation']:.1f}" if decoded else "",
            "first token, ours is faster": f"{r['times_faster_first_token']:.2f} times",
            "decode, ours is faster": f"{faster:.2f} times" if decoded else "",
        }

    return markdown_table([cells(r) for r in found])


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
            values = [r[key] or 0 for p in prompts for r in found if (r["prompt"], r["peer"]) == (p, peer)]
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
    parser.add_argument(
        "-n", type=numbers, default=[128], metavar="N,...", help="new tokens, of all prompts or each; 1: only the first"
    )
    parser.add_argument("-b", type=int, default=1, help="sequences at once")
    parser.add_argument("-r", type=int, default=3, help="rounds")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument(
        "--compile", choices=["model", "layers", "none"], default="model", help="what the compiled peers compile"
    )
    parser.add_argument("--no-eager", action="store_true", help="leave the eager peer out")
    parser.add_argument("-o", choices=["md", "json"], default="md")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    options = parser.parse_args(arguments)
    counts = options.n * len(options.p) if len(options.n) == 1 else options.n
    if min(counts) < 1 or len(counts) != len(options.p):
        parser.error("-n must be 1 or more, one number or one for each of -p")
    config = read_shape(options.shape)
    other = Transformers(config, options.device, torch.bfloat16)
    peers: dict[str, Peer] = {}
    peers[ENGINE], close = engine_peer(config, options.device)
    if options.compile == "model":
        peers[COMPILED] = lambda *size: other.run(*size, compiled=True)
        if config["model_type"] == "llama":
            peers[INT8_WEIGHTS] = CompiledInt8(config, options.device).run
    if options.compile == "layers":
        peers[LAYERS] = CompiledLayers(other.model, options.device).run
        peers[TUNED] = CompiledLayers(other.model, options.device, TUNED_OPTIONS).run
    if not options.no_eager:
        peers[EAGER] = lambda *size: other.run(*size, compiled=False)
    try:
        found = rows(measure(peers, options.p, options.b, counts, options.r), options.b)
    finally:
        close()
    device = torch.cuda.get_device_name() if options.device != "cpu" else "CPU"
    title = f"{options.shape} on {device}, batch {options.b}, {','.join(map(str, options.n))} tokens"
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
