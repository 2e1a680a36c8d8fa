"""With drafts a request gets what it gets alone without them, whatever is drafted, asked for, or shares its steps.

Tokens, log-probabilities and texts are compared with ``==``. On a CPU that promise needs products that are computed row
by row (:class:`RowwiseBackend`, see docs/numerics.md); tests/engine/test_drafts.py shows what holds without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from grammar_kit import EOS, VOCAB_SIZE, make_compiler, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from model_kit import RowwiseBackend, WatchedBackend, run
from test_constrained import schemas
from test_every_architecture import CONFIGS, IN_EVERY_RUN
from tiny_models import RandomWeights

from bminf_lite import models
from bminf_lite.api import Model
from bminf_lite.backend.guesses import GuessPlace
from bminf_lite.engine import draft_control
from bminf_lite.engine.draft_model import DraftedNetwork
from bminf_lite.engine.drafts import Drafter
from bminf_lite.engine.request import Request
from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.engine.speculative import SpeculativeConfig
from bminf_lite.engine.step_builder import StepBuilder
from bminf_lite.grammar import Grammar
from bminf_lite.placement import make_engine_config
from bminf_lite.text.text_stream import TextStream

CONFIG = {
    "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
COMPILER, TOKENIZER = make_compiler(), make_tokenizer()
GRAMMARS = [
    Grammar.regex("[a-j]{2,20}(12|[0-9]{3,30})"), Grammar.json_object(), Grammar.choice(["true", "tabula", "123"]),
]  # fmt: skip
STOPS = [("a",), ("12", "ef"), ("],", "u"), ("abc", "b1", ":")]
MOST_DRAFTS = 6
LONGEST = 220
"""Tokens of a prompt: with the longest completion it fits the context."""


@dataclass(frozen=True)
class Task:
    """A request that can be made again and again.

    It ``arrives_after`` a number of steps, or when nothing else is left, and its caller cancels it behind the tokens
    ``leaves_after``.
    """

    index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    grammar: Grammar | None = None
    source: tuple[int, ...] = ()
    leaves_after: int | None = None
    eos_ids: frozenset[int] = EOS
    arrives_after: int = 0

    def request(self) -> Request:
        matcher = COMPILER.matcher(self.grammar, self.eos_ids) if self.grammar else None
        return Request(self.index, self.prompt, self.params, self.eos_ids, self.source, matcher=matcher)

    def leaves(self, request: Request) -> bool:
        """Whether the caller cancels the request now."""
        return self.leaves_after is not None and len(request.output_tokens) >= self.leaves_after


class ChosenDrafter(Drafter):
    """Proposes a number of tokens that it draws, each of which is the right one with the probability ``rate``."""

    def __init__(self, expected: dict[int, list[int]], rate: float, seed: int, needs_newest_token: bool):
        self.expected, self.rate, self.seed = expected, rate, seed
        self.needs_newest_token = needs_newest_token

    def propose(self, request: Request, count: int) -> list[int]:
        rng = np.random.default_rng([self.seed, request.index, request.num_known_tokens])
        known = len(request.output_tokens)
        right = self.expected[request.index][known : known + count]
        others = rng.integers(0, VOCAB_SIZE, count).tolist()
        is_right = rng.random(count) < self.rate
        tokens = [right[i] if i < len(right) and is_right[i] else others[i] for i in range(count)]
        return tokens[: rng.integers(0, count + 1)] if rng.random() < 0.3 else tokens


class ChosenGuesses(DraftedNetwork):
    """A model beside a draft model without layers, whose guesses are drawn like those of :class:`ChosenDrafter`."""

    def __init__(self, network: Any, rate: float, seed: int):
        nothing: Any = SimpleNamespace(read=lambda batch, cache: None)
        super().__init__(network, network.config.num_layers, nothing)
        self.rate, self.rng = rate, np.random.default_rng(seed)
        self.behind: dict[tuple[int, int], list[int]] = {}

    def expect(self, requests: Sequence[Request]) -> None:
        """Know what requests generate: a sequence is found by the position of its newest token, and that token."""
        for request in requests:
            tokens, start = request.output_token_ids, len(request.prompt_token_ids)
            self.behind |= {(start + i, token): tokens[i + 1 :] for i, token in enumerate(tokens)}

    def guess(self, cache: Any, places: Sequence[GuessPlace]) -> None:
        batch = places[0].batch
        newest = batch.context_lens.tolist(), batch.tokens.tolist()
        for column, place in enumerate(zip(*newest, strict=True)):
            right = self.behind.get(place, [])
            for i, one in enumerate(places):
                is_right = i < len(right) and self.rng.random() < self.rate
                one.guesses[column] = right[i] if is_right else self.rng.integers(VOCAB_SIZE)


def result(request: Request) -> tuple[Any, ...]:
    """What a request got."""
    top = request.top_logprobs
    return request.output_token_ids, request.logprobs.tolist(), top, request.finish_reason


def text_of(request: Request) -> tuple[str, str | None]:
    """The text of a request's tokens, and the stop string that ends it."""
    stream = TextStream(TOKENIZER, request.params.stop)
    return stream.push(request.output_token_ids, request.finish_reason).text, stream.found_stop


