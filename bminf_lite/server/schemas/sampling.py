"""The fields that all kinds of generation have: how to choose tokens, and what structure these must have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ...grammar import Structure
from .base import Body, invalid, is_text, one_of, option, refused
from .unsupported import UnsupportedFields

MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
INT64_MIN, UINT64_MAX = -(2**63), 2**64 - 1


def _top_k(value: Any) -> Any:
    return 0 if value == -1 and not isinstance(value, bool) else value


def _seed(value: Any) -> Any:
    """OpenAI's seeds may be negative; the engine's are not."""
    is_negative = isinstance(value, int) and INT64_MIN <= value < 0
    return value & UINT64_MAX if is_negative else value


def _logit_bias(value: Any) -> Any:
    """JSON's keys are texts, the engine's are token ids."""
    if not isinstance(value, dict):
        return value
    if wrong := [key for key in value if not (key.isascii() and key.isdigit() and len(key) < 12)]:
        raise invalid(f"logit_bias has the key {wrong[0][:40]!r}, but keys must be token ids, whole numbers in quotes")
    return {int(key): bias for key, bias in value.items()}


def _stops(value: Any) -> Any:
    """One text or a list of texts, as a list."""
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise invalid("must be a text or a list of texts, none of them empty")
    if len(stops) > MAX_STOPS or any(len(s) > MAX_STOP_LENGTH for s in stops):
        raise invalid(
            f"may have {MAX_STOPS} texts of {MAX_STOP_LENGTH:,} characters at most: give fewer or shorter ones"
        )
    return stops


Stops = Annotated[list[str], BeforeValidator(_stops)]


class SamplingFields(UnsupportedFields):
    """The engine's sampling parameters under OpenAI's and vLLM's names; ``None`` is the checkpoint's default.

    ``deadline``: seconds after which a completion ends. ``stop_token_ids``: tokens that end it. What ends a completion
    is part of its text only with ``include_stop_str_in_output``. ``split_special_tokens``: a prompt, and what users and
    tools say in a conversation, is text, also where it spells control tokens.
    """

    temperature: Annotated[float | None, option("temperature")] = None
    top_p: Annotated[float | None, option("top_p")] = None
    top_k: Annotated[int | None, BeforeValidator(_top_k), option("top_k")] = None
    min_p: Annotated[float | None, option("min_p")] = None
    repetition_penalty: Annotated[float | None, option("repetition_penalty")] = None
    presence_penalty: Annotated[float | None, option("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, option("frequency_penalty")] = None
    seed: Annotated[int | None, BeforeValidator(_seed), option("seed")] = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_logit_bias), option("logit_bias")] = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int | None, option("min_tokens")] = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    deadline: Annotated[float, Field(gt=0, le=1e9)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] | None = None
    include_stop_str_in_output: bool | None = None
    split_special_tokens: bool | None = None

    @property
    def chosen(self) -> dict[str, Any]:
        """What the request says of how to choose tokens, under the engine's names."""
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "seed",
            "logit_bias",
            "ignore_eos",
            "min_tokens",
        )
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class StreamOptions(Body):
    """``include_usage``: a last chunk with the usage; with ``continuous_usage_stats`` every chunk has it."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def is_schema(value: Any) -> bool:
    """Whether a JSON value may be a JSON schema."""
    return isinstance(value, (dict, bool))


class JsonSchemaFormat(Body):
    """The ``json_schema`` of a response format."""

    name: str | None = None
    schema_: Annotated[Any, one_of(is_schema, wanted="a JSON schema, which is an object"), Field(alias="schema")]


SchemaField = Annotated[Any, one_of(is_schema, wanted="a JSON schema, which is an object"), Field(alias="schema")]


def format_structure(field: str, kind: str, nested: Any, schema: Any) -> list[Structure]:
    """What a format of the type ``kind`` asks for: none or one structure.

    ``nested`` is the schema in its ``json_schema``, ``schema`` the one beside its type. llama.cpp, Together and
    Fireworks take the latter for the type ``json_object`` too.
    """
    if nested is not None:
        return [Structure(f"{field}.json_schema.schema", "json_schema", nested)]
    if schema is not None:
        return [Structure(f"{field}.schema", "json_schema", schema)]
    return [Structure(field, "json_object", True)] if kind == "json_object" else []


class ResponseFormat(Body):
    """``text``, ``json_object``, or ``json_schema`` with a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: SchemaField = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise invalid("the type json_schema needs a json_schema with a schema")
        if self.json_schema is not None and (self.type != "json_schema" or self.schema_ is not None):
            raise invalid("a json_schema needs the type json_schema, and no other schema beside it")
        if self.type == "text" and self.schema_ is not None:
            raise invalid("a schema needs the type json_schema or json_object")
        return self

    @property
    def structures(self) -> list[Structure]:
        """What it asks for: none or one structure."""
        nested = None if self.json_schema is None else self.json_schema.schema_
        return format_structure("response_format", self.type, nested, self.schema_)


class StructuredOutputs(Body):
    """vLLM's ``structured_outputs``: exactly one of its kinds."""

    json_: Annotated[Any, one_of(is_schema, is_text, wanted="a JSON schema"), Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Annotated[
        Any, refused("structural_tag is not supported: use json, regex, choice, grammar or json_object")
    ] = None
    whitespace_pattern: Annotated[Any, refused("is not supported: white space in JSON is limited anyway")] = None
    disable_any_whitespace: Annotated[Any, refused("is not supported: JSON may have some white space", False)] = None
    disable_additional_properties: Annotated[
        Any, refused("is not supported: say additionalProperties in the schema", False)
    ] = None

    @model_validator(mode="after")
    def _is_one_kind(self) -> StructuredOutputs:
        kinds = (self.json_, self.regex, self.choice, self.grammar, self.json_object or None)
        if sum(kind is not None for kind in kinds) != 1:
            raise invalid("must have exactly one of json, regex, choice, grammar and json_object")
        return self


_NO_STRUCTURE = StructuredOutputs.model_construct()


class StructureFields(Body):
    """The structure that the text must have, under OpenAI's and vLLM's present and former names."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[Any, one_of(is_schema, is_text, wanted="a JSON schema")] = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def structures(self) -> list[Structure]:
        """The structures that the fields ask for; more than one is an error."""
        vllm = self.structured_outputs or _NO_STRUCTURE
        found = [
            *([] if self.response_format is None else self.response_format.structures),
            Structure("structured_outputs.json_object", "json_object", vllm.json_object or None),
            Structure("structured_outputs.json", "json_schema", vllm.json_),
            Structure("structured_outputs.regex", "regex", vllm.regex),
            Structure("structured_outputs.choice", "choice", vllm.choice),
            Structure("structured_outputs.grammar", "lark", vllm.grammar),
            Structure("guided_json", "json_schema", self.guided_json),
            Structure("guided_regex", "regex", self.guided_regex),
            Structure("guided_choice", "choice", self.guided_choice),
            Structure("guided_grammar", "lark", self.guided_grammar),
        ]
        return [structure for structure in found if structure.value is not None]
