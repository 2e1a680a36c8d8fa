"""``bminf-lite plan`` on shapes and on checkpoints, without a GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_kit import run as command

CONFIGS = Path(__file__).parents[2] / "configs"
MANY_EXPERTS = (
    "deepseek-v3", "dots-llm1", "glm-4.5-air", "hunyuan-3-295b-a21b", "k-exaone-236b-a23b",
    "minimax-m2", "mistral-small-4", "qwen3-next-80b-a3b", "solar-open-100b",
)  # fmt: skip
"""Mixtures whose tensors take a second to list, as those of Kimi K2 do."""
MACHINE = ("--gpu-memory", "24GiB", "--link", "25", "--bandwidth", "900")


def run(*arguments: object) -> Any:
    return command("plan", *arguments)


def facts(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in MANY_EXPERTS else [])
        for path in sorted(CONFIGS.glob("*.json"))
    ],
)
def test_every_shape_can_be_planned(path: Path) -> None:
    """A layer of Kimi K2 takes 15.9 GiB, and two slots are needed to stream its layers."""
    found = facts(path, *MACHINE, "--gpu-memory", "40GiB")
    assert found["total_bytes"] <= found["memory"]
    assert found["tokens_per_second"] > 0


def test_the_8b_shape_for_people() -> None:
    result = run(CONFIGS / "llama-3-8b.json", *MACHINE, "--memory-limit", "6GiB")
    assert result.exit_code == 0, result.stderr
    for text in ("32 layers, weights 8.0 GiB", "6.0 GiB may be used, link 25 GB/s", "of 32 layers", "slots 416.0 MiB",
                 "of 1,024 tokens", "tokens/s predicted, bound by the link", "would hold everything"):  # fmt: skip
        assert text in result.stdout


def test_int8_weights_are_about_a_byte_each() -> None:
    """8.03e9 parameters of the 8B shape, of which the embedding takes two bytes each."""
    found = facts(CONFIGS / "llama-3-8b.json", *MACHINE)
    assert found["weight_bytes"] == pytest.approx(8.03e9 + 128256 * 4096, rel=0.01)
    wide = facts(CONFIGS / "llama-3-8b.json", *MACHINE, "--recipe", "w8a16")
    assert wide["weight_bytes"] == pytest.approx(found["weight_bytes"], rel=0.001)


def test_a_mixture_s_plan_says_what_a_step_reads_of_its_experts() -> None:
    """Of Qwen3-30B-A3B a token reads 8 of 128 experts, beside attention, router (fp32) and head of each layer."""
    model, ample = CONFIGS / "qwen3-30b-a3b.json", ("--gpu-memory", "80GiB", "--link", "25", "--bandwidth", "900")
    expert, beside = 3 * 2048 * 768, 2 * 2048 * (4096 + 512) + 4 * 128 * 2048
    found = facts(model, *ample, "--context", "1000")
    assert [(e["num_experts"], e["top_k"]) for e in found["experts"]] == [(128, 8)] * 48
    assert sum(e["bytes"] for e in found["experts"]) == pytest.approx(48 * 128 * expert, rel=0.01)
    assert found["weight_bytes_per_step"] == pytest.approx(48 * (8 * expert + beside) + 151936 * 2048, rel=0.01)
    # of 16 sequences that choose at random, 1 - (1 - 8 / 128) ** 16 = 64 % of the experts
    many = facts(model, *ample, "--context", "1000", "--batch", "16")["weight_bytes_per_step"]
    assert many == pytest.approx(48 * (0.644 * 128 * expert + beside) + 151936 * 2048, rel=0.01)
    text = run(model, *ample).stdout
    assert "48 layers of 128 experts, 27.1 GiB, of which a token chooses 8; a step of 1 sequence reads 2.9 GiB" in text
    assert "experts" not in run(CONFIGS / "llama-3-8b.json", *MACHINE).stdout


def test_an_int8_cache_takes_half() -> None:
    plain, small = (
        facts(CONFIGS / "llama-3-8b.json", *MACHINE, "--kv-cache", kind)["cache_bytes_per_token"]
        for kind in ("fp16", "int8")
    )
    assert plain == 2 * 32 * 8 * 128 * 2
    assert small == 2 * 32 * 8 * (128 + 2)


def test_a_draft_model_is_in_the_plan() -> None:
    """1.24e9 parameters of the 1B shape, whose tied embedding takes 3 bytes each, and its keys and values."""
    model, draft = CONFIGS / "llama-3-8b.json", CONFIGS / "llama-3.2-1b.json"
    plain, both = facts(model, *MACHINE), facts(model, *MACHINE, "--speculative", json.dumps({"model": str(draft)}))
    assert both["resident_bytes"] - plain["resident_bytes"] == pytest.approx(1.24e9 + 128256 * 2048 * 2, rel=0.1)
    assert both["cache_bytes_per_token"] - plain["cache_bytes_per_token"] == 2 * 16 * 8 * 64 * 2
    assert facts(model, *MACHINE, "--speculative", "ngram")["total_bytes"] == plain["total_bytes"]


def test_shorter_sequences_fit_more_often() -> None:
    found = facts(CONFIGS / "llama-3-8b.json", *MACHINE, "--context", "8192")["sequences_at_once"]
    assert list(found) == ["8192", "1024"] and 4 * found["8192"] < found["1024"] < 9 * found["8192"]


def test_a_checkpoint_as_it_is_and_migrated(source: Path, int8: Path) -> None:
    as_stored = facts(source, *MACHINE)["weight_bytes"]
    as_if, migrated = facts(source, *MACHINE, "--recipe", "w8a8"), facts(int8, *MACHINE)
    assert as_if == migrated
    assert migrated["weight_bytes"] < as_stored


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e300", "fast"])
@pytest.mark.parametrize("option", ["--link", "--bandwidth"])
def test_a_speed_is_positive_and_finite(option: str, value: str) -> None:
    result = run(CONFIGS / "llama-3-8b.json", *MACHINE, option, value)
    assert result.exit_code == 2 and f"'{value}' is not a speed" in result.stderr


@pytest.mark.parametrize(
    ("limit", "code", "message"),
    [("2GiB", 1, "raise the memory limit to"), ("80GiB", 2, "80.0 GiB, but the GPU has 24.0 GiB")],
)
def test_a_limit_that_is_too_small_or_too_large(limit: str, code: int, message: str) -> None:
    result = run(CONFIGS / "llama-3-70b.json", *MACHINE, "--memory-limit", limit)
    assert result.exit_code == code and message in result.stderr


def test_speeds_that_are_not_given_are_not_made_up() -> None:
    result = run(CONFIGS / "llama-3-8b.json", "--gpu-memory", "24GiB", "--link", "25")
    assert "not known: give --bandwidth" in result.stdout


def test_the_host_of_another_machine_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bminf_lite.memory.machine.available_memory", lambda: 1 << 30)
    result = run(CONFIGS / "llama-3-70b.json", *MACHINE)
    assert "which each step copies" in result.stdout and "the host has" not in result.stdout


@pytest.mark.parametrize("memory", ["2GiB", "600MiB", "1MiB"])
def test_the_advice_for_too_little_memory_works(memory: str) -> None:
    """It counts what CUDA and its libraries take, so the next plan fits, also where they alone need more."""
    shape = CONFIGS / "llama-3-70b.json"
    result = run(shape, "--gpu-memory", memory, "--link", "25")
    assert result.exit_code == 1
    (advice,) = re.findall(r"take a GPU with (\d+MiB)", result.stderr)
    assert run(shape, "--gpu-memory", advice, "--link", "25").exit_code == 0
    result = run(shape, *MACHINE, "--memory-limit", "2GiB")
    (advice,) = re.findall(r"raise the memory limit to (\d+MiB)", result.stderr)
    assert run(shape, *MACHINE, "--memory-limit", advice).exit_code == 0


def test_the_memory_that_would_hold_everything_does() -> None:
    shape = CONFIGS / "llama-3-8b.json"
    (enough,) = re.findall(
        r"([\d.]+) GiB of GPU memory would hold", run(shape, "--gpu-memory", "4GiB", "--link", "25").stdout
    )
    arguments = ("--gpu-memory", f"{float(enough) + 0.1}GiB", "--link", "25", "--context", "1024", "--json")
    assert json.loads(run(shape, *arguments).stdout)["streamed"] == []


def test_room_for_adapters_is_counted() -> None:
    """Both factors of rank 16 of every matrix, in fp16, for each slot; a step reads none of it."""
    model, room = CONFIGS / "llama-3-8b.json", ("--max-adapters", "8")
    plain, eight = facts(model, *MACHINE), facts(model, *MACHINE, *room)
    wide = facts(model, *MACHINE, *room, "--max-adapter-rank", "64")
    inner, features, keys, vocab = 14336, 4096, 1024, 128256
    sizes = 4 * features + 2 * (features + keys) + 3 * (features + inner)  # inputs and outputs of a layer's matrices
    assert plain["adapter_bytes"] == 0
    assert eight["adapter_bytes"] == pytest.approx(8 * 2 * 16 * (32 * sizes + features + vocab), rel=0.01)
    assert eight["adapter_bytes"] == eight["weight_bytes"] - plain["weight_bytes"]
    result = run(model, *MACHINE, "--max-adapter-rank", "64")
    assert result.exit_code == 2 and "give --max-adapters too" in result.stderr
    assert wide["adapter_bytes"] == pytest.approx(4 * eight["adapter_bytes"], rel=0.01)
    assert eight["weight_bytes_per_step"] == plain["weight_bytes_per_step"]
    assert "adapters     slots of " in run(model, *MACHINE, *room).stdout
