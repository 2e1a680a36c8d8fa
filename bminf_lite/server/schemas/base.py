"""Request bodies: JSON to checked values, with errors that name the field.

Unknown fields are ignored, because clients send fields of newer versions. ``null`` is a field that was left out. Types
are strict: a number in quotes is wrong. The bounds of sampling parameters are those of the engine.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from ...engine.sampling_params import field_problem
from ..errors import ApiError, bad_request

MAX_DEPTH = 128
"""Arrays and objects in each other: enough for any JSON schema, and far from Python's limit of recursion."""

MAX_VALUES = 1 << 17
"""Values in arrays and objects, which are checked one by one, and as many errors may be told of: some for each token
of the longest contexts, and less than a second's work."""

_LONG_LISTS = ("prompt", "tokens", "input")
"""Fields of token ids or texts, which are checked without a step of Python for each."""

MAX_LISTED = 8
"""Problems that an error lists."""

MAX_SHOWN = 40
"""Characters of a wrong value that an error shows."""

T = TypeVar("T", bound=BaseModel)


class Body(BaseModel):
    """A request's body, or an object in it."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="ignore", frozen=True)


def parse(body_type: type[T], body: bytes) -> T:
    """The body as a ``body_type``. Raises ``ApiError`` 400, which names the first wrong field and lists all."""
    try:
        value = msgspec.json.decode(body.removeprefix(codecs.BOM_UTF8))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        if (field := _field_with_surrogate(body)) is not None:
            problem = "has half of a surrogate pair (\\ud800 to \\udfff), which is no character"
            raise bad_request(f"{field or 'the body'}: {problem}", field or None) from None
        raise bad_request(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    if len(body) > 2 * MAX_VALUES or body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_size(value)
    try:
        return body_type.model_validate(value)
    except ValidationError as error:
        raise validation_error(error, value) from None


def _field_with_surrogate(body: bytes) -> str | None:
    """The first text in a body that has half of a surrogate pair, as in :func:`_field_name`; None if there is none.

    Such a body is JSON for Python, but not for msgspec, which says only that the data was truncated.
    """
    if b"\\ud" not in body.lower():
        return None
    try:
        level: list[tuple[str, Any]] = [("", json.loads(body))]
    except (ValueError, RecursionError):
        return None
    for _ in range(MAX_DEPTH):
        below: list[tuple[str, Any]] = []
        for name, value in level:
            if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
                return name
            if isinstance(value, dict):
                below += [(f"{name}.{key}" if name else key, item) for key, item in value.items()]
                if any("\ud800" <= c <= "\udfff" for key in value for c in key):
                    return name
            elif isinstance(value, list):
                below += [(f"{name}[{i}]", item) for i, item in enumerate(value)]
        level = below
    return None


def validation_error(error: ValidationError, value: Any) -> ApiError:
    """OpenAI's form of pydantic's errors for the body ``value``."""
    problems = error.errors(include_url=False, include_context=False)
    named = [(_field_name(problem, value), _text_of(problem)) for problem in problems[:MAX_LISTED]]
    named = [(name or _first_word(text, value), text) for name, text in named]
    texts = [text if not name or text.startswith(name) else f"{name}: {text}" for name, text in named]
    if len(problems) > MAX_LISTED:
        texts.append(f"{len(problems) - MAX_LISTED:,} more")
    return bad_request("; ".join(dict.fromkeys(texts)), named[0][0] or None)


def _first_word(text: str, value: Any) -> str:
    """The field with which the text of a problem of several fields begins."""
    word = text.split(" ", 1)[0]
    return word if isinstance(value, dict) and word in value else ""


def _text_of(problem: ErrorDetails) -> str:
    """Pydantic's words, with the value where that is short."""
    if problem["type"] == "model_type":
        return "must be a JSON object"
    given = problem["input"]
    is_short = isinstance(given, (str, int, float)) and len(str(given)) <= MAX_SHOWN
    return f"{problem['msg']}, but is {given!r}" if is_short and problem["type"] != "value_error" else problem["msg"]


def _field_name(problem: ErrorDetails, value: Any) -> str:
    """The place of a problem as in ``messages[0].content``, without the names of alternatives that pydantic adds."""
    name, location = "", problem["loc"]
    for position, step in enumerate(location):
        is_last = position == len(location) - 1
        if isinstance(step, int) and isinstance(value, list) and step < len(value):
            name, value = f"{name}[{step}]", value[step]
        elif isinstance(value, dict) and (step in value or (is_last and problem["type"] == "missing")):
            name, value = f"{name}.{step}" if name else str(step), value.get(step)
    return name


def _check_size(value: Any) -> None:
    """Raise for a body that nests too deep or has too many values; one with fewer brackets and bytes cannot."""
    level, count = [value] if isinstance(value, (dict, list)) else [], 0
    if isinstance(value, dict):
        long = {name: value[name] for name in _LONG_LISTS if isinstance(value.get(name), list)}
        count = sum(len(values) for values in long.values() if not set(map(type, values)) < {int, str})
        level = [{name: other for name, other in value.items() if name not in long}]
    for _ in range(MAX_DEPTH):
        count += sum(map(len, level))
        if count > MAX_VALUES:
            raise bad_request(
                f"the body has more than {MAX_VALUES:,} values in arrays and objects, token ids and texts of "
                f"{' and '.join(_LONG_LISTS)} aside: send fewer"
            )
        children = (c for v in level for c in (v.values() if isinstance(v, dict) else v))
        level = [child for child in children if isinstance(child, (dict, list))]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ApiError:
    return bad_request(f"the body nests arrays and objects more than {MAX_DEPTH} deep: make it flatter")


def invalid(message: str) -> PydanticCustomError:
    """What a validator raises."""
    return PydanticCustomError("value_error", "{message}", {"message": message})


def option(name: str, field: str | None = None) -> AfterValidator:
    """Check a value as the sampling parameter ``name`` of the engine, whose name in the body is ``field``."""

    def check(value: Any) -> Any:
        problem = None if value is None else field_problem(name, value)
        if problem is not None:
            raise invalid(problem.replace(name, field or name, 1))
        return value

    return AfterValidator(check)


def refused(reason: str, *neutral: Any) -> BeforeValidator:
    """Refuse a field, with the reason or what to do instead, unless its value is one of ``neutral``."""

    def check(value: Any) -> Any:
        if value is not None and value not in neutral:
            raise invalid(reason)
        return value

    return BeforeValidator(check)


def one_of(*kinds: Callable[[Any], bool], wanted: str) -> BeforeValidator:
    """Check a field that may have several forms; ``wanted`` describes them."""

    def check(value: Any) -> Any:
        if value is not None and not any(kind(value) for kind in kinds):
            raise invalid(f"must be {wanted}")
        return value

    return BeforeValidator(check)


def is_text(value: Any) -> bool:
    """Whether a JSON value is a string."""
    return isinstance(value, str)


def is_texts(value: Any) -> bool:
    """Whether a JSON value is an array of strings, one at least."""
    return isinstance(value, list) and set(map(type, value)) == {str}


def is_whole_numbers(value: Any) -> bool:
    """Whether a JSON value is an array of integers, one at least."""
    return isinstance(value, list) and set(map(type, value)) == {int}
