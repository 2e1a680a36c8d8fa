"""Running the benchmark on the CPU: what is run, what is counted, and that nonsense is noticed."""

from __future__ import annotations

import json
import math
import os
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_kit import run
from tiny_models import goldens

from bminf_lite import models
from bminf_lite.api import Model
from bminf_lite.backend import create_ranks
from bminf_lite.backend.base import Backend
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.backend.functions import normalise, softmax
from bminf_lite.backend.quantization import Int8Weight
from bminf_lite.backend.values import STATE_CHUNK, Norm
from bminf_lite.bench import cases as plain
from bminf_lite.bench.calls import ExpertUse, LinearCosts, OpCall, recorded_choices, trace_calls
from bminf_lite.bench.model import BenchModel, RandomWeights, random_model, read_shape
from bminf_lite.bench.profiler import Profiler
from bminf_lite.bench.runner import Workload, run_tests, time_kernels, trace_step, workloads
from bminf_lite.bench.session import UNWRITTEN, Session, check_results, chunks
from bminf_lite.checkpoint.opened_model import describe_model
from bminf_lite.checkpoint.recipe import Recipe, Scheme, load_recipe
from bminf_lite.engine.request import Request
from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.errors import BminfError, CheckpointError, UsageError

SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def bench_model() -> BenchModel:
    return random_model("small", SHAPE, CpuBackend())


@pytest.fixture
def profiler(bench_model: BenchModel) -> Profiler:
    return Profiler(bench_model.ops, ceiling_bytes=1 << 22)


BILLIONS = {
    "cpm-1": 2.60,
    "cpm-2": 11.0,
    "eva": 2.8,
    "llama-2-7b": 6.74,
    "llama-3-70b": 70.55,
    "llama-3-8b": 8.03,
    "llama-3.2-1b": 1.24,
    "llama-tiny": 0.004,
    "gpt2-xl": 1.558,
    "opt-6.7b": 6.66,
    "pythia-6.9b": 6.86,
}
"""Parameters of the shapes, as their authors give them."""


@pytest.mark.parametrize("name", BILLIONS)
def test_every_shape_is_the_model_it_says(name: str):
    config = read_shape(name)
    architecture = models.find(config)
    spec = architecture.spec(architecture.parse(config))
    parameters = sum(math.prod(p.shape) for n, p in spec.parameters.items() if n not in spec.tied)
    assert parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.02 if name != "llama-tiny" else 0.2)


def test_a_shape_by_path_and_by_a_wrong_name(tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps(SHAPE))
    assert read_shape(str(tmp_path / "mine.json")) == SHAPE
    with pytest.raises(UsageError, match="the nearest are llama-3-8b"):
        read_shape("lama-3-8b")
    (tmp_path / "bad.json").write_text("[")
    with pytest.raises(CheckpointError):
        read_shape(str(tmp_path / "bad.json"))


BEHIND_ATTENTION = 64 * 64 + 3 * 64 * 96
LAYER = 64 * (64 + 2 * 32) + BEHIND_ATTENTION
PRODUCTS = 2 * LAYER + 300 * 64
SCALES = 2 * (64 + 2 * 32 + 64 + 2 * 96 + 64) + 300
STEP_BYTES = 4 * (PRODUCTS + SCALES)
"""What the CPU's backend reads for a step of :data:`SHAPE`: codes as fp32 numbers, and scales."""


def test_the_sizes_of_a_model(bench_model: BenchModel):
    assert bench_model.parameters == 2 * (LAYER + 2 * 64) + 64 + 2 * 300 * 64
    # codes and fp32 scales of the matrices, the embedding in fp16, norms in fp32
    assert bench_model.nbytes == PRODUCTS + 4 * SCALES + 2 * 300 * 64 + 4 * 5 * 64
    assert bench_model.cache_bytes(10) == 10 * 2 * 2 * 2 * 16 * 4
    tied = random_model("tied", SHAPE | {"tie_word_embeddings": True}, CpuBackend())
    assert bench_model.parameters - tied.parameters == 300 * 64


