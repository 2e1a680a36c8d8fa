"""Regular expressions in a configuration: as ``re`` matches them, and in bounded time."""

from __future__ import annotations

import re
import time

import pytest

from bminf_lite.checkpoint import name_patterns
from bminf_lite.checkpoint.compressed_tensors import parse_quantization, quantization_config
from bminf_lite.checkpoint.name_patterns import NameMatcher, Targets, pattern_problems
from bminf_lite.checkpoint.recipe import Scheme
from bminf_lite.errors import CheckpointError

NAMES = ["lm_head", "model.layers.0.mlp.down_proj", "model.layers.11.self_attn.q_proj", "model.visual.0.proj", ""]
PATTERNS = [
    ".*lm_head",
    r".*layers\.(0|1)\..*",
    "model",
    "down_proj",
    ".*down_proj$",
    r"(?!.*visual).*proj",
    r"^lm_head$",
    "(?i).*MLP",
    r".*\.(\d)\1\.",
    "",
    "(?<!x)model.*",
    "[^.]*$",
    ".*é",
]
CATASTROPHIC = ["(a+)+$", ".*.*.*.*.*.*.*.*.*x", "(a?){60}a{60}$", "(.*)*\\1$"]
MORE = ["(.*.*)*x", "(a|a)*$", "(a|aa)+$", "((a*)*)*$", "(?=(a+)+$)b", "([a-z]+)*\\d", "(x+x+)+y|(a+a+)+b"]
LONG = "a" * 60


@pytest.mark.parametrize("pattern", PATTERNS)
def test_names_match_as_in_other_readers(pattern: str) -> None:
    targets = Targets([f"re:{pattern}", "exact.name"])
    matcher = NameMatcher(targets.patterns)
    for name in NAMES:
        assert matcher.matches(targets, name) == (re.match(pattern, name) is not None)
    assert matcher.matches(targets, "exact.name")


def test_names_alone_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_patterns, "WorkerProcess", None)
    matcher = NameMatcher()
    targets = Targets(["lm_head", "Linear"])
    assert [matcher.matches(targets, name) for name in ("lm_head", "x")] == [True, False]


def test_a_name_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = NameMatcher._ask
    monkeypatch.setattr(NameMatcher, "_ask", lambda self, name: asked.append(name) or original(self, name))
    one, other = Targets(["re:model.*"]), Targets(["re:.*proj"])
    matcher = NameMatcher([*one.patterns, *other.patterns])
    for _ in range(3):
        assert [matcher.matches(t, name) for t in (one, other) for name in NAMES[:2]] == [False, True, False, True]
    assert asked == NAMES[:2]


@pytest.mark.parametrize("pattern", [*CATASTROPHIC, *(pytest.param(p, marks=pytest.mark.slow) for p in MORE)])
def test_a_pattern_that_takes_for_ever_is_named(monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    monkeypatch.setattr(name_patterns, "SECONDS", 0.3)
    start = time.perf_counter()
    targets = Targets(["re:.*ok", f"re:{pattern}"])
    matcher = NameMatcher(targets.patterns, "folder/config.json")
    try:
        matcher.matches(targets, LONG)
    except CheckpointError as error:
        expected = f"folder/config.json: quantization_config: the pattern {'re:' + pattern!r} takes longer than 0.3 s"
        assert str(error).startswith(expected)
        assert str(error).endswith("list the names of layers instead")
    assert time.perf_counter() - start < 10  # two processes start, and are killed after 0.3 s each


def test_the_time_of_all_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that takes a little less than may be for each of many layers."""
    monkeypatch.setattr(name_patterns, "TOTAL_SECONDS", 0.01)
    targets = Targets(["re:.*down_proj"])
    matcher = NameMatcher(targets.patterns, "config.json")
    with pytest.raises(CheckpointError, match=r"its patterns take longer than 0.01 s to match"):
        for i in range(100_000):
            matcher.matches(targets, f"model.layers.{i}")


def test_patterns_are_bounded() -> None:
    assert pattern_problems(["lm_head", "re:.*"]) == []
    assert "is not a regular expression" in pattern_problems(["re:("])[0]
    assert pattern_problems(["re:" + "a" * 1000]) == ["has a pattern of 1,003 characters, and 1,000 are allowed"]
    assert pattern_problems([f"re:{i}" for i in range(1001)]) == ["has 1,001 patterns, and 1,000 are allowed"]
    assert pattern_problems([f"{i}" for i in range(100_000)]) == []


@pytest.mark.parametrize("where", ["ignore", "targets", "transform targets", "transform ignore"])
def test_every_place_for_targets_is_bounded(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(name_patterns, "SECONDS", 0.3)
    config = quantization_config({LONG: Scheme.W8A8, "x": Scheme.FLOAT}, rotations={LONG: 64})
    applied = config["transform_config"]["config_groups"]["R4_64"]["apply"][0]
    evil = ["re:(a+)+$x"]
    place = {
        "ignore": (config, "ignore"),
        "targets": (config["config_groups"]["group_0"], "targets"),
        "transform targets": (applied, "targets"),
        "transform ignore": (applied, "ignore"),
    }[where]
    place[0][place[1]] = evil
    parsed = parse_quantization({"quantization_config": config}, "config.json")
    assert parsed is not None
    with pytest.raises(CheckpointError, match="takes longer than"):
        parsed.group_of(LONG)
        parsed.rotation_of(LONG)


def test_many_targets_take_little_time() -> None:
    """A million names, and a thousand layers that are looked up."""
    config = quantization_config({"a": Scheme.W8A8})
    config["ignore"] = [f"layer.{i}" for i in range(1_000_000)]
    parsed = parse_quantization({"quantization_config": config}, "config.json")
    assert parsed is not None
    start = time.process_time()
    found = [parsed.group_of(f"layer.{i}") is None for i in range(0, 2_000_000, 2_000)]
    assert found == [i < 500 for i in range(1000)]
    assert time.process_time() - start < 1


def test_many_groups_are_refused() -> None:
    config = quantization_config({"a": Scheme.W8A8})
    config["config_groups"] = {f"group_{i}": config["config_groups"]["group_0"] for i in range(1001)}
    with pytest.raises(CheckpointError, match="config_groups has 1,001 groups; 1,000 can be read"):
        parse_quantization({"quantization_config": config}, "config.json")
