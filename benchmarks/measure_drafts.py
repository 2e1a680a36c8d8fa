"""Measure what drafts cost and bring: checks, the guesses of an EAGLE-3 head, many streams, and texts of a real model.

    python benchmarks/measure_drafts.py [--shape llama-3-8b] [--device cuda] [--context 512] [--new 240] [--cases head]
    python benchmarks/measure_drafts.py --shape llama-3-70b --cases draft [--draft-shape llama-3.2-1b]
    python benchmarks/measure_drafts.py --model MODEL [--drafts ngram] [--guesses 1,3,5] [--device cuda] FILE...

The first form has random weights. Acceptance is forced in ``checks``, ``head``, ``draft`` and ``streams``: a drafter
knows what the model will choose, and lets as many drafts of a check be right as the case says; what a head or a draft
model guesses is replaced on the device. Everything else is as served, times of the host included. ``ngram`` has real
n-grams of a text that hardly repeats. ``schema`` decodes an array of small objects, as a JSON schema wants it, without
drafts, with real n-grams, and with forced ones. Each case prints a line of JSON: milliseconds of a step or a check,
tokens per second, and both relative to plain decoding, with ``schema`` to that without one. The head has the model's
width, one layer and 32,000 tokens.

The second form is the case ``draft`` alone, which needs the memory of both models: a draft model of another shape with
the same vocabulary, whose checks bring 3.5 tokens. A quarter of ``--new`` tokens is measured.

The third form lets a real model continue the texts of each FILE (UTF-8, or JSONL with a "text" or "messages" per
line) one after another, greedy and at temperature 0.7, without drafts and with up to ``--guesses`` of them a check. It
prints how many tokens a check brings, and the speed relative to that without drafts, the host included: of the time
from the step that gives a text its first token to the last one. On a GPU the tokens are ``equal``. With
``--check-cost`` the speed is computed in place of measured, for another device, on which a check takes as many plain
steps.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from measure_grammar import large_vocabulary

from bminf_lite import backend
from bminf_lite.api import Model, load
from bminf_lite.backend.guesses import GuessPlace
from bminf_lite.backend.quantization import Int8Weight
from bminf_lite.backend.values import Placement
from bminf_lite.bench.model import BenchModel, RandomWeights, random_model, read_shape
from bminf_lite.checkpoint.opened_model import describe_model
from bminf_lite.checkpoint.recipe import load_recipe
from bminf_lite.draft_training import COPIED
from bminf_lite.engine.draft_model import DraftedNetwork, HeadedNetwork
from bminf_lite.engine.drafts import Drafter
from bminf_lite.engine.request import Request
from bminf_lite.engine.speculative import SpeculativeConfig
from bminf_lite.evaluation.corpus import read_prompts
from bminf_lite.grammar.matcher import GrammarCompiler
from bminf_lite.models import _eagle3 as eagle3
from bminf_lite.models._eagle3 import Eagle3Config, Eagle3Head
from bminf_lite.text.json_tokenizer import JsonTokenizer

CHECKS = ((4, 4), (7, 7), (7, 0))
"""Drafts of a check, and how many of them are right."""
HEAD_DRAFTS, HEAD_BRINGS = 5, (4,)
"""Guesses of the head, and the tokens that its checks bring, in turn."""
MODEL_DRAFTS, MODEL_BRINGS = 4, (3, 4)
"""The same of a draft model."""
SCHEMA_DRAFTS, SCHEMA_RIGHT = 5, 3
"""Drafts of a text with a schema, and how many are right."""
ITEM = {
    "type": "object",
    "properties": {
        "name": {"enum": ["first", "second", "third"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "done": {"type": "boolean"},
    },
    "required": ["name", "count", "done"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 1000}
DRAFT_VOCAB = 32_000
CASES = ("head", "checks", "ngram", "streams", "schema")
HEAT = 0.7
"""The temperature of texts that are not greedy."""
MORE = 64
"""Tokens that a context has beside those that are measured."""


class Timed(NamedTuple):
    """The seconds and steps of ``count`` tokens, and all ``tokens`` of each request."""

    seconds: float
    steps: int
    count: int
    tokens: list[list[int]]


class ForcedDrafter(Drafter):
    """Proposes what the model will choose, ``right`` tokens of each check, and then wrong ones.

    ``expected`` has the tokens of each request.
    """

    def __init__(self, expected: Sequence[Sequence[int]], right: int, vocab_size: int):
        self.expected, self.right, self.vocab_size = expected, right, vocab_size

    def propose(self, request: Request, count: int) -> Sequence[int]:
        first = request.num_pending_tokens + request.num_unchecked_drafts
        known = len(request.output_tokens)
        tokens = self.expected[request.index][known : known + count]
        return [token if i < first + self.right else (token + 1) % self.vocab_size for i, token in enumerate(tokens)]


class ForcedGuesses:
    """Replaces the guesses that a network has made on the device, in the same graph, by those that are forced.

    A sequence begins with ``context`` tokens, behind which the model chooses ``expected``. Checks bring as many tokens
    as ``brings`` says, in turn: the last token of each is guessed wrong.
    """

    def __init__(
        self, network: DraftedNetwork, expected: Sequence[int], context: int, brings: Sequence[int], vocab_size: int
    ):
        self.ops, self.make = network.ops, network.guess
        behind = np.zeros(context + len(expected) + MORE, np.int32)
        behind[context : context + len(expected) - 1] = expected[1:]
        ends = context - 1 + np.cumsum(np.resize(brings, len(behind)))
        ends = ends[ends < len(behind)]
        behind[ends] = (behind[ends] + 1) % vocab_size
        self.table = self.ops.array(behind)

    def guess(self, cache: Any, places: Sequence[GuessPlace]) -> None:
        """See :meth:`.DraftedNetwork.guess`."""
        self.make(cache, places)
        arrays = getattr(self.ops, "arrays", None)
        with arrays.current() if arrays is not None else nullcontext():
            for place in places:
                place.guesses[...] = self.table[place.batch.context_lens]


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


def draft_model_of(shape: str, found: BenchModel, positions: int) -> DraftedNetwork:
    """The model with a random draft model of a shape, on its device."""
    described = describe_model(dict(read_shape(shape)) | {"max_position_embeddings": positions})
    found.ops.placement = Placement()
    second = described.architecture.Model(
        described.config, RandomWeights(described.spec, load_recipe("w8a8")), found.ops
    )
    network: Any = found.network
    return DraftedNetwork(network, network.config.num_layers, second)


def record_steps(model: Model) -> tuple[list[tuple[float, int]], dict[Request, None]]:
    """Lists that grow with each step: when it ended, with the tokens of all requests until then, and these requests."""
    engine, marks, seen = model._engine, list[tuple[float, int]](), dict[Request, None]()

    def mark() -> None:
        if engine._scheduler is not None:
            seen.update(dict.fromkeys(engine._scheduler.running))
            marks.append((time.perf_counter(), sum(len(request.output_tokens) for request in seen)))

    engine._after_steps[:] = [mark]
    return marks, seen


def timed(model: Model, prompts: list[list[int]], new: int, **options: Any) -> Timed:
    """The tokens behind the first quarter, after runs that load and capture what they need.

    Times are those after which the engine has recorded a step, so that the beginning and the end do not count.
    """
    marks, seen = record_steps(model)
    for _ in range(3):
        marks.clear()
        seen.clear()
        results = model.generate(prompts, max_new_tokens=new, temperature=0, ignore_eos=True, **options)
    first = next(i for i, (_, count) in enumerate(marks) if count >= len(prompts) * new // 4)
    last = max(i for i, (_, count) in enumerate(marks) if count <= len(prompts) * (new - new // 8))
    (start, before), (end, after) = marks[first], marks[last]
    return Timed(end - start, last - first, after - before, [result.token_ids for result in results])


def let_draft(model: Model, make: Callable[[Any], Drafter]) -> None:
    """Let a drafter, which ``make`` makes for a runner, take the place of the model's own."""

    def replace_drafter() -> None:
        scheduler, runner = model._engine._ready()
        scheduler.drafts.drafter = make(runner)

    model.engine.call(replace_drafter)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3-8b", help="the name of a packaged shape, or a config.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--context", type=int, default=512, help="tokens before those that are timed")
    parser.add_argument("--new", type=int, default=240, help="tokens that are generated")
    parser.add_argument("--cases", default=",".join(CASES), help="separated by commas; and draft")
    parser.add_argument("--draft-shape", default="llama-3.2-1b", help="the draft model's shape, of the case draft")
    parser.add_argument("--streams", type=int, default=32, help="requests of the case streams")
    parser.add_argument("--model", help="a checkpoint that continues texts, in place of a shape")
    parser.add_argument("--drafts", default="ngram", help="what load(speculative=...) gets for --model")
    parser.add_argument("--guesses", default="5", help="drafts of a check for --model, several numbers in turn")
    parser.add_argument("--adaptive", action="store_true", help="let the engine choose how many, up to --guesses")
    parser.add_argument("--check-cost", type=float, help="the time of a check, of a plain step; default: measured")
    parser.add_argument("--texts", type=int, default=20, help="texts of each FILE")
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args(arguments)
    if options.model is None:
        measure_shape(options)
    else:
        measure_texts(options)


