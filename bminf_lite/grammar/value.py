"""What a completion must look like: a JSON object, a JSON schema, a regular expression, a grammar, one of some texts.

A :class:`Grammar` is a plain value that can be compared, pickled and sent in messages. :func:`validate` checks one
without a model. Parsing is the work of llguidance, which the extra ``grammar`` installs. The dialects are its own:

- https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md
- https://docs.rs/regex/latest/regex/#syntax, without look-around and back-references
- https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md (Lark), or GBNF as in llama.cpp

A grammar may come from a stranger. A short one can take minutes, gigabytes, or the whole stack, although llguidance
counts its steps. Therefore a grammar is first tried in a process of its own (``check_worker.py``), which is killed
after a time limit and, on Linux, has limited memory. It starts with the first grammar, in about a tenth of a second,
and serves later ones.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UsageError
from ..text.json_schema import enforceable
from ..worker_process import WorkerProcess

NAMES = {
    "json_object": "JSON object",
    "json_schema": "JSON schema",
    "regex": "regex",
    "lark": "grammar",
    "choice": "choice",
}
"""The kinds of grammars, and what messages call them."""

MAX_TEXT = 120_000
"""Characters of a grammar's text: OpenAI's bound for the texts in a schema."""
MAX_CHOICES = 5_000
CHECK_SECONDS = 5.0
CHECK_BYTES = 1 << 30
MAX_CHECKERS = 4
MAX_KEPT = 256
"""Grammars whose form is kept."""
LIMITS: dict[str, Any] = {"max_grammar_size": 200_000, "max_lexer_states": 50_000, "verbose_errors": False}
"""llguidance's limits on time and memory that differ from its defaults."""
WHITESPACE = r"\x20|\r?\n(\x20{0,24}|\t{0,8})"
"""Between two parts of a JSON text: a space, or a line break and indentation. A model cannot write it for ever."""
CHECK_WORKER = Path(__file__).with_name("check_worker.py")


@dataclass(frozen=True)
class Grammar:
    """What a completion must look like: a kind, which is one of :data:`NAMES`, and a text.

    The constructors :meth:`json_object`, :meth:`json_schema`, :meth:`regex`, :meth:`lark` and :meth:`choice` make the
    text. That of ``json_schema`` is the schema, that of ``choice`` a JSON list of strings, and ``json_object`` has
    none. Raises ``UsageError`` for an unknown kind and for a text over :data:`MAX_TEXT`; :func:`validate` checks the
    rest.
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in NAMES:
            raise UsageError(f"the kind of grammar is {self.kind!r}, but must be one of {', '.join(NAMES)}")
        if not isinstance(self.text, str):
            raise UsageError(f"the {self.name} must be text, but is {type(self.text).__name__}")
        if len(self.text) > MAX_TEXT:
            raise UsageError(
                f"the {self.name} has {len(self.text):,} characters, but may have {MAX_TEXT:,}: make it shorter"
            )

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """JSON that a schema accepts, the members of objects in the order of the schema's ``properties``.

        ``True``, or the text ``true``, accepts any JSON value.
        """
        if isinstance(schema, str):
            parsed = _schema(schema)
            if parsed is None:
                return cls("json_schema", schema)  # the check of it says what is wrong
            schema = parsed
        if isinstance(schema, bool):
            schema = {} if schema else {"allOf": [False]}  # the same as an object
        if not isinstance(schema, Mapping):
            raise UsageError(
                f"json_schema is {schema!r}, but must be a JSON schema, as a dict or as text; of a pydantic model, "
                "Model.model_json_schema()"
            )
        try:
            schema = enforceable(schema)
        except RecursionError as error:
            raise UsageError(f"json_schema cannot be written as JSON: {error}") from None
        return cls("json_schema", _json_text(schema, "json_schema"))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that a regular expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A text of a context-free grammar, in the notation of Lark or of GBNF."""
        return cls("lark", text)

    @classmethod
    def choice(cls, options: Sequence[str]) -> Grammar:
        """One of some texts."""
        if isinstance(options, str) or not isinstance(options, Sequence):
            raise UsageError(f"choice is {options!r}, but must be a list of texts")
        return cls("choice", _json_text(list(options), "choice"))

    @property
    def name(self) -> str:
        """The kind in the words of a message."""
        return NAMES[self.kind]


_CONSTRUCTORS: dict[str, Callable[[Any], Grammar]] = {
    "json_object": lambda _: Grammar.json_object(),
    "json_schema": Grammar.json_schema,
    "regex": Grammar.regex,
    "lark": lambda value: value if isinstance(value, Grammar) else Grammar.lark(value),
    "choice": Grammar.choice,
}


