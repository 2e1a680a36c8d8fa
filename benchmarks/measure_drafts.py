"""Measure what drafts cost and bring on a model with random weights: checks, and the guesses of an EAGLE-3 head.

    python benchmarks/measure_drafts.py [--shape llama-3-8b] [--device cuda] [--context 512] [--new 240]

Acceptance is forced: a drafter knows what the model will choose, and lets as many drafts of a check be right as the
case says; what a head guesses is replaced on the device. Everything else is as served, times of the host included. Each
case prints a line of JSON: milliseconds of a step or a check, tokens per second, and the time relative to a plain step.
The head has the model's width, one layer and 32,000 tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from bminf_lite import backend
from bminf_lite.api import Model
from bminf_lite.backend.quantization import Int8Weight
from bminf_lite.bench.model import BenchModel, random_model, read_shape
from bminf_lite.draft_training import COPIED
from bminf_lite.engine.draft_model import DraftedNetwork, HeadedNetwork
from bminf_lite.engine.drafts import Drafter
from bminf_lite.engine.request import Request
from bminf_lite.engine.speculative import SpeculativeConfig
from bminf_lite.models import _eagle3 as eagle3
from bminf_lite.models._eagle3 import Eagle3Config, Eagle3Head

CHECKS = ((4, 4), (7, 7), (7, 0))
"""Drafts of a check, and how many of them are right."""
HEAD_DRAFTS, HEAD_RIGHT = 5, 3
"""Guesses of the head, and how many are right: 4 tokens a check."""
DRAFT_VOCAB = 32_000
MORE = 64
"""Tokens that a context has beside those that are measured."""


class ForcedDrafter(Drafter):
    """Proposes what the model will choose, ``right`` tokens of each check, and then wrong ones."""

    def __init__(self, expected: Sequence[int], right: int, vocab_size: int):
        self.expected, self.right, self.vocab_size = expected, right, vocab_size

    def propose(self, request: Request, count: int) -> Sequence[int]:
        first = request.num_pending_tokens
        known = len(request.output_tokens)
        tokens = self.expected[known : known + count]
        return [token if i < first + self.right else (token + 1) % self.vocab_size for i, token in enumerate(tokens)]


class ForcedGuesses:
    """Replaces the guesses that a network has made on the device, in the same graph, by those that are forced.

    A sequence begins with ``context`` tokens, behind which the model chooses ``expected``.
    """

    def __init__(self, network: DraftedNetwork, expected: Sequence[int], context: int, right: int, vocab_size: int):
        self.ops, self.right, self.make = network.ops, right, network.guess
        behind = np.zeros(context + len(expected) + MORE, np.int32)
        behind[context : context + len(expected) - 1] = expected[1:]
        self.tables = [self.ops.array((behind + wrong) % vocab_size) for wrong in (0, 1)]

    def guess(self, cache: Any, batches: Sequence[Any], guesses: Any) -> None:
        """See :meth:`.DraftedNetwork.guess`."""
        self.make(cache, batches, guesses)
        arrays = getattr(self.ops, "arrays", None)
        with arrays.current() if arrays is not None else nullcontext():
            for place, batch in enumerate(batches):
                guesses[place][...] = self.tables[place >= self.right][batch.context_lens]


class RandomHeadWeights:
    """A head's matrices of random int8 codes, and vectors of ones."""

    def __init__(self, config: Eagle3Config):
        self.parameters = eagle3.spec(config).parameters
        self.random = np.random.default_rng(0)

    def weight(self, name: str) -> Int8Weight:
        """Codes whose products have about the scale of their inputs."""
        shape = self.parameters[name].shape
        codes = self.random.integers(-127, 128, shape, np.int8)
        scale = np.full(shape[0], 1 / (74 * shape[1] ** 0.5), np.float16)
        return Int8Weight(codes, scale, name != f"{eagle3.FC}.weight")

    def vector(self, name: str) -> np.ndarray:
        """Ones."""
        return np.ones(self.parameters[name].shape, np.float32)


def head_of(config: dict[str, Any], found: BenchModel) -> HeadedNetwork:
    """The model with a random head, on its device."""
    network: Any = found.network
    own = {key: config[key] for key in COPIED if key in config}
    size = min(DRAFT_VOCAB, network.config.vocab_size)
    parsed = eagle3.parse(own | {"num_hidden_layers": 1, "draft_vocab_size": size})
    if network.config.num_layers < 7:
        parsed = replace(parsed, layer_ids=(0, 1))
    parsed = replace(parsed, has_embedding=False)
    head = Eagle3Head(parsed, RandomHeadWeights(parsed), network.ops)
    head.attach(network.config.num_layers, network.embed)
    return HeadedNetwork(network, network.config.num_layers, head)