def measure_shape(options: argparse.Namespace) -> None:
    """The cases of random weights."""
    config, cases = dict(read_shape(options.shape)), options.cases.split(",")
    config["max_position_embeddings"] = options.context + options.new + MORE
    random, vocab_size = np.random.default_rng(1), config["vocab_size"]
    prompts = [random.integers(0, vocab_size, options.context).tolist() for _ in range(options.streams)]
    with closing(backend.create(options.device)) as ops:
        found = random_model(options.shape, config, ops, max_batch=options.streams)
        print(json.dumps({"device": ops.describe(), "shape": options.shape, "context": options.context}), flush=True)
        if "draft" in cases:
            few = Case(found, prompts[:1], max(options.new // 4, 3))
            expected, positions = few.plain.tokens[0], config["max_position_embeddings"]
            both = draft_model_of(options.draft_shape, found, positions)
            guess = ForcedGuesses(both, expected, options.context, MODEL_BRINGS, vocab_size).guess
            both.guess = guess  # type: ignore[method-assign]
            few.measure(f"draft model {options.draft_shape}, {MODEL_DRAFTS} guesses", MODEL_DRAFTS, both=both)
            del both
        if set(cases) == {"draft"}:
            return
        one = Case(found, prompts[:1], options.new)
        if "head" in cases:
            head = head_of(config, found)
            guess = ForcedGuesses(head, one.plain.tokens[0], options.context, HEAD_BRINGS, vocab_size).guess
            head.guess = guess  # type: ignore[method-assign]
            one.measure(f"EAGLE-3 head, {HEAD_DRAFTS} guesses, {HEAD_BRINGS[0] - 1} right", HEAD_DRAFTS, both=head)
        for count, right in CHECKS if "checks" in cases else ():
            drafter = ForcedDrafter(one.plain.tokens, right, vocab_size)
            one.measure(f"check of 1 + {count}, {right} right", count, drafter)
        if "ngram" in cases:
            one.measure("n-grams, text that hardly repeats", 8, adaptive=True)
        if "schema" in cases:
            found_schema = Case(found, prompts[:1], options.new, one.plain, large_vocabulary(vocab_size))
            found_schema.measure("schema, n-grams", 8, adaptive=True)
            drafter = ForcedDrafter(found_schema.plain.tokens, SCHEMA_RIGHT, vocab_size)
            found_schema.measure(f"schema, 1 + {SCHEMA_DRAFTS}, {SCHEMA_RIGHT} right", SCHEMA_DRAFTS, drafter)
        if "streams" in cases:
            many = Case(found, prompts, options.new)
            drafter = ForcedDrafter(many.plain.tokens, 8, vocab_size)
            many.measure(f"{options.streams} streams, drafts right", 8, drafter, adaptive=True)


class Case:
    """Requests whose decoding without drafts was measured.

    With a ``vocabulary`` their completions match :data:`SCHEMA`, and speeds are relative to those of ``free`` requests.
    """

    def __init__(
        self,
        found: BenchModel,
        prompts: list[list[int]],
        new: int,
        free: Timed | None = None,
        vocabulary: JsonTokenizer | None = None,
    ):
        self.found, self.prompts, self.new, self.vocabulary = found, prompts, new, vocabulary
        self.options = {} if vocabulary is None else {"json_schema": SCHEMA}
        self.eos_ids = frozenset(vocabulary.eos_ids if vocabulary is not None else ())
        self.plain = self._timed(Model(found.network, found.engine_config, eos_ids=self.eos_ids))
        self.free = free or self.plain
        streams = "plain" if len(prompts) == 1 else f"plain, {len(prompts)} streams"
        self.report(streams if vocabulary is None else "schema, no drafts", self.plain)

    def measure(
        self,
        name: str,
        count: int,
        drafter: Drafter | None = None,
        both: DraftedNetwork | None = None,
        adaptive: bool = False,
    ) -> None:
        """Measure decoding with drafts, of a draft model or a head if the network is ``both``.

        It checks that the tokens are those without drafts.
        """
        engine_config, network = self.found.engine_config, self.found.network
        speculative = SpeculativeConfig("ngram", adaptive=adaptive)
        if both is not None:
            source: Any = both.head if isinstance(both, HeadedNetwork) else both.draft
            speculative = SpeculativeConfig("draft_model", model="random", adaptive=adaptive)
            layout = engine_config.cache_layout.beside(source.config.cache_layout)
            num_blocks = engine_config.num_blocks
            if len(layout.groups) > len(num_blocks):
                num_blocks = (*num_blocks, engine_config.max_num_seqs + 1)
            engine_config, network = replace(engine_config, cache_layout=layout, num_blocks=num_blocks), both
        engine_config = replace(engine_config, num_draft_tokens=count, speculative=speculative)
        model = Model(network, engine_config, eos_ids=self.eos_ids)
        measured = self._timed(model, drafter)
        assert measured.tokens == self.plain.tokens, "drafts have changed the tokens"
        self.report(name, measured)

    def _timed(self, model: Model, drafter: Drafter | None = None) -> Timed:
        with closing(model._engine):
            if self.vocabulary is not None:
                model.requests.grammars = GrammarCompiler(self.vocabulary, model.engine_config.vocab_size)
            if drafter is not None:
                let_draft(model, lambda _: drafter)
            return timed(model, self.prompts, self.new, **self.options)

    def report(self, name: str, measured: Timed) -> None:
        """Print a line of JSON."""
        plain, step = self.free, measured.seconds / measured.steps
        found = {
            "case": name,
            "ms": round(1000 * step, 3),
            "of_a_plain_step": round(step / (plain.seconds / plain.steps), 3),
            "tokens_per_step": round(measured.count / measured.steps, 2),
            "tokens_per_second": round(measured.count / measured.seconds, 1),
            "of_plain": round(measured.count / measured.seconds / (plain.count / plain.seconds), 3),
        }
        print(json.dumps(found), flush=True)


class Written(NamedTuple):
    """What a model wrote for several prompts, in ``seconds`` from first tokens to last ones."""

    tokens: list[list[int]]
    seconds: float
    checks: int
    accepted: int

    @property
    def count(self) -> int:
        """The tokens behind the first of each text."""
        return sum(len(tokens) - 1 for tokens in self.tokens)


def measure_texts(options: argparse.Namespace) -> None:
    """What a model's drafts bring for texts of several kinds."""
    kinds = list(product(options.files, (0.0, HEAT)))
    drafts = SpeculativeConfig.from_value(options.drafts)
    assert drafts is not None, "--drafts names a method"
    plain = dict(zip(kinds, write_all(options, "none", kinds), strict=True))
    for count in map(int, options.guesses.split(",")):
        config = replace(drafts, num_speculative_tokens=count, adaptive=options.adaptive)
        for kind, found in zip(kinds, write_all(options, config, kinds), strict=True):
            own = plain[kind]
            tokens = sum(map(len, found.tokens))
            speed = own.seconds / own.count, found.seconds / found.count
            if options.check_cost is None:
                of_plain = speed[0] / speed[1]
            else:
                of_plain = tokens / (tokens - found.accepted + found.checks * (options.check_cost - 1))
            line = {
                "text": kind[0].name,
                "temperature": kind[1],
                "guesses": count,
                "tokens": tokens,
                "equal": found.tokens == own.tokens,
                "tokens_per_check": round(1 + found.accepted / max(found.checks, 1), 2),
                "plain_tokens_per_second": round(1 / speed[0], 1),
                "tokens_per_second": round(1 / speed[1], 1),
                "of_plain": round(of_plain, 2),
            }
            print(json.dumps(line), flush=True)


def write_all(
    options: argparse.Namespace, drafts: str | SpeculativeConfig, kinds: Sequence[tuple[Path, float]]
) -> list[Written]:
    """What the model writes for the texts of each file and temperature, one after another."""
    found = []
    with load(options.model, device=options.device, speculative=drafts, context=options.context + options.new) as model:
        for file, heat in kinds:
            prompts = [prompt_of(model, text, options.context) for text in read_prompts(file)[: options.texts]]
            for _ in range(1 if options.device == "cpu" else 2):  # the first time loads and captures what is needed
                before, written = model.stats(), []
                for index, prompt in enumerate(prompts):
                    written.append(decode(model, prompt, options.new, heat, index))
                after = model.stats()
            checks, accepted = (getattr(after, n) - getattr(before, n) for n in ("drafts", "accepted_tokens"))
            seconds = sum(own for _, own in written)
            found.append(Written([tokens for tokens, _ in written], seconds, checks, accepted))
    return found


def decode(model: Model, prompt: list[int], new: int, heat: float, seed: int) -> tuple[list[int], float]:
    """What the model writes behind a prompt, and the seconds between the steps that give the first and last token."""
    marks, _ = record_steps(model)
    tokens = model.generate(prompt, max_new_tokens=new, temperature=heat, seed=seed).token_ids
    first = next(when for when, count in marks if count)
    last = next(when for when, count in marks if count == marks[-1][1])
    return tokens, last - first


def prompt_of(model: Model, text: str | list[Any], context: int) -> list[int]:
    """The last tokens of a text, or a conversation."""
    if isinstance(text, str):
        return model.tokenizer.encode(text)[-context:]
    return np.asarray(model.encode(text).token_ids)[-context:].tolist()


if __name__ == "__main__":
    main()