def test_a_session_decodes_what_the_engine_decodes(bench_model: BenchModel):
    """The same prompts, prefilled and decoded by both, give the same tokens."""
    prompts = [[5, 17, 250, 3, 99], [8, 8, 1, 0, 200]]
    requests = [Request(i, p, SamplingParams(max_new_tokens=6, seed=0, ignore_eos=True)) for i, p in enumerate(prompts)]
    run(Model(bench_model.network, bench_model.engine_config), requests)
    session = Session(bench_model, 2, 32)
    session.tokens = lambda shape: np.array(prompts, np.int32)  # type: ignore[method-assign]
    (chosen,) = session.prepare_prefill(5)()
    session.tokens = lambda shape: chosen[0]  # type: ignore[method-assign]
    session.poison(5)
    session.prepare_decode(5)
    decoded = [chosen, *session.decode(5)]
    for i, request in enumerate(requests):
        assert [int(r[0, i]) for r in decoded] == request.output_token_ids


@pytest.mark.parametrize(("batch", "tokens", "chunk"), [(1, 10, 4), (3, 5, 100), (3, 5, 7), (2, 8, 8), (1, 1, 1)])
def test_chunks_hold_every_token_once(batch: int, tokens: int, chunk: int):
    steps = list(chunks(batch, tokens, chunk))
    assert all(0 < sum(j - i for _, i, j in parts) <= chunk for parts in steps)
    assert len(steps) == -(-batch * tokens // chunk)
    assert [(b, t) for parts in steps for b, i, j in parts for t in range(i, j)] == [
        (b, t) for b in range(batch) for t in range(tokens)
    ]


def test_every_combination_is_a_test():
    tests = workloads((512, 0), (128,), (0, 64), (1, 2))
    assert [str(t) for t in tests] == [
        "pp512",
        "tg128",
        "pp512 @ d64",
        "tg128 @ d64",
        "pp512 x 2",
        "tg128 x 2",
        "pp512 @ d64 x 2",
        "tg128 @ d64 x 2",
    ]
    for wrong in [((-1,), (), (), ()), ((1,), (), (0,), (0,)), ((), (3,), (-2,), (1,))]:
        with pytest.raises(UsageError):
            workloads(*wrong)


def test_measurements(bench_model: BenchModel, profiler: Profiler, monkeypatch: pytest.MonkeyPatch):
    seconds = iter(range(1, 100))
    real = profiler.time
    monkeypatch.setattr(profiler, "time", lambda work: (float(next(seconds)), real(work)[1]))
    tests = [Workload("pp", 8), Workload("tg", 4, depth=6, batch=2)]
    seen = []
    prefill, decode = run_tests(bench_model, profiler, tests, 3, seen.append)
    assert seen == [prefill, decode]
    assert prefill.seconds == (1.0, 2.0, 3.0)
    assert prefill.speed == 8 / 2 and prefill.step_seconds == 2.0
    assert decode.seconds == (4.0, 5.0, 6.0)
    assert decode.speed == 8 / 5 and decode.step_seconds == 5.0 / 4
    assert decode.deviation == pytest.approx(np.std([8 / 4, 8 / 5, 8 / 6], ddof=1))
    assert decode.token_bytes == STEP_BYTES / 2 + bench_model.cache_bytes(6 + 2.5 + 1)
    assert decode.operations == 2 * PRODUCTS
    assert prefill.token_bytes == STEP_BYTES / 8 + bench_model.cache_bytes(8 / 8 + 1)
    of_last_token = BEHIND_ATTENTION + 300 * 64  # alone, in the last layer and in the head
    assert math.isclose(prefill.operations, 2 * PRODUCTS - 2 * of_last_token * 7 / 8)
    assert decode.peak_used > 1 << 20 and decode.peak_reserved is None


def test_a_peak_does_not_count_what_was_freed_before(profiler: Profiler):
    def peak() -> int:
        status = Path("/proc/self/status")
        text = status.read_text() if status.is_file() and os.access("/proc/self/clear_refs", os.W_OK) else ""
        found = re.search(r"VmHWM:\s*(\d+) kB", text)
        return int(found[1]) if found else pytest.skip("this system does not set peaks of memory anew")

    np.ones(64 << 20, np.uint8).sum()
    before = peak()
    profiler.reset_peaks()
    assert peak() < before


ENCODER_DECODER = {
    "model_type": "t5",
    "d_model": 64,
    "d_kv": 16,
    "num_heads": 4,
    "d_ff": 96,
    "num_layers": 2,
    "vocab_size": 300,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "decoder_start_token_id": 0,
}


@pytest.mark.parametrize("source_sizes", [(), (12, 40)], ids=["eager", "padded"])
def test_an_encoder_decoder(source_sizes: tuple[int, ...]):
    """The source is read by the encoder; a decode step reads neither it nor what only the encoder needs.

    The padding of a captured source is not counted.
    """
    ops = CpuBackend()
    ops.source_sizes = source_sizes
    bench_model = random_model("t5", ENCODER_DECODER, ops)
    profiler = Profiler(ops)
    tests = [Workload("pp", 8), Workload("pp", 8, depth=9), Workload("pp", 16, batch=2)]
    short, long, decode = run_tests(bench_model, profiler, [*tests, Workload("tg", 4, depth=9, batch=2)], 2)
    assert [str(m.test) for m in (short, long, decode)] == ["enc8", "enc16 x 2", "tg4 @ d9 x 2"]
    attention, feed_forward = 4 * 64 * 64, 3 * 64 * 96
    encoder, decoder = 2 * (attention + feed_forward), 2 * (2 * attention + feed_forward)
    source = 2 * 2 * 64 * 64  # keys and values of the source, which are computed once
    assert decode.operations == 2 * (decoder - source + 300 * 64)
    assert short.operations == long.operations == 2 * (encoder + source)
    assert decode.token_bytes > bench_model.cache_bytes(9)
    trace = trace_step(bench_model, profiler, depth=5)
    assert any(span.name.startswith("cross_attention") for span in trace.spans)


class Broken(CpuBackend):
    """Gives ``chosen`` instead of sampling."""

    chosen = np.zeros((2, 1), np.int32)

    def sample(self, logits, sampler, batch=None):
        return self.chosen.copy()


def test_a_divided_model_is_measured_on_all_ranks_at_once() -> None:
    """Each rank runs every step; bytes, operations and the parts of a step are those of the first."""
    ranks = create_ranks(2, "cpu")
    bench_model = random_model("divided", SHAPE, ranks)
    steps = [0, 0]
    for own in bench_model.ranks:
        count_steps(own, steps)
    tests = [Workload("pp", 8), Workload("tg", 4, depth=6, batch=2)]
    prefill, decode = run_tests(bench_model, Profiler(ranks[0]), tests, 2)
    assert len(prefill.seconds) == len(decode.seconds) == 2
    assert decode.operations == prefill.operations + 2 * (BEHIND_ATTENTION + 300 * 64) * 7 / 8 / 2 == PRODUCTS
    assert decode.token_bytes < (STEP_BYTES / 2 + random_model("whole", SHAPE, CpuBackend()).cache_bytes(9.5)) * 0.6
    assert steps[0] == steps[1] > 10
    names = [span.name.split(" ")[0] for span in trace_step(bench_model, Profiler(ranks[0]), depth=5).spans]
    assert names.count("linear_add_of_ranks") == 4 and names.count("all_gather_columns") == 1
    assert all(ops.communicator.tp_size == 2 for ops in ranks)


def count_steps(own: BenchModel, steps: list[int]) -> None:
    """Count in ``steps`` the results that a rank fetches."""
    fetch, rank = own.ops.fetch, own.ops.communicator.tp_rank

    def counted(*arguments: Any) -> Any:
        steps[rank] += 1
        return fetch(*arguments)

    own.ops.fetch = counted  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["pp", "tg"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_ends_the_others(kind: str, failing: int) -> None:
    ranks = create_ranks(2, "cpu")
    bench_model = random_model("divided", SHAPE, ranks)

    def fail(*arguments: Any) -> Any:
        raise BminfError(f"rank {failing} is out of order")

    ranks[failing].fetch = fail  # type: ignore[method-assign]
    with pytest.raises(BminfError, match=f"rank {failing} is out of order"):
        run_tests(bench_model, Profiler(ranks[0]), [Workload(kind, 4)], 1)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([[-1], [0]], "NaN or an infinity"),
        ([[300], [0]], "token 300"),
        ([[UNWRITTEN], [UNWRITTEN]], "nothing was written"),
        ([[7], [0]], "gave exactly the same"),
        ([[7], np.array([np.nan], np.float32).view(np.int32)], "log-probability"),
        ([[7], np.array([2.5], np.float32).view(np.int32)], "log-probability"),
    ],
)
@pytest.mark.parametrize("kind", ["pp", "tg"])
def test_nonsense_is_noticed(kind: str, chosen, message: str):
    ops = Broken()
    ops.chosen = np.array(chosen, np.int32)
    bench_model = random_model("broken", SHAPE, ops)
    with pytest.raises(BminfError, match=message):
        run_tests(bench_model, Profiler(ops), [Workload(kind, 4)], 1)


