"""The body of ``/v1/responses``, and its items as messages of a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag, model_validator

from ...grammar import Structure
from .base import Body, invalid, option, refused
from .chat import NamedFunction, ToolChoice, Word, check_template_variables, check_tool_choice, kind_of_choice
from .messages import Content, FunctionName, Parameters, plain_content
from .sampling import SamplingFields, SchemaField, format_structure
from .unsupported import FieldsOfChats

STATELESS = "this server keeps no responses: set store to false and send the whole conversation as the input"


class InputMessage(Body):
    """A message of the input."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class FunctionCall(Body):
    """A call in an earlier response."""

    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(Body):
    """The result of a call."""

    call_id: str
    output: Content


class ReasoningText(Body):
    """A part of reasoning."""

    text: str | None = None


class ReasoningItem(Body):
    """The reasoning of an earlier response."""

    content: list[ReasoningText] | None = None


class OtherItem(Body):
    """An item of a type that is not supported."""

    type: Any = None

    @model_validator(mode="after")
    def _refuse(self) -> OtherItem:
        reason = STATELESS if self.type == "item_reference" else "give messages, function calls and their outputs"
        raise invalid(f"items of the type {str(self.type)[:40]!r} are not supported: {reason}")


_KINDS = ("function_call", "function_call_output", "reasoning")


def _kind(value: Any) -> str:
    kind = value.get("type", "message") if isinstance(value, dict) else "other"
    return kind if isinstance(kind, str) and kind in ("message", *_KINDS) else "other"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_kind),
]


class ResponseTool(Body):
    """A function. Tools of other types are skipped."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Parameters = None
    strict: bool | None = None

    def plain(self) -> dict[str, Any]:
        """OpenAI's form of chat completions, which templates read."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class SkippedTool(Body):
    """A tool that OpenAI would run itself."""

    type: str


ResponseToolField = Annotated[
    Annotated[ResponseTool, Tag("function")] | Annotated[SkippedTool, Tag("other")],
    Discriminator(lambda value: "function" if isinstance(value, dict) and value.get("type") == "function" else "other"),
]


class ResponseToolChoice(NamedFunction):
    """A tool choice that names a function."""

    type: Literal["function"]


class AllowedTool(Body):
    """One of the tools that may be called."""

    type: str
    name: str | None = None


class AllowedToolsChoice(Body):
    """A tool choice of some of the tools. Those of other types than ``function`` are skipped."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


ToolChoiceField = Annotated[
    Annotated[Word, Tag("word")]
    | Annotated[ResponseToolChoice, Tag("named")]
    | Annotated[AllowedToolsChoice, Tag("allowed")],
    Discriminator(kind_of_choice),
]


class TextFormat(Body):
    """``text``, ``json_object``, or ``json_schema`` with a ``schema``."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: SchemaField = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise invalid("the type json_schema needs a schema")
        if self.type == "text" and self.schema_ is not None:
            raise invalid("a schema needs the type json_schema or json_object")
        return self


class TextConfig(Body):
    """What form the text has."""

    format: TextFormat | None = None


class ReasoningConfig(Body):
    """How much a model reasons, as :func:`.effort_variables` reads it."""

    effort: str | None = None


class ResponsesBody(SamplingFields, FieldsOfChats):
    """See https://platform.openai.com/docs/api-reference/responses/create."""

    model: str | None = None
    input: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[Item], Tag("items")],
        Discriminator(lambda value: "text" if isinstance(value, str) else "items"),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, option("max_new_tokens", "max_output_tokens")] = None
    stream: bool | None = None
    tools: list[ResponseToolField] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int | None, option("logprobs", "top_logprobs")] = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    previous_response_id: Annotated[Any, refused(STATELESS)] = None
    conversation: Annotated[Any, refused(STATELESS)] = None
    prompt: Annotated[Any, refused("prompt templates are not kept here: send the text as the input")] = None
    background: bool | None = None
    max_tokens: Annotated[Any, refused("is not supported here: its name is max_output_tokens")] = None
    stop: Annotated[Any, refused("is not supported here: use /v1/chat/completions", [])] = None
    logprobs: Annotated[Any, refused("is not supported here: use top_logprobs", False)] = None

    @model_validator(mode="after")
    def _fits_together(self) -> ResponsesBody:
        if self.background:
            raise invalid("background is true, but this server keeps no responses: leave it out")
        check_template_variables(self.chat_template_kwargs)
        check_tool_choice(self.choice, [tool.name for tool in self.functions])
        if isinstance(self.input, list) and not self.messages:
            raise invalid("input has no messages")
        return self

    @property
    def functions(self) -> list[ResponseTool]:
        """The tools that can be called."""
        return [tool for tool in self.tools or () if isinstance(tool, ResponseTool)]

    @property
    def choice(self) -> ToolChoice:
        """The tool choice; ``auto`` if there are tools and the request does not say."""
        given = self.tool_choice
        if isinstance(given, AllowedToolsChoice):
            return ToolChoice(mode=given.mode, allowed=[t.name or "" for t in given.tools if t.type == "function"])
        return ToolChoice.of(given, bool(self.functions))

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text's tokens are reported with their log-probabilities."""
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)

    @property
    def structures(self) -> list[Structure]:
        """The structure that the text must have: none or one."""
        form = None if self.text is None else self.text.format
        return [] if form is None else format_structure("text.format", form.type, None, form.schema_)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The input as a conversation. Calls and reasoning join the message of the assistant beside them."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        assistant: dict[str, Any] | None = None
        for item in self.input:
            is_answer = isinstance(item, (FunctionCall, ReasoningItem)) or (
                isinstance(item, InputMessage)
                and item.role == "assistant"
                and assistant is not None
                and not assistant["content"]
                and "tool_calls" not in assistant
            )
            if not is_answer or assistant is None:
                assistant = None
            if isinstance(item, FunctionCallOutput):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": plain_content(item.output)})
            elif isinstance(item, InputMessage) and assistant is None:
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": plain_content(item.content)})
                assistant = messages[-1] if role == "assistant" else None
            else:
                if assistant is None:
                    assistant = {"role": "assistant", "content": ""}
                    messages.append(assistant)
                _join(assistant, item)
        for message in messages:
            if "reasoning_content" in message:
                message["reasoning_content"] = "".join(message["reasoning_content"])
        return [m for m in messages if m["content"] or len(m) > 2 or m["role"] != "assistant"]


def _join(assistant: dict[str, Any], item: Any) -> None:
    """Add a part of an answer to its message."""
    if isinstance(item, FunctionCall):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        assistant.setdefault("tool_calls", []).append(call)
    elif isinstance(item, ReasoningItem):
        if text := "".join(part.text or "" for part in item.content or ()):
            assistant.setdefault("reasoning_content", []).append(text)
    else:
        assistant["content"] = plain_content(item.content)
