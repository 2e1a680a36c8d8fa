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
    template = None

    def reply(variables: Any) -> dict[str, str]:
        nonlocal template
        try:
            template = template or environment.from_string(setup["source"])
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