def serve(model: Model, tasks: Sequence[Task]) -> list[Request]:
    """Run tasks, which arrive while others run; their callers cancel those that leave."""
    requests = [task.request() for task in tasks]
    engine, ended, steps = model._engine, SimpleQueue[Request](), count()
    waiting = sorted(zip(tasks, requests, strict=True), key=lambda pair: pair[0].arrives_after)

    def on_update(request: Request) -> None:
        if request.finish_reason is not None:
            ended.put(request)

    def between_steps() -> None:
        step, is_idle = next(steps), engine.stats().running + engine.stats().waiting == 0
        while waiting and (waiting[0][0].arrives_after <= step or is_idle):
            engine.submit([waiting.pop(0)[1]])
            is_idle = False
        leaving = [r for r, task in zip(requests, tasks, strict=True) if task.leaves(r)]
        engine.cancel(leaving)

    for request in requests:
        request.on_update = on_update
    engine._after_steps[:] = [between_steps]
    engine.call(lambda: None)  # the first step of nothing
    for _ in requests:
        if (error := ended.get().error) is not None:
            raise error
    return requests


def let_draft(model: Model, drafter: Drafter) -> None:
    """Let a drafter take the place of the model's own."""

    def replace_drafter() -> None:
        scheduler, _ = model._engine._ready()
        scheduler.drafts.drafter = drafter

    model._engine.call(replace_drafter)


def check(plain: Model, drafted: Model, tasks: Sequence[Task], rate: float, seed: int, needs_newest: bool) -> int:
    """Compare what tasks get with drafts with what each gets alone; returns the number of accepted drafts."""
    alone = [run(plain, [task.request()])[0] for task in tasks]
    accepted = drafted.stats().accepted_tokens
    if isinstance(drafted.network, ChosenGuesses):
        drafted.network.expect(alone)
    else:
        drafter = ChosenDrafter({r.index: r.output_token_ids for r in alone}, rate, seed, needs_newest)
        let_draft(drafted, drafter)
    found = serve(drafted, tasks)
    for task, expected, request in zip(tasks, alone, found, strict=True):
        if request.finish_reason == "cancelled":
            count = len(request.output_tokens)
            assert task.leaves_after is not None and count >= task.leaves_after
            assert request.output_token_ids == expected.output_token_ids[:count]
            assert request.logprobs == expected.logprobs[:count]
        else:
            assert result(request) == result(expected)
            assert text_of(request) == text_of(expected)
    stats = drafted.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    return stats.accepted_tokens - accepted


# -- random requests --------------------------------------------------------------------------------------------------

TOKENS = st.integers(0, VOCAB_SIZE - 1)
SAMPLERS = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 24), "seed": st.integers(0, 2**64 - 1)},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.5]),
        "top_k": st.sampled_from([0, 1, 5, 40]),
        "top_p": st.sampled_from([0.3, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "repetition_penalty": st.sampled_from([0.9, 1.2, 1.8]),
        "presence_penalty": st.sampled_from([-0.5, 0.8]),
        "frequency_penalty": st.sampled_from([0.4, 1.0]),
        "min_tokens": st.integers(0, 12),
        "ignore_eos": st.booleans(),
        "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-3.0, 2.0, float("-inf")]), max_size=3),
        "logprobs": st.sampled_from([0, 1, 5]),
        "stop": st.sampled_from(STOPS),
    },
)
PROMPTS = st.one_of(
    st.lists(TOKENS, min_size=1, max_size=40), st.builds(lambda x, n: x * n, st.lists(TOKENS, min_size=1, max_size=6),
                                                        st.integers(1, 25)),
)  # fmt: skip


