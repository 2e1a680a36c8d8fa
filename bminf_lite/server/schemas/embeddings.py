"""The bodies of ``/v1/embeddings``, ``/v1/rerank``, ``/score`` and ``/classify``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .base import Body, invalid, is_text, is_texts, is_whole_numbers, one_of
from .unsupported import FieldsOfTexts

MAX_INPUTS = 2048
"""Texts of a request, as in OpenAI's interface."""


def is_token_lists(value: Any) -> bool:
    """Whether a JSON value is an array of arrays of integers, one at least."""
    return isinstance(value, list) and bool(value) and all(is_whole_numbers(item) for item in value)


Input = Annotated[
    Any,
    one_of(
        is_text,
        is_texts,
        is_whole_numbers,
        is_token_lists,
        wanted="a text, an array of texts, token ids, or an array of token ids",
    ),
]
Texts = Annotated[Any, one_of(is_text, is_texts, wanted="a text, or an array of texts")]


class EmbeddingBody(FieldsOfTexts):
    """OpenAI's, with the name of a prompt or a prompt, ``normalize`` and ``truncate`` besides."""

    model: str | None = None
    input: Input = Field()
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    normalize: bool | None = None
    truncate: bool | None = None

    @property
    def inputs(self) -> list[Any]:
        """The texts, or their tokens."""
        return [self.input] if is_text(self.input) or is_whole_numbers(self.input) else list(self.input)


class Document(Body):
    """A document of Cohere's interface."""

    text: str


class RerankBody(FieldsOfTexts):
    """Cohere's and Jina's, and an ``instruction`` for a model that generates."""

    model: str | None = None
    query: str
    documents: Annotated[list[str | Document], Field(min_length=1)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    truncate: bool | None = None
    instruction: str | None = None

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return [document if isinstance(document, str) else document.text for document in self.documents]


class ScoreBody(FieldsOfTexts):
    """vLLM's: one text with each of several, or pairs; and an ``instruction`` for a model that generates."""

    model: str | None = None
    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = None
    documents: Texts = None
    truncate: bool | None = None
    instruction: str | None = None

    @model_validator(mode="after")
    def _has_pairs(self) -> ScoreBody:
        first, second = self.sides
        if not first or not second:
            raise invalid("text_1 and text_2 must be given, or queries and documents")
        if len(first) not in (1, len(second)):
            raise invalid(f"text_1 has {len(first)} texts and text_2 {len(second)}: give one, or as many")
        return self

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """The first and the second texts."""

        def listed(value: Any) -> list[str]:
            return [value] if isinstance(value, str) else list(value or ())

        first = self.queries if self.text_1 is None else self.text_1
        return listed(first), listed(self.documents if self.text_2 is None else self.text_2)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of texts."""
        first, second = self.sides
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


class ClassifyBody(FieldsOfTexts):
    """vLLM's."""

    model: str | None = None
    input: Texts = Field()
    truncate: bool | None = None

    @property
    def texts(self) -> list[str]:
        """The texts."""
        return [self.input] if isinstance(self.input, str) else list(self.input)
