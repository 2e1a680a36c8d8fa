"""Structured output through the public API, with a random model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from model_kit import make_model

import bminf_lite
from bminf_lite import Grammar, Model, UsageError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "size": {"type": "integer", "minimum": 0, "maximum": 500},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
PROMPT = "The module"


@pytest.fixture(scope="module")
def model(source: Path) -> Iterator[Model]:
    with bminf_lite.load(source, device="cpu") as model:
        yield model


def check(result: Any, options: dict[str, Any]) -> None:
    assert result.finish_reason == "stop"
    match options:
        case {"json_schema": _}:
            jsonschema.validate(json.loads(result.text), SCHEMA)
        case {"regex": pattern}:
            assert re.fullmatch(pattern, result.text)
        case {"choice": texts}:
            assert result.text in texts
        case {"grammar": _}:
            assert re.fullmatch("(ab){1,5}c", result.text)


@pytest.mark.parametrize("temperature", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"json_schema": SCHEMA},
        {"json_schema": json.dumps(SCHEMA)},
        {"regex": r" ?[A-Za-z]{2,6} = \d{1,3}"},
        {"choice": ["yes", "no", "n\u00f6 \u4f60"]},
        {"grammar": 'start: word "c"\nword: /(ab){1,5}/'},
        {"grammar": Grammar.regex("(ab){1,5}c")},
    ],
)
def test_the_text_follows(model, options, temperature):
    results = model.generate([PROMPT, [5, 6, 7]], temperature=temperature, seed=2, **options)
    for result in results:
        check(result, options)


@pytest.mark.slow
def test_the_bundled_model_follows():
    with bminf_lite.load(Path(bminf_lite.__file__).parent / "demo_model", device="cpu") as model:
        for temperature in (0, 1.5):
            check(model.generate(PROMPT, temperature=temperature, json_schema=SCHEMA), {"json_schema": SCHEMA})


def test_streams_and_tasks_follow(model):
    options = {"json_schema": SCHEMA}
    pieces = list(model.stream(PROMPT, temperature=2, seed=1, **options))
    assert "".join(piece.text for piece in pieces) == pieces[-1].result.text
    check(pieces[-1].result, options)

    async def both() -> list[Any]:
        streamed = [piece async for piece in model.astream(PROMPT, temperature=2, seed=1, **options)]
        return [streamed[-1].result, await model.agenerate(PROMPT, temperature=2, seed=1, **options)]

    for result in asyncio.run(both()):
        assert result.token_ids == pieces[-1].result.token_ids


def test_any_object_is_json_as_far_as_it_goes(model):
    result = model.generate(PROMPT, json_object=True, temperature=1, seed=5, max_new_tokens=100)
    assert result.text.startswith("{")
    if result.finish_reason == "stop":
        assert isinstance(json.loads(result.text), dict)


def test_free_requests_do_not_notice(model):
    expected = model.generate(PROMPT, max_new_tokens=30, seed=1, temperature=1).token_ids
    free = model.stream(PROMPT, max_new_tokens=30, seed=1, temperature=1)
    found = [next(free)]
    model.generate(PROMPT, regex="[0-9]{5}", max_new_tokens=10)
    found += free
    assert found[-1].result.token_ids == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": {"type": "objct"}}, "the JSON schema cannot be used: Invalid type: objct"),
        ({"json_schema": 5}, "json_schema is 5"),
        ({"json_schema": False}, "Unsatisfiable schema: schema is false"),
        ({"regex": "a("}, "the regex cannot be used"),
        ({"regex": 5}, "the regex must be text, but is int"),
        ({"choice": []}, "it is empty"),
        ({"choice": "yes"}, "choice is 'yes', but must be a list"),
        ({"grammar": "start: x"}, "unknown name"),
        ({"json_object": "yes"}, "json_object is 'yes'"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice are given"),
    ],
)
def test_bad_grammars_are_usage_errors_before_anything_runs(model, options, message):
    steps = model.stats().steps
    with pytest.raises(UsageError, match=re.escape(message)):
        model.stream(PROMPT, **options)
    assert model.stats().steps == steps


def test_what_is_not_given_is_no_grammar(model):
    options = {"json_object": False, "json_schema": None, "regex": None, "choice": None, "grammar": None}
    assert model.generate(PROMPT, max_new_tokens=5, **options).token_ids == (
        model.generate(PROMPT, max_new_tokens=5).token_ids
    )


def test_a_model_without_a_tokenizer_says_so():
    with make_model(eos_ids=frozenset({1})) as model, pytest.raises(UsageError, match="tokenizer"):
        model.generate([1, 2], regex="a")
