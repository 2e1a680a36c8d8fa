"""The bodies of ``/tokenize``, ``/detokenize`` and ``/v1/fill_blank``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import FailFast, Field, model_validator

from .base import Body, invalid, option, refused
from .chat import TEMPLATE_REFUSED, check_template_variables
from .messages import ChatMessage, Tool
from .sampling import SamplingFields


class TokenizeBody(Body):
    """vLLM's: a ``prompt``, or ``messages`` by the chat template."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_generation_prompt: bool | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Annotated[Any, refused(TEMPLATE_REFUSED)] = None
    return_token_strs: bool | None = None
    split_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _has_one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt or messages must be given, and not both")
        check_template_variables(self.chat_template_kwargs)
        return self


class DetokenizeBody(Body):
    """vLLM's."""

    model: str | None = None
    tokens: Annotated[list[int], FailFast()]


class FillBlankBody(SamplingFields):
    """A text with ``<span>`` for each blank."""

    include_stop_str_in_output: Annotated[Any, refused("is not supported: a blank ends where the next one begins")] = (
        None
    )

    split_special_tokens: Annotated[Any, refused("is not supported: a text with blanks has special tokens", False)] = (
        None
    )
    model: str | None = None
    text: str
    max_tokens: Annotated[int | None, option("max_new_tokens", "max_tokens")] = None
