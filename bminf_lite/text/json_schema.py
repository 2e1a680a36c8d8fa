"""JSON schemas as programs write them, for a library that enforces all that a schema says or refuses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown",
})  # fmt: skip
"""The formats of strings that llguidance enforces. Others are annotations, as JSON Schema says."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("const", "enum", "default", "examples")


def enforceable(schema: Any) -> Any:
    """A schema without what says nothing about a text: other formats, and that names of properties are strings.

    Zod, pydantic and OpenAPI write these. Raises ``RecursionError`` for a schema that nests too deeply.
    """
    if isinstance(schema, list):
        return [enforceable(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {}
    for key, value in schema.items():
        says_nothing = (key == "format" and isinstance(value, str) and value not in FORMATS) or (
            key == "propertyNames" and value == {"type": "string"}
        )
        if key in _NAMED and isinstance(value, Mapping):
            kept[key] = {name: enforceable(part) for name, part in value.items()}
        elif not says_nothing:
            kept[key] = value if key in _VALUES else enforceable(value)
    return kept
