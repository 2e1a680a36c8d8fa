"""Renders a chat template that is not trusted: the program of the process that ``chat_template.py`` starts.

The setup holds the template's ``source`` and the most characters of ``output``. A request holds the variables of one
rendering; the reply is ``{"text": ...}``, ``{"refused": ...}`` if the template called ``raise_exception``, or
``{"failed": ...}``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any


class RenderError(Exception):
    """Raised by the template's ``raise_exception``: it does not accept these messages."""


def start(setup: dict[str, Any]) -> Callable[[Any], dict[str, str]]:
    environment = make_environment()
    template, form = None, TEXT

    def reply(variables: Any) -> dict[str, str]:
        nonlocal template, form
        try:
            if template is None:
                form = content_form(environment.parse(setup["source"]))
                template = environment.from_string(setup["source"])
            variables["messages"] = [with_content(message, form) for message in variables["messages"]]
            return {"text": render(template, variables, setup["output"])}
        except RenderError as e:
            return {"refused": str(e)}
        except MemoryError:
            return {"failed": f"needs more than {setup['memory'] >> 20} MiB of memory"}
        except RecursionError:
            return {"failed": "nests too deeply"}
        except Exception as e:  # a template can raise anything that Python can
            return {"failed": f"fails: {type(e).__name__}: {e}"[:2000]}

    return reply


def render(template: Any, variables: dict[str, Any], limit: int) -> str:
    """The template's text; ``ValueError`` beyond ``limit`` characters."""
    pieces = []
    length = 0
    for piece in template.generate(variables):
        length += len(piece)
        if length > limit:
            raise ValueError(f"the prompt has more than {limit:,} characters")
        pieces.append(piece)
    return "".join(pieces)


TEXT, PARTS, ONLY_PARTS = "text", "parts", "only parts"
"""What a template takes as the content of a message: a text, also a list of parts, or only such a list."""
LIST_FILTERS = frozenset(["default", "d", "list", "reject", "rejectattr", "reverse", "select", "selectattr", "sort"])
"""Filters whose result has the parts that they are given."""


def with_content(message: dict[str, Any], form: str) -> dict[str, Any]:
    """A message in the form that a template takes. The texts of several parts become lines."""
    content = message.get("content")
    if isinstance(content, list) and form == TEXT:
        return {**message, "content": "\n".join(part["text"] for part in content)}
    if isinstance(content, str) and content and form == ONLY_PARTS:
        return {**message, "content": [{"type": "text", "text": content}]}
    return message


def content_form(source: Any) -> str:
    """What a template takes, from its syntax tree: one that loops over contents, or reads parts of them, takes lists.

    A template that never asks whether a content is a string takes nothing else. vLLM finds lists in this way too.
    """
    from jinja2 import nodes

    is_content = ContentExpressions(source)
    loops = (loop.iter for loop in source.find_all(nodes.For))
    chosen = (f.node for f in source.find_all(nodes.Filter) if f.name in ("selectattr", "rejectattr", "map"))
    first = (
        item.node.node
        for item in source.find_all((nodes.Getattr, nodes.Getitem))
        if isinstance(item.node, nodes.Getitem) and isinstance(getattr(item.node.arg, "value", None), int)
    )
    if not any(node is not None and is_content(node) for found in (loops, chosen, first) for node in found):
        return TEXT
    asked = (test.node for test in source.find_all(nodes.Test) if test.name == "string")
    return PARTS if any(map(is_content, asked)) else ONLY_PARTS


class ContentExpressions:
    """Tells which expressions of a template are the content of a message, or some of its parts.

    Variables and parameters of macros that get a content are contents too.
    """

    def __init__(self, source: Any):
        from jinja2 import nodes

        self._nodes = nodes
        self._names: set[str] = set()
        macros = {macro.name: macro for macro in source.find_all(nodes.Macro)}
        found = -1
        while found < len(self._names):
            found = len(self._names)
            for assignment in source.find_all(nodes.Assign):
                if isinstance(assignment.target, nodes.Name) and self(assignment.node):
                    self._names.add(assignment.target.name)
            for call in source.find_all(nodes.Call):
                macro = macros.get(getattr(call.node, "name", None))
                if macro is not None:
                    self._names.update(p.name for p, given in zip(macro.args, call.args, strict=False) if self(given))
                    self._names.update(given.key for given in call.kwargs if self(given.value))

    def __call__(self, node: Any) -> bool:
        nodes = self._nodes
        if isinstance(node, nodes.Name):
            return node.name in self._names
        if isinstance(node, nodes.Getattr):
            return bool(node.attr == "content")
        if isinstance(node, nodes.Getitem):
            is_slice = isinstance(node.arg, nodes.Slice)
            return self(node.node) if is_slice else getattr(node.arg, "value", None) == "content"
        if isinstance(node, nodes.Filter):
            return node.name in LIST_FILTERS and node.node is not None and self(node.node)
        if isinstance(node, nodes.Call):
            is_get = isinstance(node.node, nodes.Getattr) and node.node.attr == "get"
            return is_get and bool(node.args) and getattr(node.args[0], "value", None) == "content"
        if isinstance(node, nodes.CondExpr):
            return self(node.expr1) or (node.expr2 is not None and self(node.expr2))
        if isinstance(node, (nodes.Or, nodes.And)):
            return self(node.left) or self(node.right)
        return False


def make_environment() -> Any:
    """The Jinja environment of transformers, for which chat templates are written."""
    from jinja2 import nodes, utils
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks an assistant's text for training; rendering passes its content through."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class Namespace(utils.Namespace):
        """Refuses attributes that begin with an underscore: they could fake another type."""

        def __init__(*args: Any, **attributes: Any) -> None:
            self, args = args[0], args[1:]
            utils.Namespace.__init__(self)
            for name, value in dict(*args, **attributes).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a namespace may not have an attribute {name!r}")
            super().__setitem__(name, value)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=strftime_now, namespace=Namespace, dict=Dict()
    )
    return environment


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON; Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: Any) -> None:
    raise RenderError(str(message))


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class Dict:
    """``dict`` without the other attributes of the class, which the template must not reach."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)