@st.composite
def many_tasks(draw: st.DrawFn) -> list[Task]:
    """One to five requests, some of which begin alike."""
    start: tuple[int, ...] = tuple(draw(PROMPTS))
    tasks = []
    for index in range(draw(st.integers(1, 5))):
        params = draw(SAMPLERS)
        params["min_tokens"] = min(params.get("min_tokens", 0), params["max_new_tokens"])
        prompt = (*(start if draw(st.booleans()) else ()), *draw(PROMPTS))[:LONGEST]
        grammar = draw(st.one_of(st.none(), st.sampled_from(GRAMMARS), schemas().map(Grammar.json_schema)))
        leaves = draw(st.one_of(st.none(), st.none(), st.integers(0, 10)))
        eos_ids = EOS
        if grammar is None:
            eos_ids |= draw(st.frozensets(TOKENS, max_size=3))
        else:  # a token that a grammar needs may not be forbidden
            params.pop("logit_bias", None)
        arrives = draw(st.sampled_from([0, 0, 3, 12]))
        tasks.append(Task(index, prompt, SamplingParams(**params), grammar, (), leaves, eos_ids, arrives))
    return tasks


KINDS: dict[str, dict[str, Any]] = {
    "float": {}, "w8a8": {"quantized": True}, "w8a16": {"quantized": True, "dynamic": False},
    "w8a8, int8 cache": {"quantized": True},
}  # fmt: skip


@cache
def network(kind: str) -> Any:
    """A tiny LLaMA whose steps run ahead of the host, and are captured."""
    architecture = models.find(CONFIG)
    ops = WatchedBackend(1, (1, 4, 16), (32,))
    return architecture.Model(architecture.parse(CONFIG), RandomWeights(CONFIG, 7, **KINDS[kind]), ops)


def served(kind: str, setting: Setting | None = None, **limits: Any) -> Model:
    parsed, own = network(kind).config, network(kind)
    if setting is not None and setting.on_device:
        own = ChosenGuesses(own, setting.rate, setting.seed)
    layout = parsed.cache_layout.with_int8(kind.endswith("int8 cache"))
    return Model(own, replace(make_engine_config(parsed, layout, None, 4), **limits))


@dataclass(frozen=True)
class Setting:
    """How drafts are made, and what the engine has room for. ``rate`` is the probability that a draft is right.

    A step is planned behind a check if all drafts of that are ``sure`` enough to be accepted; 0: always.
    """

    rate: float
    seed: int
    needs_newest_token: bool
    num_drafts: int
    adaptive: bool
    num_blocks: int
    piece: int
    prefix_cache: bool
    on_device: bool = False
    sure: float = draft_control.SURE

    @property
    def limits(self) -> dict[str, Any]:
        return {
            "num_draft_tokens": self.num_drafts, "speculative": SpeculativeConfig("ngram", adaptive=self.adaptive),
            "num_blocks": (self.num_blocks,), "max_num_batched_tokens": self.piece, "prefix_cache": self.prefix_cache,
        }  # fmt: skip


SETTINGS = st.builds(
    Setting, st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.integers(0, 99), st.booleans(), st.integers(1, MOST_DRAFTS),
    st.booleans(), st.sampled_from([5, 40]), st.sampled_from([7, 64]), st.booleans(), st.booleans(),
    st.sampled_from([0.0, draft_control.SURE]),
)  # fmt: skip
"""With 5 blocks, of which one is the null block, requests are preempted."""


def check_all(kind: str, tasks: Sequence[Task], setting: Setting) -> int:
    plain, drafted = served(kind, prefix_cache=False), served(kind, setting, **setting.limits)
    with closing(plain._engine), closing(drafted._engine), pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_control, "SURE", setting.sure)
        return check(plain, drafted, tasks, setting.rate, setting.seed, setting.needs_newest_token)


