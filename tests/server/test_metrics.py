"""Metrics: vLLM's names, and sums over processes."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from bminf_lite.engine.core import EngineStats
from bminf_lite.server.engine_server import add_observations
from bminf_lite.server.metrics import FINISHED_REASONS, Observations, render, token_bounds
from bminf_lite.server.request_record import Observer

STATS = EngineStats(
    waiting=2, running=3, blocks_used=10, blocks_cached=20, blocks_free=10, steps=7, preemptions=1, prompt_tokens=100,
    cached_tokens=40, drafts=5, draft_tokens=15, accepted_tokens=6, accepted_per_position=(4, 2, 0),
)  # fmt: skip


def scraped(observations: Observations, values: list[float]) -> dict[str, float]:
    """Sample -> value, with the labels that all share left out."""
    text = render('a "model"', STATS, observations, values).decode()
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == ('a "model"', "0")
            samples[sample.name + "".join(f"{{{k}={v}}}" for k, v in labels.items())] = sample.value
    return samples


def test_the_engine_state_has_the_names_of_vllm() -> None:
    samples = scraped(Observations(128), [])
    assert samples["vllm:num_requests_running"] == 3 and samples["vllm:num_requests_waiting"] == 2
    assert samples["vllm:kv_cache_usage_perc"] == 0.25
    assert samples["vllm:prefix_cache_queries_total"] == 100 and samples["vllm:prefix_cache_hits_total"] == 40
    assert samples["vllm:num_preemptions_total"] == 1 and samples["vllm:prompt_tokens_total"] == 100
    assert samples["vllm:spec_decode_num_drafts_total"] == 5
    assert samples["vllm:spec_decode_num_draft_tokens_total"] == 15
    assert samples["vllm:spec_decode_num_accepted_tokens_total"] == 6
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [samples[f"{name}{{position={i}}}"] for i in range(3)] == [4, 2, 0]
    assert all(samples[f"vllm:request_success_total{{finished_reason={reason}}}"] == 0 for reason in FINISHED_REASONS)


def test_a_request_is_counted_once_with_each_of_its_times() -> None:
    async def serve() -> tuple[list[list[float]], Observer]:
        sent: list[list[float]] = []
        observer = Observer(128, sent.append)
        record = observer.begin("/v1/completions", "cmpl-1", "m")
        record.add_prompt(12, n=2, max_tokens=9)
        first, second = 0, 1
        record.tokens(first, 1, cached_tokens=4)
        record.tokens(first, 3)
        record.finished(first, "stop")
        record.finished(first, "context")
        record.tokens(second, 2)
        record.end(200)
        record.end(500)
        assert sent == [], "counts are sent a little later, in one message"
        observer.close()
        return sent, observer

    sent, observer = asyncio.run(serve())
    assert len(sent) == 1 and not any(observer.observations.values)
    samples = scraped(observer.observations, sent[0])
    assert samples["vllm:generation_tokens_total"] == 6
    assert samples["vllm:request_success_total{finished_reason=length}"] == 1
    assert samples["vllm:request_success_total{finished_reason=abort}"] == 1
    assert samples["vllm:inter_token_latency_seconds_count"] == 3, "a chunk of three tokens is three intervals"
    assert samples["vllm:request_prompt_tokens_sum"] == 24 and samples["vllm:request_generation_tokens_sum"] == 6
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_time_per_output_token"):
        assert samples[f"vllm:{name}_seconds_count"] == 2
    assert samples["vllm:request_params_n_bucket{le=2.0}"] == 1 and samples["vllm:request_params_n_bucket{le=1.0}"] == 0


@settings(max_examples=20)
@given(st.lists(st.lists(st.floats(0, 10_000), max_size=8), max_size=4))
def test_processes_add_up(processes: list[list[float]]) -> None:
    """Totals are those of one process that has seen everything, and a bucket holds the values up to its bound."""
    totals: list[float] = []
    alone = Observations(1000)
    for latencies in processes:
        own = Observations(1000)
        for latency in latencies:
            own.e2e_latency.observe(own.values, latency)
            alone.e2e_latency.observe(alone.values, latency)
        totals = add_observations(totals, own.take())
    samples = scraped(alone, totals)
    assert samples == pytest.approx(scraped(alone, alone.values))
    everything = [value for latencies in processes for value in latencies]
    for name, count in samples.items():
        if bound := re.fullmatch(r"vllm:e2e_request_latency_seconds_bucket{le=(.*)}", name):
            assert count == sum(value <= float(bound[1]) for value in everything)


def test_token_bounds_reach_the_context() -> None:
    assert token_bounds(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_bounds(4096)[-1] == 2000 and token_bounds(1) == (1,)


@pytest.mark.parametrize("file", ["docs/serving.md", "examples/serving/grafana.json"])
def test_what_documents_and_the_dashboard_name_is_there(file: str) -> None:
    text = (Path(__file__).parents[2] / file).read_text(encoding="utf-8")
    named = set(re.findall(r"vllm:\w+", text))
    rendered = render("m", STATS, Observations(128), []).decode()
    found = {sample.name for family in text_string_to_metric_families(rendered) for sample in family.samples}
    families = {name.removesuffix("_bucket") for name in found}
    assert len(named) > 10 and named <= found | families
