"""The options of ``speculative``: what a caller may write, and what is refused with every problem."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from bminf_lite.engine.speculative import DEFAULT_TOKENS, MAX_DRAFT_TOKENS, SpeculativeConfig
from bminf_lite.errors import UsageError


@pytest.mark.parametrize("value", [None, "none"])
def test_no_drafts(value: Any) -> None:
    assert SpeculativeConfig.from_value(value) is None


@pytest.mark.parametrize(
    "value", ["ngram", {"method": "ngram"}, '{"method": "ngram"}', ' {"method":"ngram"}', SpeculativeConfig("ngram")]
)
def test_a_method_a_mapping_json_or_an_instance(value: Any) -> None:
    assert SpeculativeConfig.from_value(value) == SpeculativeConfig("ngram")


def test_a_model_without_a_method_is_a_draft_model() -> None:
    found = SpeculativeConfig.from_value({"model": Path("small")})
    assert found is not None
    assert (found.method, found.num_draft_tokens) == ("draft_model", DEFAULT_TOKENS["draft_model"])


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, (4, 3, 2)),
        ({"prompt_lookup_max": 5}, (5, 4, 3, 2)),
        ({"prompt_lookup_max": 1}, (1,)),
        ({"prompt_lookup_min": 6}, (6,)),
        ({"prompt_lookup_min": 4}, (4,)),
        ({"prompt_lookup_max": 3, "prompt_lookup_min": 1}, (3, 2, 1)),
    ],
)
def test_the_lengths_of_ngrams(options: dict[str, int], sizes: tuple[int, ...]) -> None:
    assert SpeculativeConfig("ngram", **options).ngram_sizes == sizes  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, r"speculative is 7, but must be auto, none, a method \(ngram, .*\), or a mapping"),
        (True, "speculative is True"),
        ("medusa", "method is 'medusa', but must be one of ngram, "),
        ("{", "not JSON"),
        ("[" * 100_000, "method is"),
        ('{"a":' * 100_000, "not JSON"),
        ({}, "method is missing: give one of ngram, "),
        ({"methods": "ngram", "k": 3}, r"has no option 'methods', 'k'; its options are method, num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0, but must be a whole number"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({"method": "ngram", "num_speculative_tokens": MAX_DRAFT_TOKENS + 1}, "1 to 16"),
        ({"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}, "prompt_lookup_min is 3, more than"),
        ({"method": "ngram", "model": "small"}, "the method ngram has no model"),
        ({"method": "draft_model"}, "the method draft_model needs a model"),
        ({"model": 5}, "model is 5, but must be the path"),
        ({"model": "small", "prompt_lookup_max": 3}, "prompt_lookup_max belong to the method ngram"),
    ],
)
def test_what_is_refused(value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SpeculativeConfig.from_value(value)


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(UsageError) as error:
        SpeculativeConfig("x", 0, 5, -1, 33, 1, -1, 0.0, 1.5, "no")  # type: ignore[arg-type]
    for field in fields(SpeculativeConfig):
        assert f"\n  - {field.name} is " in str(error.value)