@settings(max_examples=max(settings().max_examples // 3, 1))
@given(many_tasks(), SETTINGS)
def test_any_request_with_any_drafts(tasks: list[Task], setting: Setting) -> None:
    """Random prompts, samplers, penalties, stop strings, grammars, lengths, cancellations, and room for few blocks."""
    check_all("w8a8", tasks, setting)


@pytest.mark.parametrize("on_device", [False, True])
def test_steps_behind_checks(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most steps are planned before it is known how many drafts were accepted; some of their drafts are wrong."""
    ahead, build = [], StepBuilder.build

    def watched(self: StepBuilder, step: Any) -> Any:
        ahead.append(bool(step.ahead))
        return build(self, step)

    monkeypatch.setattr(StepBuilder, "build", watched)
    prompts = [tuple(range(3 + i, 20 + 9 * i)) for i in range(3)]
    tasks = [
        Task(
            i,
            prompt,
            SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=i / 2, seed=i),
            eos_ids=frozenset(),
        )
        for i, prompt in enumerate(prompts)
    ]
    setting = Setting(0.9, 3, False, 4, False, 40, 64, True, on_device, 0.0)
    assert check_all("w8a8", tasks, setting) > 40
    assert sum(ahead) > 8


def test_a_grammar_allows_no_drafts_behind_a_token_that_it_has_not_seen() -> None:
    """From a drafter that has a guess more if it is asked for more."""
    digits = Grammar("regex", "[a-j]{2,20}(12|[0-9]{3,30})")
    prompt = (0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1)
    task = Task(1, prompt, SamplingParams(max_new_tokens=6, temperature=0.0, seed=0), digits)
    check_all("w8a8", [task], Setting(0.0, 51, False, 2, False, 40, 64, False))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(many_tasks(), SETTINGS)
def test_any_request_with_any_drafts_in_every_scheme(kind: str, tasks: list[Task], setting: Setting) -> None:
    check_all(kind, tasks, setting)


# -- every architecture -----------------------------------------------------------------------------------------------

NEW = 14


def few_tasks(vocab_size: int, has_sources: bool) -> list[Task]:
    """Greedy and sampled, with penalties and without; two begin alike, and one leaves. The end token never comes."""
    rng = np.random.default_rng(2)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, vocab_size, count).tolist())

    first, source = tokens(70), tokens(20) if has_sources else ()
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 2.0, "top_k": 40}, {"temperature": 1.2, "repetition_penalty": 1.5, "logprobs": 2}, {},
    ]  # fmt: skip
    prompts = [first, (*first[:40], *tokens(30)), tokens(5), tokens(64)]
    return [
        Task(i, prompt, SamplingParams(max_new_tokens=NEW, seed=7, **kinds[i]), None, source, 3 if i == 3 else None,
             frozenset([vocab_size]))
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


def check_architecture(config: dict[str, Any], rate: float, int8_cache: bool, **scheme: Any) -> None:
    """In room for fewer sequences than there are, so that some wait or are preempted."""
    parsed = models.find(config).parse(config)
    tasks = few_tasks(parsed.vocab_size, parsed.is_encoder_decoder)
    layout = parsed.cache_layout.with_int8(int8_cache)
    network = models.find(config).Model(parsed, RandomWeights(config, 7, **scheme), RowwiseBackend())
    room = make_engine_config(parsed, layout, None, 3)
    sources = {"num_source_blocks": 4 * parsed.is_encoder_decoder}
    plain = Model(network, replace(room, prefix_cache=False))
    setting = Setting(rate, 1, False, 4, False, 7, 48, True)
    limits = {**setting.limits, "num_blocks": (setting.num_blocks,) * len(layout.groups), **sources}
    drafted = Model(network, replace(room, **limits))
    with closing(plain._engine), closing(drafted._engine):
        accepted = check(plain, drafted, tasks, rate, setting.seed, setting.needs_newest_token)
    assert accepted > 0 or rate == 0


each_architecture = pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in CONFIGS]
)


@each_architecture
def test_every_architecture(architecture: str) -> None:
    """Float, with drafts of which most are right; the rest is :func:`test_every_architecture_otherwise`."""
    check_architecture(CONFIGS[architecture], 0.8, int8_cache=False)


@pytest.mark.slow
@pytest.mark.parametrize(("dynamic", "rate"), [(True, 1.0), (False, 0.0)], ids=["w8a8, all right", "w8a16, all wrong"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_architecture_otherwise(architecture: str, dynamic: bool, rate: float) -> None:
    """Quantized, with an int8 cache."""
    check_architecture(CONFIGS[architecture], rate, int8_cache=True, quantized=True, dynamic=dynamic)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_the_sources_of_drafts_that_need_no_model(method: str) -> None:
    """Prompts that repeat, and a token that does, served twice, so that ``suffix`` finds earlier completions too."""
    prompts = [tuple(np.random.default_rng(i).integers(2, VOCAB_SIZE, 6).tolist() * 5) for i in range(4)]
    samplers: list[dict[str, Any]] = [
        {"logit_bias": {7: 50.0}}, {"temperature": 0.7}, {"repetition_penalty": 1.1},
        {"temperature": 1.0, "stop": ("ab", "12")},
    ]  # fmt: skip
    tasks = [
        Task(i, prompt, SamplingParams(max_new_tokens=20, seed=i, **samplers[i % 4]))
        for i, prompt in enumerate(prompts)
    ]
    limits = {"num_draft_tokens": 4, "speculative": SpeculativeConfig(method, adaptive=False)}
    plain, drafted = served("w8a8", prefix_cache=False), served("w8a8", **limits)
    with closing(plain._engine), closing(drafted._engine):
        alone = [run(plain, [task.request()])[0] for task in tasks]
        for _ in range(2):
            found = run(drafted, [task.request() for task in tasks])
            assert [result(r) for r in found] == [result(r) for r in alone]
            assert [text_of(r) for r in found] == [text_of(r) for r in alone]
        assert drafted.stats().accepted_tokens > 10
