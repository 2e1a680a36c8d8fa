"""Grammars as values, and what is said of bad ones."""

from __future__ import annotations

import json
import pickle
import sys
from types import SimpleNamespace

import pytest

from bminf_lite.errors import UsageError
from bminf_lite.grammar import Grammar, validate, value
from bminf_lite.grammar.check_worker import Checker
from bminf_lite.grammar.value import MAX_CHOICES, MAX_TEXT
from bminf_lite.text.json_schema import FORMATS

GOOD = [
    Grammar.json_object(),
    Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    Grammar.json_schema('{"enum": ["a", 1, null]}'),
    Grammar.regex(r"[a-z/]+(\d{1,3})?"),
    Grammar.lark('start: "a" | b\nb: /[0-9]+/'),
    Grammar.lark('root ::= "a" | "b"'),
    Grammar.lark('start: <[151657]> "a" (<[7]> | <[151658]>)'),
    Grammar.choice(["yes", "no", 'with "quotes"\nand \\ lines', "\U0001f600"]),
]

BAD = [
    (lambda: Grammar.json_schema({"properties": {"a/b": {"items": {"type": "objct"}}}}), "objct.*/a~1b/items"),
    (lambda: Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    (lambda: Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "5.* is greater than"),
    (lambda: Grammar.json_schema({"$ref": "file:///etc/hostname"}), "does not fetch"),
    (lambda: Grammar.json_schema({"$defs": {"x": {"type": "strin"}}, "items": {"$ref": "#/$defs/x"}}), "at /"),
    (lambda: Grammar.json_schema("{"), "not JSON: .*column 2"),
    (lambda: Grammar.json_schema("[]"), "must be a JSON object"),
    (lambda: Grammar.json_schema(False), "schema is false"),
    (lambda: Grammar.json_schema("NaN"), "NaN is not"),
    (lambda: Grammar.json_schema('{"a":' * 20_000), "not JSON|nests too deeply|too complex"),
    (lambda: Grammar.json_schema(3), "json_schema is 3"),
    (lambda: Grammar.json_schema({"a": float("inf")}), "cannot be written as JSON"),
    (lambda: Grammar.json_schema({"a": {1, 2}}), "cannot be written as JSON"),
    (lambda: Grammar.regex("a(b"), r"a\(b\n +\^\nerror: unclosed group"),
    (lambda: Grammar.regex("(?=a)b"), "look-around"),
    (lambda: Grammar.regex(r"[^\s\S]"), "no text satisfies it"),
    (lambda: Grammar.regex(7), "must be text, but is int"),
    (lambda: Grammar.regex("a" * (MAX_TEXT + 1)), "120,001 characters, but may have 120,000"),
    (lambda: Grammar.lark("start: foo"), 'unknown name: "foo"'),
    (lambda: Grammar.lark('root ::= "a" foo'), "foo"),
    (lambda: Grammar.lark("start: start"), "no text satisfies it"),
    (lambda: Grammar.lark('start: "a" %json {"type": "objct"}'), "objct"),
    (lambda: Grammar.choice([]), "it is empty"),
    (lambda: Grammar.choice(["a", ""]), "has '', but must be"),
    (lambda: Grammar.choice(["a", 1]), "has 1, but must be"),
    (lambda: Grammar.choice(["\ud800"]), "not JSON"),
    (lambda: Grammar.choice("abc"), "must be a list of texts"),
    (lambda: Grammar.choice([str(n) for n in range(MAX_CHOICES + 1)]), "5,001 texts, but may have 5,000"),
    (lambda: Grammar("xml", "a"), "'xml', but must be one of json_object"),
]


def test_what_a_schema_need_not_say_is_left_out():
    """Zod, pydantic and OpenAPI write formats of their own, and that names are strings."""
    names = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"format": "path"}}
    assert Grammar.json_schema(names) == Grammar.json_schema({"type": "object", "additionalProperties": {}})
    assert Grammar.json_schema(json.dumps(names)) == Grammar.json_schema(names)
    for kept in (
        {"const": {"format": "path"}},
        {"properties": {"format": {}, "propertyNames": {"type": "string"}}},
        {"anyOf": [{"format": form} for form in sorted(FORMATS)]},
        {"propertyNames": {"pattern": "a"}},
    ):
        assert json.loads(Grammar.json_schema(kept).text) == kept


def test_true_is_the_schema_of_any_value():
    assert Grammar.json_schema(True) == Grammar.json_schema("true") == Grammar.json_schema({})
    assert Grammar.json_schema("false") == Grammar.json_schema(False)


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_formats_that_are_known(form):
    validate(Grammar.json_schema({"type": "string", "format": form}))


@pytest.mark.parametrize("grammar", GOOD, ids=lambda g: g.kind)
def test_good_grammars_are_accepted_and_travel(grammar):
    validate(grammar)
    assert pickle.loads(pickle.dumps(grammar)) == grammar
    assert Grammar(grammar.kind, grammar.text) == grammar


def test_the_members_of_a_schema_keep_their_order():
    assert list(json.loads(Grammar.json_schema({"properties": {"z": {}, "a": {}}}).text)["properties"]) == ["z", "a"]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_grammars_are_refused_with_what_is_wrong(make, message):
    with pytest.raises(UsageError, match=f"(?s){message}"):
        validate(make())


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(value, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"llguidance: pip install 'bminf-lite\[grammar\]'"):
        validate(Grammar.regex("a missing package"))


BOMBS = {
    "intersections": lambda: Grammar.lark(
        'start: "x" A\nA: ' + " & ".join(rf"/x(.|\n)*a(.|\n){{{i}}}/" for i in range(1, 15))
    ),
    "multiple": lambda: Grammar.json_schema({"type": "integer", "multipleOf": 1234567}),
    "nested rules": lambda: Grammar.lark(
        "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1} | a{i + 1}" for i in range(3000)) + '\na3000: "x"'
    ),
    "repetition": lambda: Grammar.regex("|".join(rf"(\p{{L}}{{1,{i}}}x){{3}}" for i in range(1, 4000))),
}


def test_a_limit_of_the_library_is_called_too_complex(monkeypatch):
    monkeypatch.setattr(value, "CHECK_SECONDS", 300)  # on a slow machine that limit would be met first
    with pytest.raises(UsageError, match=r"too complex: .*too many"):
        validate(Grammar.regex("|".join(rf"(\p{{L}}{{1,{i}}}x){{3}}" for i in range(1, 1000))))


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_bounded(name):
    """Without the process that is killed, the first two take minutes, and the third overflows the stack.

    Which limit a bomb meets first, of time, of memory or of llguidance's own, depends on the machine.
    """
    with pytest.raises(UsageError, match=r"too complex|too much memory"):
        validate(BOMBS[name]())
    validate(GOOD[0])
    validate(Grammar.regex(f"after {name}"))


class _Panic(BaseException):
    """As the exceptions are for panics of Rust: of no type that a caller could name."""


def test_a_panic_of_the_library_is_a_problem_of_the_grammar():
    llguidance = pytest.importorskip("llguidance")

    def panics(*_: object) -> str:
        raise _Panic("begin <= end (1 <= 0)")

    library = SimpleNamespace(LLTokenizer=llguidance.LLTokenizer, LLMatcher=SimpleNamespace(grammar_from_regex=panics))
    checker = Checker(library, None, "", 10)
    assert checker.reply("regex", "a") == {"problem": "llguidance fails: begin <= end (1 <= 0)"}
    library.LLMatcher.grammar_from_regex = lambda _: sys.exit()
    with pytest.raises(SystemExit):
        checker.reply("regex", "a")
