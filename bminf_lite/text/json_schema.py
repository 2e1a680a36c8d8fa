"""JSON schemas as programs write them, for a library that enforces all that a schema says or refuses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .disjoint_schemas import Disjointness

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
"""The formats of strings that llguidance enforces. Others are annotations, as JSON Schema says."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("const", "enum", "default", "examples")


def enforceable(schema: Any) -> Any:
    """A schema without what says nothing about a text: other formats, and that names of properties are strings.

    Zod, pydantic and OpenAPI write these. ``oneOf`` becomes ``anyOf`` where no two of its branches accept the same
    value, as far as :mod:`.disjoint_schemas` sees. Raises ``RecursionError`` for a schema that nests too deeply.
    """
    return _kept(schema, None if _must_keep_branches(schema) else Disjointness(schema))


def _must_keep_branches(schema: Any) -> bool:
    """Whether a ``$ref`` leads through ``oneOf``, which then must keep its name, or may not start at the root."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            if "/oneOf/" in str(part.get("$ref", "")) or ("$id" in part and part is not schema):
                return True
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return False


def _kept(schema: Any, disjointness: Disjointness | None) -> Any:
    if isinstance(schema, list):
        return [_kept(part, disjointness) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        says_nothing = (key == "format" and isinstance(value, str) and value not in FORMATS) or (
            key == "propertyNames" and value == {"type": "string"}
        )
        if key in _NAMED and isinstance(value, Mapping):
            kept[key] = {name: _kept(part, disjointness) for name, part in value.items()}
        elif not says_nothing:
            kept[key] = value if key in _VALUES else _kept(value, disjointness)
    branches = schema.get("oneOf")
    if disjointness is None or not isinstance(branches, list) or len(branches) < 2 or "anyOf" in schema:
        return kept
    if disjointness.of_all(branches):
        kept = {"anyOf" if key == "oneOf" else key: value for key, value in kept.items()}
    return kept
