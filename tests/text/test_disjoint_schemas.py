"""``oneOf`` whose branches exclude each other: what is called disjoint has no common value, by a validator."""

from __future__ import annotations

import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.errors import UsageError
from bminf_lite.grammar import Grammar, validate
from bminf_lite.text.disjoint_schemas import Disjointness
from bminf_lite.text.json_schema import enforceable


def having(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


A, B = having(kind={"const": "a"}), having(kind={"const": "b"})
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
DISJOINT: dict[str, list[Any]] = {
    "types": [STRING, INTEGER, {"type": ["null", "array"]}],
    "constants": [{"const": "a"}, {"const": "b"}, {"enum": [1, "c"]}, {"const": None}],
    "numbers and truth": [{"const": 1}, {"const": True}, {"const": 0}, {"const": False}],
    "a discriminator": [A, B, having(kind={"enum": ["c", "d"]})],
    "references": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
    "a deeper discriminator": [having(n=A), having(n=B)],
    "parts of all": [{"allOf": [{"$ref": "#/$defs/A"}, having(z=STRING)]}, {"$ref": "#/$defs/B"}],
    "choices": [{"anyOf": [A, INTEGER]}, {"anyOf": [B, STRING]}],
    "lengths": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 4}],
    "items": [{"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2}],
    "ranges": [{"type": "number", "maximum": 3}, {"type": "number", "exclusiveMinimum": 3}],
    "closed objects": [having(a=STRING) | {"additionalProperties": False}, having(b=STRING)],
    "forbidden": [{"type": "object", "properties": {"a": False}}, having(a=STRING)],
    "never": [False, True],
}
NOT_DISJOINT: dict[str, list[Any]] = {
    "equal": [STRING, STRING],
    "an integer is a number": [INTEGER, {"type": "number"}],
    "1 is 1.0": [{"const": 1}, {"const": 1.0}],
    "objects": [having(a=STRING), having(b=STRING)],
    "optional discriminator": [{"type": "object", "properties": A["properties"]}, B],
    "no type": [{"maxLength": 3}, {"minLength": 4}],
    "ranges that touch": [{"type": "number", "maximum": 3}, {"type": "number", "minimum": 3}],
    "patterns": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}],
    "anything": [True, {}],
    "unknown reference": [{"$ref": "#/$defs/C"}, STRING],
    "endless reference": [{"$ref": "#/$defs/Loop"}, STRING],
}
ROOT = {"$defs": {"A": A, "B": B, "Loop": {"$ref": "#/$defs/Loop"}}}


@pytest.mark.parametrize("name", DISJOINT)
def test_branches_that_exclude_each_other(name: str) -> None:
    branches = DISJOINT[name]
    assert Disjointness(ROOT).of_all(branches)
    schema = {**ROOT, "type": "object", "properties": {"x": {"oneOf": branches, "title": "X"}}}
    found = enforceable(schema)["properties"]["x"]
    assert found == {"anyOf": enforceable(branches), "title": "X"}


@pytest.mark.parametrize("name", NOT_DISJOINT)
def test_branches_that_may_share_a_value(name: str) -> None:
    assert not Disjointness(ROOT).of_all(NOT_DISJOINT[name])
    schema = {"oneOf": NOT_DISJOINT[name]}
    assert enforceable(schema) == schema


SCALARS = [None, True, 0, 1, 2.5, "", "a", "abcd"]
VALUES = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)
WORDS = {
    "type": st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
    | st.lists(st.sampled_from(["integer", "string", "object"]), min_size=1, max_size=2, unique=True),
    "const": st.sampled_from([*SCALARS, [], {}]),
    "enum": st.lists(st.sampled_from(SCALARS), min_size=1, max_size=3),
    "minimum": st.integers(0, 3),
    "maximum": st.integers(0, 3),
    "exclusiveMinimum": st.integers(0, 3),
    "exclusiveMaximum": st.integers(0, 3),
    "minLength": st.integers(0, 3),
    "maxLength": st.integers(0, 3),
    "minItems": st.integers(0, 2),
    "maxItems": st.integers(0, 2),
    "minProperties": st.integers(0, 2),
    "maxProperties": st.integers(0, 2),
    "required": st.lists(st.sampled_from("ab"), max_size=2, unique=True),
    "additionalProperties": st.booleans(),
}
SCHEMAS = st.recursive(
    st.fixed_dictionaries({}, optional=WORDS) | st.booleans(),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            **WORDS,
            "properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
        },
    ),
    max_leaves=4,
)


@given(SCHEMAS, SCHEMAS, st.lists(VALUES, min_size=20, max_size=40))
def test_disjoint_schemas_accept_no_common_value(a: Any, b: Any, values: list[Any]) -> None:
    if not Disjointness({}).of_all([a, b]):
        return
    one, other = jsonschema.Draft202012Validator(a), jsonschema.Draft202012Validator(b)
    for value in [*SCALARS, [], {}, *values]:
        assert not (one.is_valid(value) and other.is_valid(value)), value


def test_the_work_is_bounded() -> None:
    many = {"oneOf": [having(kind={"type": "string"}) for _ in range(2000)]}
    deep: dict[str, Any] = {"const": 1}
    for _ in range(300):
        deep = {"oneOf": [deep, {"const": 2}]}
    for schema in (many, deep):
        start = time.process_time()
        enforceable(schema)
        assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "branch",
    [
        {"const": 10**400},
        {"const": float("inf")},
        {"type": [["a"], {}]},
        {"type": {}},
        {"enum": [{}, []]},
        {"required": [[], 3], "type": "object"},
        {"properties": 3},
        {"minLength": "x"},
        {"$ref": 3},
        {"allOf": {}},
        {"$ref": "#/oneOf/0"},
        {"anyOf": [3]},
        {"maximum": 10**400, "type": "number"},
        3,
        None,
        "a",
    ],
)
def test_what_is_no_schema_passes(branch: Any) -> None:
    """The library says what is wrong with it."""
    schema = {"oneOf": [branch, {"const": 1.5}, branch]}
    assert set(enforceable(schema)) <= {"oneOf", "anyOf"}


@pytest.mark.parametrize("name", ["lengths", "ranges", "items", "parts of all", "a discriminator"])
def test_a_grammar_takes_them(name: str) -> None:
    validate(Grammar.json_schema({**ROOT, "oneOf": DISJOINT[name]}))


def test_a_reference_to_a_branch_still_leads_to_it() -> None:
    schema = {"type": "object", "properties": {"x": {"oneOf": [A, B]}, "y": {"$ref": "#/properties/x/oneOf/1"}}}
    assert enforceable(schema) == schema


def test_references_with_another_root_are_not_followed() -> None:
    inner = {"$id": "other", "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": {}, "B": {}}}
    schema = {**ROOT, "type": "object", "properties": {"x": inner}}
    assert enforceable(schema) == schema


def test_the_refusal_says_what_to_write() -> None:
    schema = {"type": "object", "properties": {"x": {"oneOf": [having(a=STRING), having(b=STRING)]}}}
    with pytest.raises(
        UsageError, match=r"could be accepted by two of these: write anyOf \(at /properties/x\)"
    ) as caught:
        validate(Grammar.json_schema(schema))
    assert "coerce" not in str(caught.value)
