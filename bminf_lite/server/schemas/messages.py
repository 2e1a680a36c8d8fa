"""Messages and tools of conversations, as OpenAI's clients write them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Tag, model_validator

from .base import Body, invalid, is_text, one_of

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


class ContentPart(Body):
    """A part of a message's content: text, under one of OpenAI's names."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _is_text(self) -> ContentPart:
        if self.type not in TEXT_PARTS:
            raise invalid(f"a part of the type {self.type[:40]!r} is not supported: the model reads text only")
        if self.value is None:
            raise invalid(f"a part of the type {self.type!r} needs a text")
        return self

    @property
    def value(self) -> str | None:
        """The text."""
        return self.refusal if self.type == "refusal" else self.text


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[ContentPart], Tag("parts")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "parts"),
]
"""A text, or a list of parts."""


def plain_content(content: str | list[ContentPart] | None) -> Any:
    """A content as templates get it."""
    if content is None or isinstance(content, str):
        return content or ""
    return [{"type": "text", "text": part.value or ""} for part in content]


class CalledFunction(Body):
    """A function's name and its arguments, as JSON."""

    name: str
    arguments: Annotated[Any, one_of(is_text, lambda v: isinstance(v, dict), wanted="a JSON object, as text")] = "{}"


class MessageToolCall(Body):
    """A call in an assistant's earlier message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise invalid(f"a message of the role {self.role} needs a content")
        return self

    def plain(self) -> dict[str, Any]:
        """The message without what it does not have; ``developer`` is ``system``, which templates know."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": plain_content(self.content)}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump(exclude_none=True) for call in self.tool_calls]
        return message


def _name(name: str) -> str:
    if not 0 < len(name) <= 128 or not all(c.isascii() and (c.isalnum() or c in "_-.") for c in name):
        raise invalid(f"the name {name[:40]!r} must be 1 to 128 letters, digits, dots, underscores or dashes")
    return name


FunctionName = Annotated[str, AfterValidator(_name)]
Parameters = Annotated[
    Any, one_of(lambda value: isinstance(value, dict), wanted="the JSON schema of an object, which is an object")
]


class FunctionDefinition(Body):
    """A function that the model may call; ``parameters`` is the JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: Parameters = None
    strict: bool | None = None


class Tool(Body):
    """A tool of ``/v1/chat/completions``."""

    type: Literal["function"]
    function: FunctionDefinition


def plain_tool(function: FunctionDefinition) -> dict[str, Any]:
    """A tool in OpenAI's form, which templates read."""
    return {"type": "function", "function": function.model_dump(exclude_none=True)}