class Structure(NamedTuple):
    """What a caller wants a completion to look like: the ``name`` of the option or field, a kind, and its value.

    The value is what the constructor of the kind takes; that of ``json_object`` is True. A grammar of any kind may
    stand under ``lark``.
    """

    name: str
    kind: str
    value: Any

    def grammar(self) -> Grammar:
        """The grammar, not validated. Raises ``UsageError`` for a value of the wrong type."""
        if self.kind == "json_object" and self.value is not True:
            raise UsageError(f"{self.name} is {self.value!r}, but must be True or False")
        return _CONSTRUCTORS[self.kind](self.value)


def only_structure(structures: Sequence[Structure]) -> Structure | None:
    """The structure of a completion; None without one. Raises ``UsageError`` for several, by their names."""
    if len(structures) > 1:
        names = " and ".join(structure.name for structure in structures)
        raise UsageError(f"{names} are given, but a completion can follow only one of them: leave out the others")
    return structures[0] if structures else None


class Check:
    """A check that another thread may end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._worker: WorkerProcess | None = None

    def cancel(self) -> None:
        """End the check, or do not let it begin; a check that has ended is not changed."""
        with self._lock:
            self._is_cancelled = True
            if self._worker is not None:
                self._worker.kill()

    def ask(self, worker: WorkerProcess, request: str) -> dict[str, str]:
        """The reply of a process, which ends if this check is cancelled."""
        with self._lock:
            if self._is_cancelled:
                return {"failed": "was given up"}
            self._worker = worker
        try:
            return worker.ask(request, CHECK_SECONDS)
        finally:
            with self._lock:
                self._worker = None


def validate(grammar: Grammar, check: Check | None = None) -> None:
    """Check a grammar without a model. Raises ``UsageError`` that says what is wrong and where.

    Takes milliseconds, and :data:`CHECK_SECONDS` at most; the interpreter is free meanwhile. Whether a vocabulary has
    the characters that the grammar needs is found later, when it is compiled for that vocabulary. ``check`` ends it.
    """
    specification(grammar, check)


def is_kept(grammar: Grammar) -> bool:
    """Whether a grammar was found good, so that :func:`specification` takes no time."""
    with _kept_lock:
        return grammar in _kept


def specification(grammar: Grammar, check: Check | None = None) -> str:
    """A grammar in llguidance's form, after the check of :func:`validate`. Those of :data:`MAX_KEPT` are kept."""
    with _kept_lock:
        if grammar in _kept:
            _kept.move_to_end(grammar)
            return _kept[grammar]
    found = _check(grammar, check or Check())
    with _kept_lock:
        _kept[grammar] = found
        while len(_kept) > MAX_KEPT:
            _kept.popitem(last=False)
    return found


def _check(grammar: Grammar, check: Check) -> str:
    if find_spec("llguidance") is None:
        raise UsageError(
            f"a {grammar.name} for the output needs the package llguidance: pip install 'bminf-lite[grammar]'"
        )
    reply = _checkers.ask(json.dumps({"kind": grammar.kind, "text": grammar.text}), check)
    if "failed" in reply:
        raise UsageError(f"the {grammar.name} is too complex: checking it {reply['failed']}. Simplify it")
    if "problem" in reply:
        raise UsageError(f"the {grammar.name} cannot be used: {reply['problem']}")
    return reply["specification"]


class _Checkers:
    """The processes that check grammars: a few, so that one grammar that takes long does not stop the others."""

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(MAX_CHECKERS)
        self._idle: list[WorkerProcess] = []

    def ask(self, request: str, check: Check) -> dict[str, str]:
        with self._free:
            worker = self._idle.pop() if self._idle else None
            if worker is None or not worker.alive:
                setup = {"memory": CHECK_BYTES, "limits": LIMITS, "whitespace": WHITESPACE, "max_choices": MAX_CHOICES}
                worker = WorkerProcess(CHECK_WORKER, setup)
            try:
                return check.ask(worker, request)
            finally:
                if worker.alive:
                    self._idle.append(worker)


_checkers = _Checkers()
_kept: OrderedDict[Grammar, str] = OrderedDict()
_kept_lock = threading.Lock()


def _schema(text: str) -> dict[str, Any] | bool | None:
    """The object, or ``true`` or ``false``, that a text is in JSON; None if it is none of these, or too long."""
    try:
        value = json.loads(text) if len(text) <= MAX_TEXT else None
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, (dict, bool)) else None


def _json_text(value: Any, name: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{name} cannot be written as JSON: {error}") from None
