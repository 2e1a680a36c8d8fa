"""The body of ``/v1/completions``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from .base import invalid, is_text, is_texts, is_whole_numbers, one_of, option, refused
from .sampling import SamplingFields, Stops, StreamOptions, StructureFields

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this interface."""


class CompletionBody(SamplingFields, StructureFields):
    """See https://platform.openai.com/docs/api-reference/completions/create."""

    model: str | None = None
    prompt: Annotated[
        Any,
        one_of(
            is_text,
            is_texts,
            is_whole_numbers,
            lambda value: isinstance(value, list) and bool(value) and all(map(is_whole_numbers, value)),
            wanted="a text, a list of texts, a list of token ids, or a list of such lists; no list may be empty",
        ),
    ]
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    stop: Stops = Field(default_factory=list)
    logprobs: Annotated[int | None, option("logprobs")] = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    suffix: Annotated[Any, refused("suffix is not supported: models here continue a prompt only", "")] = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens is 0, but must be 1 or more unless echo is true")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise invalid(f"best_of is {self.best_of}, but must be at least n, which is {self.n or 1}")
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise invalid(f"best_of is {self.best_of}, more than n: results of a choice cannot be streamed")
        if self.prompt is None:
            raise invalid("prompt is missing")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as token ids."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt
