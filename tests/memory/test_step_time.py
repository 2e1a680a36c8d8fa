"""What a plan predicts for a decode step beside what was measured on an H200 and on an H100."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.backend.cache_values import AllTokens
from bminf_lite.memory.cache_memory import CacheGroup
from bminf_lite.memory.planner import Machine, plan_memory
from bminf_lite.memory.step_time import StepWork, tiled_rows
from bminf_lite.placement import requirements_of

ROOT = Path(__file__).parents[2]
MARK, MARK_OF_MIXTURES = 0.08, 0.15
GPUS = {
    "NVIDIA H200": Machine(139 << 30, link=55e9, bandwidth=4.38e12),
    "NVIDIA H100 80GB HBM3": Machine(78 << 30, link=55e9, bandwidth=3.07e12),
}
H200 = GPUS["NVIDIA H200"]


def predicted(
    shape: str,
    context: int,
    batch: int = 1,
    kv_cache: str = "fp16",
    machine: Machine = H200,
    room: int | None = None,
) -> float:
    """Tokens per second of all sequences that a plan predicts behind ``context`` tokens, with room for ``room``."""
    requirements = requirements_of(ROOT / "configs" / f"{shape}.json", kv_cache=kv_cache)
    requirements = replace(requirements, context_length=max(requirements.context_length, context))
    plan = replace(plan_memory(requirements, machine, room or context, batch), context=context)
    assert plan.tokens_per_second is not None
    return plan.tokens_per_second


def decoding_results() -> list[tuple[str, str, float]]:
    """The GPU, the command of ``bench`` and tokens per second of all committed results of decoding on ``GPUS``."""
    found = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        results = json.loads(path.read_text())
        if (gpu := results.get("gpu")) in GPUS:
            for row in results["rows"]:
                speed = re.match(r"([\d,.]+) tokens/s", row.get("value", ""))
                if speed and row.get("command", "").startswith("bminf-lite bench"):
                    found.append((gpu, row["command"], float(speed[1].replace(",", ""))))
    return found


RESULTS = decoding_results()


@pytest.mark.parametrize(("gpu", "command", "speed"), RESULTS, ids=[f"{gpu} {command}" for gpu, command, _ in RESULTS])
def test_a_plan_meets_committed_results(gpu: str, command: str, speed: float) -> None:
    options = dict(re.findall(r"--?([\w-]+) (\S+)", command))
    depth, batch = int(options.get("d", 0)), int(options.get("b", 1))
    machine, room, kv_cache = GPUS[gpu], None, options.get("kv-cache", "fp16")
    if limit := options.get("memory-limit"):
        machine, room = replace(machine, memory=int(limit.removesuffix("GiB")) << 30), 8192
    tokens_per_second = predicted(options["shape"], max(depth, 1), batch, kv_cache, machine, room)
    has_experts = bool(requirements_of(ROOT / "configs" / f"{options['shape']}.json").decode.experts)
    assert tokens_per_second == pytest.approx(speed, rel=MARK_OF_MIXTURES if has_experts else MARK)


def test_results_are_found() -> None:
    assert all(sum(gpu == name for name, *_ in RESULTS) >= 10 for gpu in GPUS)


@pytest.mark.parametrize(
    ("shape", "context", "batch", "kv_cache", "milliseconds"),
    [
        ("llama-3-8b", 128, 1, "fp16", 2.055),
        ("llama-3-8b", 2048, 1, "fp16", 2.118),
        ("llama-3-8b", 8192, 1, "fp16", 2.395),
        ("llama-3-8b", 32768, 1, "fp16", 3.124),
        ("llama-3-8b", 512, 1, "int8", 2.078),
        ("llama-3-8b", 8192, 1, "int8", 2.316),
        ("llama-3-8b", 32768, 1, "int8", 2.830),
        ("llama-3-8b", 512, 2, "fp16", 2.077),
        ("llama-3-8b", 512, 4, "fp16", 2.121),
        ("llama-3-8b", 512, 8, "fp16", 2.198),
        ("llama-3-8b", 512, 32, "fp16", 2.752),
        ("llama-3-8b", 512, 40, "fp16", 3.064),
        ("llama-3-8b", 512, 48, "fp16", 3.207),
        ("llama-3.2-1b", 512, 1, "fp16", 0.412),
        ("llama-3.2-1b", 2048, 1, "fp16", 0.458),
        ("gpt2-xl", 512, 1, "fp16", 0.890),
        ("opt-6.7b", 512, 1, "fp16", 1.918),
        ("gemma-3-27b", 512, 1, "fp16", 7.479),
        ("phi-2", 512, 1, "fp16", 1.075),
        ("phi-3-mini", 512, 1, "fp16", 1.275),
        ("phi-4", 512, 1, "fp16", 3.852),
        ("olmo-2-32b", 512, 1, "fp16", 8.576),
    ],
)
def test_a_plan_meets_measurements(shape: str, context: int, batch: int, kv_cache: str, milliseconds: float) -> None:
    """Decode steps of an H200: docs/dev/measurements.md, "Steps that predictions are held to"."""
    assert 1e3 * batch / predicted(shape, context, batch, kv_cache) == pytest.approx(milliseconds, rel=MARK)


@given(
    st.builds(StepWork, st.integers(1, 1 << 40), st.integers(1, 1000), st.integers(0, 500), st.integers(1, 1 << 22)),
    st.integers(1, 1 << 17),
    st.integers(1, 2000),
    st.sampled_from([(128 << 10, 128 << 10), (64 << 10, 64 << 10, 1024, 1024)]),
)
def test_more_work_takes_longer_and_more_sequences_are_faster_together(
    work: StepWork, context: int, batch: int, blocks: tuple[int, ...]
) -> None:
    cache = [CacheGroup.of([blocks] * 2, AllTokens(), len(blocks) > 2)]

    def seconds(context: int, batch: int) -> float:
        return work.seconds(cache, context, batch, 4e12)

    assert seconds(context + 64, batch) >= seconds(context, batch) > 0
    assert seconds(context, batch + 1) > seconds(context, batch)
    assert seconds(context, 2 * batch) < 2 * seconds(context, batch)


def test_rows_are_computed_in_tiles() -> None:
    assert [tiled_rows(rows) for rows in (1, 8, 9, 33, 48, 64, 65, 1000)] == [8, 8, 16, 48, 48, 64, 65, 1000]


@pytest.mark.parametrize("shape", ["falcon-7b", "phi-2", "pythia-6.9b"])
def test_a_norm_that_two_products_share_counts_twice(shape: str) -> None:
    """A LayerNorm has two vectors. Pythia has two LayerNorms in each of 32 layers, the others one."""
    assert requirements_of(ROOT / "configs" / f"{shape}.json").decode.norm_vectors == 32 * 2 * 2


def test_an_encoder_decoder_reads_no_weights_of_its_sources_in_a_step() -> None:
    """CPM-2: a layer that decodes has 7 products, one of keys and values of sources, and two attentions."""
    requirements = requirements_of(ROOT / "configs" / "cpm-2.json")
    work, head = requirements.decode, 26240 * 4096
    assert (work.launches, work.norm_vectors) == (24 * 8, 24 * 3)
    sources = 24 * 2 * 4096 * 4096
    assert sum(requirements.layers) + head - sources == pytest.approx(work.matrix_bytes, rel=0.01)
