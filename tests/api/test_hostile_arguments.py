"""Arguments of wrong types and values: an error of ours or a result, for every argument of every public function."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint

import bminf_lite
from bminf_lite.errors import BminfError, UsageError


def shown(value: object) -> str:
    """The value in the name of a test, the same in every process."""
    return "object" if type(value) is object else repr(value)


VALUES: dict[str, Any] = {
    "three ones": np.ones(3),
    "zeros": np.zeros((2, 2)),
    "an empty array": np.zeros(0),
    "no": "no",
    "": "",
    "a bool": np.bool_(True),
    "an int64": np.int64(2),
    "a float32": np.float32(2),
    "nan": float("nan"),
    "inf": float("inf"),
    "a surrogate": "\ud800",
    "a NUL": "a\0b",
    "a list": [1],
    "a dict": {},
    "10^30": 10**30,
    "None": None,
    "an object": object(),
    "-1": -1,
    "1.5": 1.5,
    "bytes": b"a",
    "300 characters": "a" * 300,
}
FLAGS = ["no", "", 1, 0, None, np.bool_(True), np.ones(3), np.zeros(0), [], {}, object(), float("nan")]


@dataclass(frozen=True)
class Folders:
    float: Path
    int8: Path
    text: Path
    out: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("arguments")
    text = root / "text.txt"
    text.write_text(tiny_checkpoint.WORDS * 5)
    found = Folders(tiny_checkpoint.write(root / "float"), root / "int8", text, root / "out")
    bminf_lite.migrate(found.float, found.int8)
    return found


@pytest.fixture(scope="module")
def model(folders: Folders) -> bminf_lite.Model:
    return bminf_lite.load(folders.int8, device="cpu")


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def calls(folders: Folders, model: bminf_lite.Model) -> dict[str, Call]:
    """Functions with arguments that are right."""
    cpu: dict[str, Any] = {"device": "cpu"}
    messages = [{"role": "user", "content": "a"}]
    return {
        "load": (lambda *a, **k: bminf_lite.load(*a, **k).close(), (folders.int8,), cpu),
        "migrate": (bminf_lite.migrate, (folders.float, folders.out), cpu | {"force": True, "dry_run": True}),
        "verify": (bminf_lite.verify, (folders.int8,), {}),
        "plan": (bminf_lite.plan, (folders.int8,), {}),
        "perplexity": (bminf_lite.perplexity, (folders.int8, folders.text), cpu | {"tokens": 20}),
        "compare": (bminf_lite.compare, (folders.int8, folders.float, folders.text), cpu | {"tokens": 20}),
        "generate": (model.generate, ("the",), {"max_new_tokens": 2}),
        "stream": (lambda *a, **k: list(model.stream(*a, **k)), ("the",), {"max_new_tokens": 2}),
        "logits": (model.logits, ([1, 2, 3],), {}),
        "encode": (model.encode, ("the",), {}),
        "chat": (model.chat, (messages,), {}),
    }


SIGNATURES: dict[str, Callable[..., Any]] = {
    "load": bminf_lite.load,
    "migrate": bminf_lite.migrate,
    "verify": bminf_lite.verify,
    "plan": bminf_lite.plan,
    "perplexity": bminf_lite.perplexity,
    "compare": bminf_lite.compare,
    "generate": bminf_lite.Model.generate,
    "stream": bminf_lite.Model.stream,
    "logits": bminf_lite.Model.logits,
    "encode": bminf_lite.Model.encode,
    "chat": bminf_lite.Model.chat,
}
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def ours(function: Callable[[], Any], what: str) -> None:
    """Call a function that must return, or raise an error of ours."""
    try:
        function()
    except BminfError as error:
        assert str(error) and len(str(error)) < 3000, what
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGNATURES)
def test_every_argument(
    folders: Folders, model: bminf_lite.Model, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where a report called "no" goes
    function, given, right = calls(folders, model)[name]
    parameters = [p for p in inspect.signature(SIGNATURES[name]).parameters.values() if p.name != "self"]
    names = [p.name for p in parameters if p.kind in NAMED]
    for index, argument in enumerate(names):
        for label, value in VALUES.items():
            positional = tuple(value if i == index else old for i, old in enumerate(given))
            options = right if index < len(given) else right | {argument: value}
            ours(lambda p=positional, o=options: function(*p, **o), f"{name}: {argument} is {label}")  # type: ignore


@pytest.mark.parametrize("field", [f.name for f in fields(bminf_lite.SamplingParams)])
def test_every_sampling_parameter(model: bminf_lite.Model, field: str) -> None:
    for label, value in VALUES.items():
        options = {"max_new_tokens": 2} | {field: value}
        ours(lambda o=options: model.generate("the", bminf_lite.SamplingParams(**o)), f"{field} is {label}")  # type: ignore


@pytest.mark.parametrize("value", FLAGS, ids=shown)
@pytest.mark.parametrize("flag", ["force", "dry_run", "portable", "offline_only"])
def test_flags_of_a_migration_are_true_or_false(folders: Folders, flag: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{flag} is .*, but must be True or False$"):
        bminf_lite.migrate(folders.float, folders.out, **{flag: value})
    assert not folders.out.exists()


@pytest.mark.parametrize("value", ["no", 1, np.ones(3), [], ""], ids=shown)
def test_functions_can_be_called(folders: Folders, value: Any) -> None:
    given: dict[str, tuple[Path, ...]] = {
        "verify": (folders.int8,),
        "perplexity": (folders.int8, folders.text),
        "compare": (folders.int8, folders.float, folders.text),
        "migrate": (folders.float, folders.out),
    }
    for name, arguments in given.items():
        with pytest.raises(UsageError, match=r"^progress is .*, but must be a function, or None$"):
            getattr(bminf_lite, name)(*arguments, progress=value)


@pytest.mark.parametrize("value", ["no", 1, np.ones(3), None], ids=shown)
def test_flags_of_a_conversation_are_true_or_false(model: bminf_lite.Model, value: Any) -> None:
    with pytest.raises(UsageError, match=r"^add_generation_prompt is .*, but must be True or False"):
        model.chat([{"role": "user", "content": "a"}], add_generation_prompt=value)


@pytest.mark.parametrize(
    "tools",
    ["f", 3, [3], [{}], [{"function": {}}], [{"function": {"name": 3}}], {"function": {"name": "f"}}],
    ids=shown,
)
def test_tools_are_a_list_of_functions(model: bminf_lite.Model, tools: Any) -> None:
    with pytest.raises(UsageError, match=r"tools .*must be"):
        model.chat([{"role": "user", "content": "a"}], tools=tools)


PATHS: dict[str, Any] = {
    "300 characters": "a" * 300,
    "a NUL": "a\0b",
    "a surrogate": "a\ud800b",
    "a long folder": "b" * 300 + "/x",
    "6,000 characters": "c/" * 3000,
    "an array": np.zeros(3),
    "None": None,
    "3": 3,
    "bytes": b"abc",
    "empty": "",
}


@pytest.mark.parametrize("name", PATHS)
def test_paths_that_the_system_cannot_look_up(folders: Folders, name: str) -> None:
    path, cpu = PATHS[name], {"device": "cpu"}
    found: dict[str, Callable[[], Any]] = {
        "load": lambda: bminf_lite.load(path, **cpu),
        "source": lambda: bminf_lite.migrate(path, folders.out),
        "out": lambda: bminf_lite.migrate(folders.float, path),
        "verify": lambda: bminf_lite.verify(path),
        "plan": lambda: bminf_lite.plan(path),
        "perplexity": lambda: bminf_lite.perplexity(path, folders.text, **cpu),
        "text": lambda: bminf_lite.perplexity(folders.int8, path, **cpu),
        "model": lambda: bminf_lite.compare(path, folders.float, folders.text, **cpu),
        "reference": lambda: bminf_lite.compare(folders.int8, path, folders.text, **cpu),
    }
    if path is not None:
        found |= {
            "recipe": lambda: bminf_lite.migrate(folders.float, folders.out, path),
            "report": lambda: bminf_lite.compare(
                folders.int8, folders.float, folders.text, report=path, device="cpu", tokens=20
            ),
            "calibrate": lambda: bminf_lite.migrate(folders.float, folders.out, "w8a8-smooth", calibrate=path, **cpu),
        }
    before = sorted(os.listdir(folders.out.parent))
    for function in found.values():
        with pytest.raises(UsageError):
            function()
    assert sorted(os.listdir(folders.out.parent)) == before
