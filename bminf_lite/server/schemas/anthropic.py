"""The body of ``/v1/messages``, and its messages as OpenAI's, which chat templates read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Discriminator, Field, Tag, model_validator

from ...grammar import Structure
from .base import Body, invalid, one_of, option, refused
from .chat import ToolChoice, check_template_variables, check_tool_choice
from .messages import FunctionName, Parameters
from .sampling import SamplingFields, SchemaField, Stops, format_structure
from .unsupported import FieldsOfChats


class TextBlock(Body):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """Reasoning of an earlier answer; redacted reasoning has no text."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


class ToolUseBlock(Body):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[Any, one_of(lambda value: isinstance(value, dict), wanted="an object")] = None


class OtherBlock(Body):
    """A block of a type that is not supported."""

    type: Any = None

    @model_validator(mode="after")
    def _refuse(self) -> OtherBlock:
        raise invalid(f"blocks of the type {str(self.type)[:40]!r} are not supported here: the model reads text only")


def _block_kind(*kinds: str) -> Discriminator:
    def find(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else None
        kind = "thinking" if kind == "redacted_thinking" else kind
        return kind if isinstance(kind, str) and kind in kinds else "other"

    return Discriminator(find)


def _text_or_blocks(value: Any) -> str:
    return "text" if isinstance(value, str) else "blocks"


TextOrOther = Annotated[Annotated[TextBlock, Tag("text")] | Annotated[OtherBlock, Tag("other")], _block_kind("text")]
TextContent = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TextOrOther], Tag("blocks")], Discriminator(_text_or_blocks)
]
"""A text, or a list of blocks of text."""


class ToolResultBlock(Body):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextContent | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[OtherBlock, Tag("other")],
    _block_kind("text", "thinking", "tool_use", "tool_result"),
]


def _text(content: Any) -> str:
    """The text of a content; its blocks are on lines of their own."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content if isinstance(block, TextBlock))


def _without_accounting(system: Iterable[TextOrOther]) -> list[TextOrOther]:
    """The blocks of a system message but Claude Code's first one: it differs in each request, so no cache would fit."""
    return [b for b in system if not (isinstance(b, TextBlock) and b.text.startswith("x-anthropic-billing-header:"))]


class AnthropicMessage(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[Block], Tag("blocks")], Discriminator(_text_or_blocks)
    ]

    @model_validator(mode="after")
    def _has_its_blocks(self) -> AnthropicMessage:
        wrong = ToolResultBlock if self.role == "assistant" else (ToolUseBlock, ThinkingBlock)
        for block in self.content if isinstance(self.content, list) else ():
            if isinstance(block, wrong):
                raise invalid(f"a message of the role {self.role} cannot have a block of the type {block.type}")
        return self

    def plain(self) -> list[dict[str, Any]]:
        """The message as OpenAI's: results of calls are messages of their own, before the text."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        messages: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
            for block in self.content
            if isinstance(block, ToolResultBlock)
        ]
        message: dict[str, Any] = {"role": self.role, "content": _text(self.content)}
        if thinking := "".join(block.thinking for block in self.content if isinstance(block, ThinkingBlock)):
            message["reasoning_content"] = thinking
        calls = [
            {
                "id": block.id,
                "type": "function",
                "function": {"name": block.name, "arguments": msgspec.json.encode(block.input or {}).decode()},
            }
            for block in self.content
            if isinstance(block, ToolUseBlock)
        ]
        if calls:
            message["tool_calls"] = calls
        if message["content"] or calls or not messages:
            messages.append(message)
        return messages


class CustomTool(Body):
    """A function. Tools of other types, which Anthropic runs itself, are skipped."""

    name: FunctionName
    description: str | None = None
    input_schema: Parameters
    strict: bool | None = None

    def plain(self) -> dict[str, Any]:
        """OpenAI's form, which templates read."""
        given = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict,
        }
        return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}


class SkippedTool(Body):
    """A tool that Anthropic would run itself."""

    type: str


def _tool_kind(value: Any) -> str:
    return "other" if isinstance(value, dict) and value.get("type") not in (None, "custom") else "custom"


ToolField = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[SkippedTool, Tag("other")], Discriminator(_tool_kind)
]


class AnthropicToolChoice(Body):
    """Which tools must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model reasons: the variable ``enable_thinking`` of the chat template."""

    type: str


class OutputFormat(Body):
    """A JSON schema that the answer must have."""

    type: Literal["json_schema"]
    schema_: SchemaField

    @model_validator(mode="after")
    def _has_schema(self) -> OutputFormat:
        if self.schema_ is None:
            raise invalid("the type json_schema needs a schema")
        return self


class OutputConfig(Body):
    """What form the answer has."""

    format: OutputFormat | None = None


_NO_LOGPROBS = "is not supported here: use /v1/chat/completions"


class MessagesBody(SamplingFields, FieldsOfChats):
    """See https://docs.anthropic.com/en/api/messages. The model may have any name.

    ``output_format`` is the name of ``output_config.format`` in the beta of structured outputs.
    """

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: TextContent | None = None
    tools: list[ToolField] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stop: Annotated[Any, refused("is not supported here: its name is stop_sequences", [])] = None
    logprobs: Annotated[Any, refused(_NO_LOGPROBS, False)] = None
    top_logprobs: Annotated[Any, refused(_NO_LOGPROBS, 0)] = None

    @model_validator(mode="after")
    def _fits_together(self) -> MessagesBody:
        check_template_variables(self.chat_template_kwargs)
        check_tool_choice(self.choice, [tool.name for tool in self.functions])
        return self

    @property
    def functions(self) -> list[CustomTool]:
        """The tools that can be called."""
        return [tool for tool in self.tools or () if isinstance(tool, CustomTool)]

    @property
    def choice(self) -> ToolChoice:
        """The tool choice; ``auto`` if there are tools and the request does not say."""
        given = self.tool_choice
        if given is None:
            return ToolChoice(mode="auto" if self.functions else "none")
        if given.type == "tool":
            return ToolChoice(mode="function", name=given.name)
        return ToolChoice(mode="required" if given.type == "any" else given.type)

    @property
    def structures(self) -> list[Structure]:
        """The structure that the answer must have: none or one."""
        formats = {
            "output_config.format": None if self.output_config is None else self.output_config.format,
            "output_format": self.output_format,
        }
        return [
            structure
            for field, form in formats.items()
            if form is not None
            for structure in format_structure(field, form.type, None, form.schema_)
        ]

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template. A model that can leave out its reasoning does, unless asked for it."""
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        return {"enable_thinking": thinks, **(self.chat_template_kwargs or {})}

    @property
    def plain_messages(self) -> list[dict[str, Any]]:
        """The conversation in OpenAI's form."""
        system = self.system if isinstance(self.system, str) else _text(_without_accounting(self.system or ()))
        messages = [{"role": "system", "content": system}] if system else []
        return messages + [plain for message in self.messages for plain in message.plain()]


class CreateMessageBody(MessagesBody):
    """What generating needs beside the conversation."""

    max_tokens: Annotated[int, option("max_new_tokens", "max_tokens")]
    stop_sequences: Stops = Field(default_factory=list)
    stream: bool | None = None
