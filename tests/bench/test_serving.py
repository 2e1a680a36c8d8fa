"""Loads of requests: what every one of them has, and that the reported times are of these requests."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_kit import run
from model_kit import WatchedBackend, make_model

import bminf_lite
from bminf_lite.api import Model
from bminf_lite.bench import serving
from bminf_lite.bench.serving import Load, ServingResult, random_prompts, run_load, warm_up
from bminf_lite.engine.config import EngineConfig
from bminf_lite.engine.request import Request
from bminf_lite.errors import UsageError

DEMO = Path(bminf_lite.__file__).parent / "demo_model"
SMALL = {
    "model_type": "llama",
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("rate", [None, 2000.0], ids=["offline", "online"])
@pytest.mark.parametrize("output", [1, 7])
def test_every_request_has_exactly_its_tokens(rate: float | None, output: int) -> None:
    """Also where each token would end it, and nothing comes from the cache."""
    load = Load(9, 70, output, rate)
    seen: list[Request] = []
    with make_model(WatchedBackend(1, (4,)), eos_ids=frozenset(range(61)), max_batch=4) as model:
        warm_up(model, load)
        before, submit = model.stats(), model.engine.submit
        model.engine.submit = lambda requests: (seen.extend(requests), submit(requests))[1]
        result = run_load(model, load)
        after = model.stats()
    assert [len(r.prompt_token_ids) for r in seen] == [70] * 9
    assert [(len(r.output_token_ids), r.finish_reason) for r in seen] == [(output, "length")] * 9
    assert after.prompt_tokens - before.prompt_tokens == 9 * 70
    assert len(result.first_token) == 9 and 0 < result.first_token.min() <= result.first_token.max() < result.seconds
    assert len(result.between_tokens) == (9 * (output > 1) if rate is None else 9 * (output - 1))
    assert result.output_rate == pytest.approx(9 * output / result.seconds)
    assert result.total_rate == pytest.approx(9 * (output + 70) / result.seconds)
    assert ("time between tokens" in result.markdown()) == (output > 1)


def test_all_requests_of_an_offline_load_are_there_at_once() -> None:
    waiting: list[int] = []
    ops = WatchedBackend()
    with make_model(ops, max_batch=2) as model:
        ops.interrupt = lambda: waiting.append(model.stats().waiting)
        run_load(model, Load(8, 5, 3))
    assert waiting[0] == 8 - 2


def test_prompts_are_the_same_every_time_and_share_no_prefix() -> None:
    with make_model() as model:
        prompts = random_prompts(model, Load(20, 12, 3))
        assert prompts == random_prompts(model, Load(20, 12, 9)) and len({tuple(p[:6]) for p in prompts}) == 20
        with pytest.raises(UsageError, match=r"90 \+ 7 tokens, but the model's context is 96"):
            random_prompts(model, Load(1, 90, 7))


def test_percentiles_are_milliseconds() -> None:
    result = ServingResult(Load(3, 1, 2), 2.0, np.array([0.1, 0.2, 0.3]), np.array([0.01, 0.02, 0.03]))
    found = result.to_dict()
    assert found["first_token_p50_ms"] == pytest.approx(200) and found["between_tokens_p99_ms"] == pytest.approx(29.8)
    assert "median 200.0 ms, p99 298.0 ms" in result.markdown()


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    return tmp_path / "small.json"


def bench(shape: Path, *arguments: object) -> Any:
    return run("bench", "--device", "cpu", "--shape", shape, "--input", 6, "--output", 4, *arguments)


def test_the_command_prints_every_format(shape: Path) -> None:
    offline = bench(shape, "--offline", 3)
    assert offline.exit_code == 0, offline.stderr
    assert "| 3 requests of 6 / 4 tokens |" in offline.stdout and "time to first token" in offline.stdout
    data = json.loads(bench(shape, "--online", 500, "--requests", 5, "-o", "json").stdout)
    assert (data["model"], data["requests"], data["rate"]) == ("small", 5, 500.0)
    (row,) = csv.DictReader(io.StringIO(bench(shape, "--offline", 3, "-o", "csv").stdout))
    assert float(row["output_tokens_per_second"]) > 0 and float(row["between_tokens_p99_ms"]) > 0


def test_more_requests_may_wait_than_a_caller_s(shape: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[int] = []

    def count(model: Model, load: Load) -> ServingResult:
        bounds.append(model.engine_config.max_queue)
        return ServingResult(load, 1.0, np.ones(1), np.ones(1))

    monkeypatch.setattr(serving, "warm_up", lambda model, load: None)
    monkeypatch.setattr(serving, "run_load", count)
    for requests in (3, 70_000):
        assert bench(shape, "--offline", requests).exit_code == 0
    assert bounds == [EngineConfig.max_queue, 70_000]


def test_a_load_with_drafts(shape: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []

    def count(model: Model, load: Load) -> ServingResult:
        numbers.append(model.engine_config.num_draft_tokens)
        return ServingResult(load, 1.0, np.ones(1), np.ones(1))

    monkeypatch.setattr(serving, "warm_up", lambda model, load: None)
    monkeypatch.setattr(serving, "run_load", count)
    load = ("--offline", 3, "--speculative", '{"method": "ngram", "num_speculative_tokens": 5}')
    assert bench(shape, *load).exit_code == 0
    assert run("bench", "--device", "cpu", DEMO, *load).exit_code == 0
    assert numbers == [5, 5]


@pytest.mark.slow
def test_a_drawing(shape: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    result = bench(shape, "--online", 500, "--requests", 4, "--plot", tmp_path / "times.png")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--offline", 3, "--online", 5), "either --offline or --online"),
        (("--online", 0), "more than 0"),
        (("--online", "nan"), "more than 0"),
        (("--online", "inf"), "more than 0"),
        (("--offline", 3, "--requests", 4), "--requests is for --online"),
        (("--requests", 4), "--requests is for --online"),
        (("--max-batch", 4), "--max-batch is for --offline and --online"),
        (("--offline", 3, "--trace"), "--trace is not for --offline and --online"),
        (("--speculative", "ngram"), "--speculative is for --offline and --online"),
        (("--offline", 3, "--speculative", "{}"), "method is missing"),
        (("--offline", 3, "--speculative", '{"model": "x"}'), "needs MODEL"),
        (("--offline", 3, "--kernels"), "--kernels is not for --offline and --online"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(shape: Path, arguments: tuple[object, ...], words: str) -> None:
    result = bench(shape, *arguments)
    assert result.exit_code == 2 and words in " ".join(result.stderr.split())
