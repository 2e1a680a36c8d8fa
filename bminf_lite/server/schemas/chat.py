"""The body of ``/v1/chat/completions``."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from ...text.prompts import PromptEncoder
from ...text.tokenizer_settings import NAMES
from .base import Body, invalid, option, refused
from .messages import ChatMessage, Tool
from .sampling import SamplingFields, Stops, StreamOptions, StructureFields

TEMPLATE_REFUSED = "templates in requests are not accepted, because they are programs: the checkpoint's is used"
RESERVED = frozenset(
    {
        *inspect.signature(PromptEncoder.render).parameters,
        "documents",
        "continue_final_message",
        "chat_template",
        *NAMES,
    }
)
"""Variables of a template that a request sets otherwise, or not at all."""


Word = Literal["none", "auto", "required"]
"""A tool choice that names no function."""


class NamedFunction(Body):
    """A tool choice that names a function: as a whole in ``/v1/responses``, and a part of it in chat completions."""

    name: str


class NamedTool(Body):
    """A tool choice that names a function."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    """The tools that may be called, and whether one of them must be."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedToolsChoice(Body):
    """A tool choice of some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def kind_of_choice(value: Any) -> str:
    """The tag of a tool choice."""
    if not isinstance(value, dict):
        return "word"
    return "allowed" if value.get("type") == "allowed_tools" else "named"


ToolChoiceField = Annotated[
    Annotated[Word, Tag("word")] | Annotated[NamedTool, Tag("named")] | Annotated[AllowedToolsChoice, Tag("allowed")],
    Discriminator(kind_of_choice),
]


class ToolChoice(Body):
    """Which tools must be called: ``none``, ``auto``, ``required``, or ``function`` for the one of this ``name``.

    ``allowed`` are the names of those that may be called; None allows all.
    """

    mode: Literal["none", "auto", "required", "function"]
    name: str | None = None
    allowed: list[str] | None = None

    @classmethod
    def of(cls, given: Word | NamedFunction | None, has_tools: bool) -> ToolChoice:
        """What a request says; without a word, ``auto`` if there are tools."""
        if isinstance(given, NamedFunction):
            return cls(mode="function", name=given.name)
        return cls(mode=given or ("auto" if has_tools else "none"))


NO_TOOLS = ToolChoice(mode="none")


def check_tool_choice(choice: ToolChoice, names: list[str]) -> None:
    """Raise for a choice that tools of these names do not allow."""
    known = frozenset(names)
    if len(known) < len(names):
        raise invalid(f"tools has the name {Counter(names).most_common(1)[0][0]!r} twice")
    if unknown := [name for name in choice.allowed or () if name not in known]:
        raise invalid(f"tool_choice allows {unknown[0]!r}, but the tools are {', '.join(names)}")
    if choice.mode in ("required", "function") and not (names if choice.allowed is None else choice.allowed):
        raise invalid("tool_choice needs tools")
    if choice.mode == "function" and choice.name not in names:
        raise invalid(f"tool_choice names {choice.name!r}, but the tools are {', '.join(names)}")


def check_template_variables(variables: dict[str, Any] | None) -> None:
    """Raise for variables of a template that a request may not set."""
    if reserved := RESERVED & (variables or {}).keys():
        reason = TEMPLATE_REFUSED if "chat_template" in reserved else "use the field of the request"
        raise invalid(f"chat_template_kwargs has {', '.join(sorted(reserved))}: {reason}")


def effort_variables(effort: str | None) -> dict[str, object]:
    """The variables of the chat template for an effort of reasoning, as in vLLM: ``none`` turns reasoning off."""
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


class ChatBody(SamplingFields, StructureFields):
    """See https://platform.openai.com/docs/api-reference/chat/create.

    Of vLLM and SGLang: ``chat_template_kwargs`` are variables of the chat template, and so are ``documents``;
    ``continue_final_message`` continues the last message, and without ``add_generation_prompt`` (true by default) the
    prompt ends with it; ``add_special_tokens`` frames the template's text as a plain prompt. ``separate_reasoning``
    (true by default) takes reasoning out of the content, and without ``include_reasoning`` (true by default) the
    response has none. ``reasoning_effort`` is read by :func:`effort_variables`.
    """

    model: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int | None, option("max_new_tokens", "max_tokens")] = None
    max_completion_tokens: Annotated[int | None, option("max_new_tokens", "max_completion_tokens")] = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: Stops = Field(default_factory=list)
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, option("logprobs", "top_logprobs")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[dict[str, Any]] | None = None
    echo: Annotated[Any, refused("is not supported here: /v1/completions has it", False)] = None
    best_of: Annotated[Any, refused("is not supported here: /v1/completions has it", 1)] = None
    modalities: Annotated[Any, refused("only text is supported", ["text"])] = None
    audio: Annotated[Any, refused("only text is supported")] = None
    web_search_options: Annotated[Any, refused("is not supported: the server searches nothing")] = None
    chat_template: Annotated[Any, refused(TEMPLATE_REFUSED)] = None
    functions: Annotated[Any, refused("functions is not supported: use tools")] = None
    function_call: Annotated[Any, refused("function_call is not supported: use tool_choice")] = None

    @model_validator(mode="after")
    def _fits_together(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs to be true")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise invalid("continue_final_message needs a last message of the assistant")
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("add_generation_prompt and continue_final_message are true, but exclude each other")
        check_template_variables(self.chat_template_kwargs)
        check_tool_choice(self.choice, [tool.function.name for tool in self.tools or []])
        return self

    @property
    def template_variables(self) -> dict[str, object]:
        """The variables of the chat template that the request sets."""
        documents = {} if self.documents is None else {"documents": self.documents}
        return {**effort_variables(self.reasoning_effort), **documents, **(self.chat_template_kwargs or {})}

    @property
    def choice(self) -> ToolChoice:
        """The tool choice; ``auto`` if there are tools and the request does not say."""
        given = self.tool_choice
        if isinstance(given, AllowedToolsChoice):
            some = given.allowed_tools
            return ToolChoice(mode=some.mode, allowed=[tool.function.name for tool in some.tools])
        return ToolChoice.of(given.function if isinstance(given, NamedTool) else given, bool(self.tools))
