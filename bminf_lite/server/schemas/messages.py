"""The messages of conversations, as OpenAI's clients write them and as chat templates read them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Discriminator, Tag, model_validator

from .base import Body, invalid, is_text, one_of
from .sampling import is_schema

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


class ContentPart(Body):
    """A part of a message's content: text under one of OpenAI's names."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _is_text(self) -> ContentPart:
        if self.type not in TEXT_PARTS:
            raise invalid(
                f"parts of the type {self.type[:40]!r} are not supported: this server's models read text only"
            )
        if self.value is None:
            raise invalid(f"a part of the type {self.type!r} needs a text")
        return self

    @property
    def value(self) -> str | None:
        """The text."""
        return self.refusal if self.type == "refusal" else self.text


def _form(value: Any) -> str:
    return "text" if isinstance(value, str) else "parts"


Content = Annotated[Annotated[str, Tag("text")] | Annotated[list[ContentPart], Tag("parts")], Discriminator(_form)]
"""A text, or a list of parts."""


def text_of(content: str | list[ContentPart] | None) -> str:
    """The text of a message; parts are on lines of their own."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.value or "" for part in content)


class CalledFunction(Body):
    """A function's name and its arguments, as JSON."""

    name: str
    arguments: Annotated[Any, one_of(is_text, lambda v: isinstance(v, dict), wanted="a JSON object, as text")] = "{}"


class MessageToolCall(Body):
    """A call in an assistant's earlier message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """As templates read it: with the arguments as an object."""
        function = {"name": self.function.name, "arguments": decoded_arguments(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": function}


def decoded_arguments(arguments: Any) -> Any:
    """The arguments of a call as a JSON value, which templates write themselves; the text where it is not JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.decode(arguments or "{}")
    except (msgspec.MsgspecError, RecursionError):
        return arguments  # a model wrote it


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
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.reasoning_content)):
            raise invalid(f"a message of the role {self.role} needs a content")
        return self

    def for_template(self) -> dict[str, Any]:
        """As templates read it: ``developer`` is ``system``, and the content is a text."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text_of(self.content)}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


class FunctionDefinition(Body):
    """A function that the model may call; ``parameters`` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: Annotated[Any, one_of(is_schema, wanted="a JSON schema, which is an object")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_name(self) -> FunctionDefinition:
        check_name(self.name)
        return self

    def for_template(self) -> dict[str, Any]:
        """OpenAI's form, which templates read."""
        function: dict[str, Any] = {"name": self.name, "description": self.description or ""}
        function["parameters"] = {"type": "object", "properties": {}} if self.parameters is None else self.parameters
        return {"type": "function", "function": function}


def check_name(name: str) -> None:
    """Raise for a name that OpenAI refuses too: it may have letters, digits, underscores, dashes and dots."""
    if not 0 < len(name) <= 128 or not all(c.isascii() and (c.isalnum() or c in "_-.") for c in name):
        raise invalid(f"the name {name[:40]!r} must have 1 to 128 letters, digits, dots, underscores or dashes")


class Tool(Body):
    """A tool of ``/v1/chat/completions``."""

    type: Literal["function"]
    function: FunctionDefinition
