"""Measure what LoRA adapters cost on a model with random weights, beside the same steps without.

    python benchmarks/measure_adapters.py [--shape llama-3-8b] [--device cuda] [--rank 16] [--slots 8] [--streams 32]
        [--experts] [--cases one streams prompt host] [--trace]

Every matrix of the layers, and the output head, has an adapter; those of a mixture's experts with ``--experts``. Each
case prints a line of JSON: the speed with adapters relative to that without, of one sequence, of streams that have as
many adapters as there are slots, and of a prompt; and the milliseconds that an adapter that lies in the host's memory
adds to a first token. ``--trace`` first prints the kernels of a step of each of the first three cases by name: their
launches and microseconds without and with adapters, by the GPU's events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import numpy as np

from bminf_lite import backend, models
from bminf_lite.api import Model
from bminf_lite.backend.adapter_slots import AdapterSlots
from bminf_lite.backend.side_products import Adapter
from bminf_lite.backend.values import ForwardBatch
from bminf_lite.bench.model import BenchModel, random_model, read_shape
from bminf_lite.bench.profiler import Profiler
from bminf_lite.bench.runner import make_profiler
from bminf_lite.engine.adapters import AdapterRegistry
from bminf_lite.engine.request import Request
from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.layers.cache import KVCache
from bminf_lite.request_builder import GenerationRequest, RequestBuilder

MORE = 64
"""Tokens that a context has beside those that are measured."""
REPEATS = 5
SHORT_PROMPT = 16


CASES = "one", "streams", "prompt", "host"


def random_adapter(slots: AdapterSlots, config: dict[str, Any], rank: int) -> Any:
    """What an adapter of every site that changes results little puts in a slot."""
    architecture = models.find(config)
    parameters = architecture.spec(architecture.parse(config)).parameters
    rng, parts = np.random.default_rng(0), {}
    for name in slots.names():
        out, features = parameters[name].shape[::-1] if parameters[name].transposed else parameters[name].shape
        a, b = (rng.standard_normal(shape, np.float32) for shape in ((rank, features), (out, rank)))
        parts[name] = Adapter(a / np.float32(features**0.5), b / np.float32(rank**0.5), 0.01)
    return slots.prepare(parts)


class Measured:
    """A model with adapters, and requests of random tokens."""

    def __init__(self, model: Model, adapters: AdapterRegistry, vocab_size: int):
        self.model = model
        self.requests = RequestBuilder(model.engine_config, (), lambda: model.tokenizer, adapters)
        self.vocab_size = vocab_size
        self.rng = np.random.default_rng(1)

    def seconds(self, adapters: Sequence[str | None], prompt: int, new: int) -> tuple[float, float]:
        """Seconds from the submission of requests to the last first token, and from there to the end."""
        ended: SimpleQueue[Request] = SimpleQueue()

        def told(request: Request) -> None:
            if request.finish_reason is not None:
                ended.put(request)

        params = SamplingParams(max_new_tokens=new, seed=0, ignore_eos=True)
        prompts = (self.model.encode(self.rng.integers(0, self.vocab_size, prompt).tolist()) for _ in adapters)
        wanted = [GenerationRequest(p, params, adapter=name) for p, name in zip(prompts, adapters, strict=True)]
        requests = self.requests.build(*wanted)
        for request in requests:
            request.on_update = told
        start = time.perf_counter()
        self.model.engine.submit(requests)
        for _ in requests:
            error = ended.get().error
            if error is not None:
                raise error
        first = max(request.first_token_time for request in requests)
        return first - start, time.perf_counter() - first

    def median(self, adapters: Sequence[str | None], prompt: int, new: int) -> tuple[float, float]:
        """The medians of several runs, behind one that loads what is needed."""
        self.seconds(adapters, prompt, new)
        firsts, rests = zip(*(self.seconds(adapters, prompt, new) for _ in range(REPEATS)), strict=True)
        return statistics.median(firsts), statistics.median(rests)


def trace(profiler: Profiler, model: BenchModel, slots: AdapterSlots, case: str, sequences: int, tokens: int) -> None:
    """Print the kernels of a step of ``tokens`` tokens of each of ``sequences``, without adapters and with all slots.

    The slots have adapters. A single token is behind ``SHORT_PROMPT`` others, of which the cache has zeros.
    """
    ops, rng, past = profiler.ops, np.random.default_rng(2), SHORT_PROMPT if tokens == 1 else 0
    rows = rng.integers(0, model.engine_config.vocab_size, (sequences, tokens))
    lora_ids = np.repeat(np.arange(sequences, dtype=np.int32) % slots.count + 1, tokens)
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0, 0])
    with closing(KVCache.for_sequences(ops, model.engine_config.cache_layout, sequences, past + tokens)) as cache:
        for array in (array for layer in cache.layers for array in layer.arrays):
            ops.assign(array, np.zeros((), array.dtype))
        plain = ForwardBatch.packed(ops.array, rows, [past] * sequences, cache.tables(sequences, past + tokens))
        of_logits = ops.array(lora_ids[::tokens].copy())
        adapted = replace(plain, lora_ids=ops.array(lora_ids), logit_lora_ids=of_logits)
        for place, batch in enumerate((plain, adapted)):
            for span in profiler.trace(lambda batch=batch: model.network(batch, cache)):  # type: ignore[misc]
                found[span.name][2 * place] += 1
                found[span.name][2 * place + 1] += 1e6 * span.seconds
    print(f"{case}: launches and us without, and with adapters", flush=True)
    found["all"] = [sum(row[i] for row in found.values()) for i in range(4)]
    for name, (count, us, count_adapted, us_adapted) in sorted(found.items(), key=lambda item: -max(item[1][1::2])):
        print(f"    {count:5} {us:9.1f}  {count_adapted:5} {us_adapted:9.1f}  {name[:110]}", flush=True)


def report(case: str, **values: float) -> None:
    print(json.dumps({"case": case, **{name: round(value, 4) for name, value in values.items()}}), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3-8b", help="the name of a packaged shape, or a config.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--slots", type=int, default=8, help="adapters that lie on the device")
    parser.add_argument("--experts", action="store_true", help="adapters of a mixture's experts too")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the long prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens that are generated")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="what is measured (all)")
    parser.add_argument("--trace", action="store_true", help="the kernels of these cases too")
    options = parser.parse_args(arguments)
    config = dict(read_shape(options.shape))
    config["max_position_embeddings"] = max(options.prompt, options.new) + MORE
    with closing(backend.create(options.device)) as ops:
        ops.adapter_slots = slots = AdapterSlots(
            options.slots, options.rank, experts=None if options.experts else frozenset()
        )
        found = random_model(options.shape, config, ops, max_batch=options.streams)
        prepared = [random_adapter(slots, config, options.rank)]
        if options.trace:
            for slot in range(1, options.slots + 1):
                slots.put(slot, prepared[0])
            sizes = {"one": (1, 1), "streams": (options.streams, 1), "prompt": (1, options.prompt)}
            for case in (case for case in options.cases if case in sizes):
                trace(make_profiler(ops), found, slots, case, *sizes[case])
        engine_config = replace(found.engine_config, num_adapter_slots=options.slots, prefix_cache=False)
        model = Model([found.network], engine_config)
        with closing(model._engine):
            registry, adapters = AdapterRegistry(), [str(i) for i in range(options.slots + 1)]
            for name in adapters:
                registry.add(name, "", options.rank, 0, lambda: prepared)
            measured = Measured(model, registry, config["vocab_size"])
            print(json.dumps({"device": ops.describe(), "shape": options.shape, "rank": options.rank}), flush=True)
            for case, count in (("one", 1), ("streams", options.streams)):
                if case not in options.cases:
                    continue
                plain = measured.median([None] * count, SHORT_PROMPT, options.new)[1]
                own = [adapters[i % options.slots] for i in range(count)]
                adapted = measured.median(own, SHORT_PROMPT, options.new)[1]
                steps, named = options.new - 1, "one sequence" if case == "one" else f"{count} streams"
                report(named, plain_ms=1e3 * plain / steps, adapted_ms=1e3 * adapted / steps, speed=plain / adapted)
            if "prompt" in options.cases:
                plain = measured.median([None], options.prompt, 1)[0]
                adapted = measured.median([adapters[0]], options.prompt, 1)[0]
                case = f"prompt of {options.prompt}"
                report(case, plain_ms=1e3 * plain, adapted_ms=1e3 * adapted, speed=plain / adapted)
            if "host" in options.cases:
                resident = measured.median([adapters[0]], SHORT_PROMPT, 1)[0]
                turns = [adapter for _ in range(1 + REPEATS) for adapter in adapters]  # the least recently used is next
                moved = [measured.seconds([adapter], SHORT_PROMPT, 1)[0] for adapter in turns]
                fetched = statistics.median(moved[len(adapters) :])
                report("adapter on the host", resident_ms=1e3 * resident, added_ms=1e3 * (fetched - resident))


if __name__ == "__main__":
    main()