def timed(model: Model, prompt: list[int], new: int) -> tuple[float, int, list[int]]:
    """Seconds and steps of all tokens but the first eighth, and all tokens."""

    def run(count: int) -> tuple[float, int, list[int]]:
        steps, start = model.stats().steps, time.perf_counter()
        result = model.generate(prompt, max_new_tokens=count, temperature=0, ignore_eos=True)
        return time.perf_counter() - start, model.stats().steps - steps, result.token_ids

    run(new)  # loads what is needed
    few, many = run(new // 8), run(new)
    return many[0] - few[0], many[1] - few[1], many[2]


def let_draft(model: Model, make: Callable[[Any], Drafter]) -> None:
    """Let a drafter, which ``make`` makes for a runner, take the place of the model's own."""

    def replace_drafter() -> None:
        scheduler, runner = model._engine._ready()
        scheduler.drafter = make(runner)

    model.engine.call(replace_drafter)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3-8b", help="the name of a packaged shape, or a config.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--context", type=int, default=512, help="tokens before those that are timed")
    parser.add_argument("--new", type=int, default=240, help="tokens that are generated")
    options = parser.parse_args(arguments)
    config = dict(read_shape(options.shape))
    config["max_position_embeddings"] = options.context + options.new + MORE
    prompt = np.random.default_rng(1).integers(0, config["vocab_size"], options.context).tolist()
    with closing(backend.create(options.device)) as ops:
        found = random_model(options.shape, config, ops, max_batch=8)
        print(json.dumps({"device": ops.describe(), "shape": options.shape, "context": options.context}), flush=True)
        plain_model = Model(found.network, found.engine_config)
        with closing(plain_model._engine):
            seconds, steps, expected = timed(plain_model, prompt, options.new)
        plain = seconds / steps
        report("plain", seconds, steps, len(expected), options.new, plain)
        cases: list[tuple[str, Any, int, int]] = [
            (f"check of 1 + {count}, {right} right", found.network, count, right) for count, right in CHECKS
        ]
        cases.append((f"EAGLE-3 head, {HEAD_DRAFTS} guesses, {HEAD_RIGHT} right", None, HEAD_DRAFTS, HEAD_RIGHT))
        for name, network, count, right in cases:
            own = network or head_of(config, found)
            if network is None:
                own.guess = ForcedGuesses(own, expected, options.context, right, config["vocab_size"]).guess
            measure(name, own, found, count, right, prompt, expected, options.new, plain)


def measure(
    name: str,
    network: Any,
    found: BenchModel,
    count: int,
    right: int,
    prompt: list[int],
    expected: list[int],
    new: int,
    plain: float,
) -> None:
    """Measure one case, and check that the tokens are the plain ones."""
    engine_config, is_head = found.engine_config, isinstance(network, HeadedNetwork)
    method = SpeculativeConfig("eagle3", model="random", adaptive=False) if is_head else None
    speculative = method or SpeculativeConfig("ngram", adaptive=False)
    if is_head:
        layout = engine_config.cache_layout.beside(network.head.config.cache_layout)
        engine_config = replace(
            engine_config, cache_layout=layout, num_blocks=(*engine_config.num_blocks, engine_config.max_num_seqs + 1)
        )
    model = Model(network, replace(engine_config, num_draft_tokens=count, speculative=speculative))
    vocab_size = engine_config.vocab_size

    with closing(model._engine):
        if not is_head:
            let_draft(model, lambda _: ForcedDrafter(expected, right, vocab_size))
        seconds, steps, tokens = timed(model, prompt, new)
        assert tokens == expected, "drafts have changed the tokens"
    report(name, seconds, steps, len(tokens), new, plain)


def report(name: str, seconds: float, steps: int, tokens: int, new: int, plain: float) -> None:
    """Print a line of JSON."""
    timed_tokens = tokens - new // 8
    print(
        json.dumps(
            {
                "case": name,
                "ms": round(1000 * seconds / steps, 3),
                "of_a_plain_step": round(seconds / steps / plain, 3),
                "tokens_per_step": round(timed_tokens / steps, 2),
                "tokens_per_second": round(timed_tokens / seconds, 1),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