def test_reading_an_unwritten_place_of_the_cache_shows(bench_model: BenchModel):
    session = Session(bench_model, 1, 16)
    session.poison(0)
    session.prepare_decode(3)  # nothing was prefilled
    with pytest.raises(BminfError, match="NaN"):
        check_results(session.decode(2), bench_model.engine_config.vocab_size, "here")


@pytest.mark.parametrize("kv_cache", ["fp16", "int8"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_reading_an_unwritten_place_of_another_cache_shows(family: str, kv_cache: str) -> None:
    """Of latent rows, and of states beside keys and values."""
    model = random_model("small", next(goldens(family)).config, CpuBackend(), kv_cache)
    session, vocab = Session(model, 1, 70), model.engine_config.vocab_size
    session.poison(session.fill_context(5))
    session.prepare_decode(5)
    check_results(session.decode(2), vocab, "here")
    session.poison(4)
    session.prepare_decode(5)
    with pytest.raises(BminfError, match="NaN"):
        check_results(session.decode(2), vocab, "here")


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_states_go_back_to_the_context_before_each_repetition(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt and of decoding, which begin a chunk of the state earlier than the repetition before has ended."""
    model = random_model("small", next(goldens(family)).config, CpuBackend())
    monkeypatch.setattr(Session, "tokens", lambda self, shape: np.full(shape, 7, np.int32))
    session = Session(model, 1, 3 * STATE_CHUNK)
    position = session.fill_context(STATE_CHUNK + 3)
    prompts = [session.prepare_prefill(STATE_CHUNK + 1, position)() for _ in range(2)]
    np.testing.assert_array_equal(*prompts)
    decoded = []
    for _ in range(2):
        session.prepare_decode(position)
        decoded.append(session.decode(STATE_CHUNK + 1))
    np.testing.assert_array_equal(*decoded)


def test_a_token_reads_the_experts_that_it_chooses() -> None:
    """Of a mixture, beside all other matrices; many tokens choose nearly all of them."""
    model = random_model("small", next(goldens("mixtral")).config, CpuBackend())
    costs = {}
    for tokens in (1, 64):
        counted = costs[tokens] = LinearCosts()
        with closing(Session(model, 1, tokens)) as session, trace_calls(model.ops, counted.add):
            session.prepare_prefill(tokens)()
    calls: list[OpCall] = []
    with closing(Session(model, 1, 1)) as session, trace_calls(model.ops, calls.append):
        session.prepare_prefill(1)()
    mixture = next(call.args[1] for call in calls if call.name == "experts")  # the last layer has one token's alone
    every = sum(int(weight.nbytes) for weight in (*mixture.hidden, *mixture.down))
    share = mixture.spec.top_k / mixture.spec.num_experts
    assert costs[64].nbytes - costs[1].nbytes == pytest.approx((1 - share) * every, rel=1e-6)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe"])
def test_the_experts_that_steps_chose_are_counted(model_type: str) -> None:
    """Of decode steps those spread over the timed ones, whose sequences differ; of a prompt its own."""
    model = random_model("small", next(goldens(model_type)).config, CpuBackend())
    costs = LinearCosts()
    with closing(Session(model, 3, 8)) as session:
        session.prepare_decode(session.fill_context(1))
        with trace_calls(model.ops, costs.add), recorded_choices(model.ops) as chosen:
            session.decode(1)
    assert model.ops.choices is None and len(chosen) == len(costs.mixtures) > 0
    spec, before = costs.mixtures[0].spec, costs.nbytes
    assert {ids.shape for ids in chosen} == {(3, spec.top_k)}
    alike = np.repeat(np.arange(spec.top_k)[None], 3, axis=0)
    costs.count([[alike] * len(chosen)])
    assert costs.experts == ExpertUse(spec.num_experts, spec.top_k, costs.mixtures[0].expected)
    assert not costs.experts.is_balanced
    every = sum(mixture.nbytes for mixture in costs.mixtures)
    left_out = (costs.mixtures[0].expected - spec.top_k) / spec.num_experts
    assert before - costs.nbytes == pytest.approx(left_out * every)

    tests = [Workload("pp", 40), Workload("tg", 12, depth=2, batch=3)]
    for measured in run_tests(model, Profiler(model.ops, ceiling_bytes=1 << 20), tests, 1):
        assert measured.experts is not None
        assert spec.top_k <= measured.experts.counted <= spec.num_experts == measured.experts.num_experts


@pytest.mark.parametrize("model_type", ["mixtral", "glm4_moe", "deepseek_v3", "minimax_m2", "lfm2_moe", "nemotron_h"])
def test_random_models_choose_their_experts_evenly(model_type: str) -> None:
    """Tokens that differ choose nearly as many experts as those that choose at random."""
    model, costs = random_model("small", next(goldens(model_type)).config, CpuBackend()), LinearCosts()
    with closing(Session(model, 8, 2)) as session:
        session.prepare_decode(session.fill_context(1))
        with trace_calls(model.ops, costs.add), recorded_choices(model.ops) as chosen:
            session.decode(1)
    costs.count([chosen])
    assert costs.experts is not None and costs.experts.counted >= 0.8 * costs.experts.expected


def test_a_trace_names_every_operation_in_order(bench_model: BenchModel, profiler: Profiler):
    trace = trace_step(bench_model, profiler, batch=2, depth=5)
    names = [span.name.split()[0] for span in trace.spans]
    layer = ["norm", "linear", "attention", "linear_add", "norm", "gated_linear", "linear_add"]
    assert names == ["embed", *layer, *layer, "last_tokens", "norm", "linear", "sample"]
    assert all(span.seconds > 0 and span.gap >= 0 for span in trace.spans)
    assert trace.alone > 0 and trace.step_seconds > 0
    attention = next(s for s in trace.spans if s.name.startswith("attention"))
    assert attention.nbytes > 2 * 2 * 6 * 2 * 16 * 4
    assert "embed" not in vars(bench_model.ops), "the backend is as it was"


def test_kernels_and_ceilings(profiler: Profiler, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plain, "WIDTHS", (64, 96))
    monkeypatch.setattr(plain, "MATRICES", ((48, 64),))
    monkeypatch.setattr(profiler, "kernels", lambda: plain.plain_cases(np, profiler.ops, elements=1000))
    times = time_kernels(profiler)
    ceilings = profiler.ceilings()
    assert min(ceilings.read, ceilings.copy, ceilings.int8) > 1e6
    assert {t.kernel for t in times} == {"softmax", "rms_norm", "quantize", "matvec", "product"}
    assert all(t.seconds > 0 and t.nbytes > 0 for t in times)
    assert all(bool(t.operations) == (t.kernel == "product") for t in times)


def test_the_plain_formulas_are_what_the_backend_computes():
    ops, random = Backend(np.float16), np.random.default_rng(0)
    x = random.standard_normal((5, 64), np.float32)
    gain, bias = np.full(64, 1.5, np.float32), np.full(64, 0.25, np.float32)
    np.testing.assert_allclose(plain.softmax(np, x), softmax(x), rtol=1e-6)
    np.testing.assert_allclose(plain.rms_norm(np, x, gain), normalise(x, Norm(gain, 1e-5)), atol=2e-3)
    layer = Norm(gain, 1e-5, bias, center=True)
    np.testing.assert_allclose(plain.layer_norm(np, x, gain, bias), normalise(x, layer), atol=4e-3)
    codes, scale = plain.quantize(np, x.astype(np.float16))
    expected, expected_scale = ops.quantize(x.astype(np.float16))
    assert (codes == expected).all()
    np.testing.assert_allclose(scale[:, 0], expected_scale, rtol=1e-6)
    weight = Int8Weight(random.integers(-127, 128, (7, 64), np.int8), np.full(7, 0.01, np.float32))
    exact = x[:1].astype(np.float16).astype(np.float64) @ weight.dequantize().T.astype(np.float64)
    np.testing.assert_allclose(plain.gemv(np, x[:1].astype(np.float16), weight.codes, weight.scale), exact, atol=2e-2)


def test_random_weights_are_those_of_a_recipe() -> None:
    """Rotated where the recipe says so, with a name that says which; a float matrix is refused."""
    spec = describe_model(SHAPE).spec
    down, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("down", "up"))
    weights = RandomWeights(spec, load_recipe("w8a8-rotate"))
    found = [weights.weight(name) for name in (down, up)]
    assert [w.rotation for w in found if isinstance(w, Int8Weight)] == [32, 1]
    weight = RandomWeights(spec, load_recipe("w8a16")).weight(down)
    assert isinstance(weight, Int8Weight) and not weight.dynamic
    assert random_model("small", SHAPE, CpuBackend(), recipe="w8a8-rotate").name == "small, w8a8-rotate"
    with pytest.raises(UsageError, match=r"leaves lm_head.weight float; random weights are int8"):
        random_model("small", SHAPE, CpuBackend(), recipe=Recipe("mine", Scheme.W8A8, Scheme.FLOAT))
