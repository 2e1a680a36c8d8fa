"""Grammars and arguments of the command line that are wrong on purpose: an error with the value and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cli_kit
import pytest
from hostile_kit import bounded, error_of

from bminf_lite.grammar import Grammar, validate

pytest.importorskip("llguidance", reason="the extra [grammar] is not installed")

DEEP: dict[str, Any] = {}
for _ in range(500):
    DEEP = {"type": "array", "items": DEEP}

GRAMMARS: dict[str, tuple[Callable[[], Grammar], str]] = {
    "unknown type": (lambda: Grammar.json_schema({"type": "objct"}), "objct"),
    "reference to nothing": (lambda: Grammar.json_schema({"$ref": "#/$defs/x"}), r"\$defs/x|\$ref"),
    "reference to a file": (lambda: Grammar.json_schema({"$ref": "file:///etc/passwd"}), "does not fetch"),
    "500 deep": (lambda: Grammar.json_schema(DEEP), "deep|complex"),
    "20,000 open braces": (lambda: Grammar.json_schema('{"a":' * 20_000), "JSON|deep|complex"),
    "impossible range": (lambda: Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "5"),
    "impossible length": (lambda: Grammar.json_schema({"type": "string", "minLength": 9, "maxLength": 1}), "."),
    "NaN in a schema": (lambda: Grammar.json_schema('{"const": NaN}'), "JSON"),
    "pattern that is none": (lambda: Grammar.json_schema({"type": "string", "pattern": "("}), r"\("),
    "expression that is none": (lambda: Grammar.regex("(("), "unclosed group"),
    "5,000 open groups": (lambda: Grammar.regex("(" * 5000), "."),
    "look-around": (lambda: Grammar.regex("(?<=a)b"), "look-around"),
    "counts of counts": (lambda: Grammar.regex("((a{1,1000}){1,1000}){1,1000}"), "."),
    "endless rule": (lambda: Grammar.lark("start: start"), "no text satisfies it"),
    "unknown rule": (lambda: Grammar.lark("start: foo"), "foo"),
    "a megabyte of rules": (lambda: Grammar.lark("start: " + '"a" ' * 250_000), "characters"),
    "no choices": (lambda: Grammar.choice([]), "empty"),
    "choice of half a pair": (lambda: Grammar.choice(["\ud800"]), "JSON"),
}


@pytest.mark.parametrize("case", GRAMMARS)
def test_a_grammar(case: str) -> None:
    make, message = GRAMMARS[case]
    assert re.search(message, error_of(lambda: validate(make())))


LONG, ZERO = "x" * 300, "a\0b"
PLAN = ("plan", "MODEL", "--gpu-memory", "6GiB", "--link")
COMMANDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("generate", "MODEL", "x", "--temperature", "nan"), "temperature is nan"),
    (("generate", "MODEL", "x", "--max-new-tokens", "9" * 30), "max_new_tokens is 9"),
    (("generate", "MODEL", "x", "--top-p", "7"), "top_p is 7"),
    (("generate", "MODEL", "x", "--seed", "-1"), "seed is -1"),
    (("generate", "MODEL", "x", "--stop", ""), "stop"),
    (("generate", "MODEL", "x", "--regex", "("), "unclosed group"),
    (("generate", "MODEL", "x", "--choice", ""), "choice"),
    (("generate", "MODEL", "x", "--json-schema", "FILE:{"), "JSON"),
    (("generate", "MODEL", "x", "--json-schema", "/dev/null"), "/dev/null"),
    (("generate", "MODEL", "x", "--device", "cuda:99"), "cuda|NVIDIA"),
    (("generate", "MODEL", "x", "--device", "tpu"), "tpu"),
    (("generate", "MODEL", "x", "--memory-limit", "nanGiB"), "nanGiB"),
    (("generate", "MODEL", "x", "--max-batch", "1000000000000"), "max_batch is 1000000000000"),
    (("generate", "MODEL", "\ud800", "--max-new-tokens", "2"), "surrogate|UTF-8|character"),
    (("generate", LONG, "x"), "File name too long"),
    (("generate", ZERO, "x"), "a.*b"),
    (("generate", "/dev/null", "x"), "/dev/null"),
    (("generate", "MODEL", "--prompts", 'FILE:{"prompt": 5}'), "line 1"),
    (("generate", "MODEL", "--prompts", "FILE:" + "[" * 100_000), "line 1"),
    (("generate", "MODEL", "--prompts", 'FILE:{"prompt": "\\ud800"}'), "prompt 1"),
    (("migrate", "SOURCE", "SOURCE"), "source"),
    (("migrate", "SOURCE", "OUT", "--recipe", "FILE:a = ["), "not TOML|TOML"),
    (("migrate", "SOURCE", "OUT", "--recipe", "zzz"), "zzz"),
    (("migrate", "SOURCE", "OUT", "--recipe", "auto", "--calibrate", "/dev/null"), "/dev/null"),
    (("migrate", "/dev/zero", "OUT"), "/dev/zero"),
    (("migrate", "https://example.com/model", "OUT"), "https:"),
    (("inspect", "/dev/null"), "/dev/null"),
    (("verify", "SOURCE"), "source"),
    ((*PLAN, "nan", "--bandwidth", "1"), "link"),
    ((*PLAN, "1", "--bandwidth", "-1"), "bandwidth"),
    ((*PLAN, "1", "--bandwidth", "1", "--batch", "0"), "batch"),
    ((*PLAN, "1", "--bandwidth", "1", "--context", "1000000000000000000"), "context"),
    (("plan", "MODEL", "--gpu-memory", "x"), "gpu-memory|'x'"),
    (("compare", "MODEL", "SOURCE", "FILE:the fox", "--window", "1"), "window"),
    (("compare", "MODEL", "SOURCE", "FILE:the fox", "--report", "/proc/x.html"), "/proc/x.html"),
    (("perplexity", "MODEL", "/dev/null"), "/dev/null"),
    (("serve", "MODEL", "--port", "99999"), "port is 99999"),
    (("serve", "MODEL", "--limit", "zzz=1"), "zzz"),
    (("serve", "MODEL", "--limit", "connections=" + "9" * 20), "limit connections is 9"),
    (("serve", "MODEL", "--limit", "idle_seconds=nan"), "limit idle_seconds is nan"),
    (("serve", "MODEL", "--served-model-name", ""), "served model name is ''"),
    (("serve", "MODEL", "--served-model-name", "a\nb"), r"served model name is 'a\\nb'"),
    (("serve", "MODEL", "--shutdown-timeout", "nan"), "shutdown_timeout is nan"),
    (("serve", "MODEL", "--allowed-origin", "zzz"), "allowed origin 'zzz'"),
    (("serve", "MODEL", "--allowed-host", "a b"), "allowed host 'a b'"),
    (("serve", "MODEL", "--keyless", "x"), "path without a key 'x'"),
    (("serve", "MODEL", "--request-log", "/proc/x"), "/proc/x"),
    (("serve", "MODEL", "--api-key-file", "/dev/null"), "/dev/null"),
    (("serve", "MODEL", "--tool-call-format", "zzz"), "zzz"),
)
"""``MODEL`` and ``SOURCE`` are checkpoints, ``OUT`` a new folder, and ``FILE:`` begins the content of a file."""


def name_of(arguments: tuple[str, ...]) -> str:
    return " ".join(arguments)[:60].encode("ascii", "replace").decode()


@pytest.mark.parametrize(("arguments", "message"), [pytest.param(*case, id=name_of(case[0])) for case in COMMANDS])
def test_a_command(
    arguments: tuple[str, ...], message: str, int8: Path, source: Path, tmp_path: Path, capfd: Any
) -> None:
    paths = {"MODEL": str(int8), "SOURCE": str(source), "OUT": str(tmp_path / "out")}
    given = [paths.get(argument, argument) for argument in arguments]
    for i, argument in enumerate(given):
        if argument.startswith("FILE:"):
            path = tmp_path / f"file{i}.{'jsonl' if '--prompts' in arguments else 'txt'}"
            path.write_text(argument.removeprefix("FILE:"))
            given[i] = str(path)
    with bounded():
        result = cli_kit.run(*given)
    assert isinstance(result.exception, SystemExit) and result.exit_code in (1, 2), result.exception
    assert re.search(message, result.stderr, re.DOTALL), result.stderr[-1000:]
    assert len(result.stderr) < 20_000 and "Traceback" not in result.output + result.stderr + capfd.readouterr().err
    assert not (tmp_path / "out").exists()
