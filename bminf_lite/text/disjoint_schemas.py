"""Whether two JSON schemas accept no value in common, as far as their words show it.

"Yes" is certain; "no" means that nothing was found. The work is bounded, because a schema may come from a stranger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

MAX_STEPS = 20_000
"""Pairs of schemas that are looked at for one schema."""
MAX_DEPTH = 32

_ALL_TYPES = frozenset(["null", "boolean", "integer", "fraction", "string", "array", "object"])
_SIZES = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}


class Disjointness:
    """Compares parts of the schema ``root``, to which their ``$ref`` point."""

    def __init__(self, root: Any):
        self._root = root
        self._steps = MAX_STEPS

    def of_all(self, schemas: Sequence[Any]) -> bool:
        """Whether no two of ``schemas`` accept the same value."""
        pairs = ((a, b) for i, a in enumerate(schemas) for b in schemas[:i])
        return all(self._are(a, b, 0) for a, b in pairs)

    def _are(self, a: Any, b: Any, depth: int) -> bool:
        self._steps -= 1
        if self._steps < 0 or depth > MAX_DEPTH:
            return False
        a, b = self._resolved(a), self._resolved(b)
        if a is False or b is False:
            return True
        if not isinstance(a, Mapping) or not isinstance(b, Mapping):
            return False
        for one, other in ((a, b), (b, a)):
            if any(self._are(part, other, depth + 1) for part in _list(one, "allOf")):
                return True
            for key in ("anyOf", "oneOf"):
                branches = _list(one, key)
                if branches and all(self._are(branch, other, depth + 1) for branch in branches):
                    return True
        common = _types(a) & _types(b)
        return not common or _values_differ(a, b) or all(self._differ(kind, a, b, depth) for kind in common)

    def _differ(self, kind: str, a: Mapping[str, Any], b: Mapping[str, Any], depth: int) -> bool:
        """Whether two schemas accept no common value of one type."""
        if kind in ("integer", "fraction"):
            return _ranges_differ(_range(a), _range(b))
        if kind in _SIZES:
            low, high = _SIZES[kind]
            sizes = [(_number(s.get(low), -math.inf), _number(s.get(high), math.inf)) for s in (a, b)]
            if sizes[0][0] > sizes[1][1] or sizes[1][0] > sizes[0][1]:
                return True
        if kind != "object":
            return False
        required = [_texts(_list(s, "required")) for s in (a, b)]
        if any(_forbids(s, names) for s, names in ((a, required[1]), (b, required[0]))):
            return True
        one, other = _mapping(a, "properties"), _mapping(b, "properties")
        names = [name for name in required[0] if name in required[1] and name in one and name in other]
        return any(self._are(one[name], other[name], depth + 1) for name in names)

    def _resolved(self, schema: Any) -> Any:
        """A schema, or the one to which its only word ``$ref`` points."""
        for _ in range(MAX_DEPTH):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str) or not reference.startswith("#"):
                return schema
            target = self._root
            for part in reference[1:].split("/")[1:]:
                name = part.replace("~1", "/").replace("~0", "~")
                target = target.get(name) if isinstance(target, Mapping) else None
            if target is None:
                return schema
            schema = target
        return True


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types of values that a schema accepts; numbers are integers or fractions."""
    given = schema.get("type")
    names = [given] if isinstance(given, str) else _texts(given) if isinstance(given, list) else None
    types = _ALL_TYPES
    if names is not None:
        types = frozenset(kind for name in names for kind in (("integer", "fraction") if name == "number" else (name,)))
    values = _accepted(schema)
    return types if values is None else types & frozenset(map(_type_of, values))


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, (int, float)):
        return "integer" if isinstance(value, int) or value.is_integer() else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _accepted(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of ``const`` or ``enum``; None without either."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _values_differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    one, other = _accepted(a), _accepted(b)
    if one is None or other is None:
        return False
    simple = [
        {(_type_of(value), value) for value in values if not isinstance(value, (list, dict))} for values in (one, other)
    ]
    has_others = [any(isinstance(value, (list, dict)) for value in values) for values in (one, other)]
    return simple[0].isdisjoint(simple[1]) and not all(has_others)


def _range(schema: Mapping[str, Any]) -> tuple[float, bool, float, bool]:
    """The least number and whether it is left out, and the same of the largest."""
    low, high = _number(schema.get("minimum"), -math.inf), _number(schema.get("maximum"), math.inf)
    above, below = (
        _number(schema.get(f"exclusive{end}imum"), side) for end, side in (("Min", -math.inf), ("Max", math.inf))
    )
    return (
        max(low, above),
        above >= low and math.isfinite(above),
        min(high, below),
        below <= high and math.isfinite(below),
    )


def _ranges_differ(a: tuple[float, bool, float, bool], b: tuple[float, bool, float, bool]) -> bool:
    for (low, leaves_low, _, _), (_, _, high, leaves_high) in ((a, b), (b, a)):
        if low > high or (low == high and (leaves_low or leaves_high)):
            return True
    return False


def _forbids(schema: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Whether an object that a schema accepts cannot have one of some properties."""
    properties = _mapping(schema, "properties")
    if any(properties.get(name) is False for name in names):
        return True
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return is_closed and any(name not in properties for name in names)


def _mapping(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, Mapping) else {}


def _texts(values: Sequence[Any]) -> list[str]:
    return [value for value in values if isinstance(value, str)]


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _number(value: Any, default: float) -> float:
    return default if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value else value
