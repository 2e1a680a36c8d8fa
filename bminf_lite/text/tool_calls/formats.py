"""The forms in which models write calls of functions."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...errors import UsageError, choices
from ..reasoning import HARMONY as HARMONY_REASONING
from ..reasoning import HARMONY_CALL, MESSAGE

Tool = Mapping[str, Any]
"""OpenAI's form: ``{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}``."""


@dataclass(frozen=True)
class XmlTags:
    """The tags of a call in XML. Each pair encloses what it is called after; white space may stand between tags.

    ``padding`` precedes and follows a value. If ``has_lines``, a line ends behind the tags of the function and of each
    parameter.
    """

    function: tuple[str, str] = ("<function=", ">")
    key: tuple[str, str] = ("<parameter=", ">")
    value: tuple[str, str] = ("", "</parameter>")
    end: str = "</function>"
    padding: str = "\n"
    has_lines: bool = True


@dataclass(frozen=True)
class ToolFormat:
    """A form in which models write calls. ``begin`` and ``end`` enclose a call; they may be special tokens.

    - ``syntax`` of what is between them:

      - ``json``: an object with the function's ``name`` and its arguments, whose key is ``arguments_key``. If
        ``is_list``, a list of such objects.
      - ``named``: the name, ``arguments_mark``, and the arguments as JSON.
      - ``marked``: calls like ``named`` ones, each within ``call_marks``. If ``is_fenced``, the word ``function`` and
        another ``arguments_mark`` precede the name, and the arguments are within a fence of Markdown.
      - ``xml``: the function's name and its arguments, each a text, within ``tags``.
      - ``python``: a list of calls as Python writes them.
      - ``braces``: ``call:``, the name, and the arguments in braces. Keys have no quotes, and strings stand within
        ``string_mark``.
    - ``has_bare_calls``: an answer that begins with a call may leave out ``begin``.
    - ``constraint``: what may stand behind the name of a ``named`` call.
    - ``id_prefix``: the model writes an id instead of the name: this text, the name, a colon and a number.
    - ``text_mark``: what precedes an answer that is text.
    - ``is_generic``: the chat template gets a description of the functions in a message, by :func:`.generic_messages`.
    """

    name: str
    begin: str
    end: str = ""
    syntax: Literal["json", "named", "marked", "xml", "python", "braces"] = "json"
    arguments_key: str = "arguments"
    has_bare_calls: bool = False
    is_list: bool = False
    arguments_mark: str = ""
    call_marks: tuple[str, str] = ("", "")
    is_fenced: bool = False
    constraint: str = ""
    id_prefix: str = ""
    tags: XmlTags = XmlTags()
    string_mark: str = ""
    text_mark: str = ""
    is_generic: bool = False

    @property
    def visible_tokens(self) -> tuple[str, ...]:
        """The texts that a detokenizer must not drop if they are special tokens."""
        marks: tuple[str, ...] = (self.begin, self.end, *self.call_marks, self.arguments_mark, self.string_mark)
        if self.syntax == "named":
            marks += (CALL_ID,)
        if self.tags.value[0]:
            marks += (*self.tags.key, *self.tags.value)
        return tuple(mark for mark in marks if mark)

    def new_call_id(self) -> str:
        """A random id of nine letters and digits: Mistral's templates refuse others."""
        if self.begin == _MISTRAL:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


_MISTRAL = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
"""In the form ``named``, an id may stand behind this mark and before the arguments."""
HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
LLAMA3_JSON = ToolFormat("llama3_json", "<|python_tag|>", arguments_key="parameters", has_bare_calls=True)
MISTRAL = ToolFormat("mistral", _MISTRAL, is_list=True)
MISTRAL_ARGS = ToolFormat("mistral_args", _MISTRAL, syntax="named", arguments_mark="[ARGS]")
QWEN3_CODER = ToolFormat("qwen3_coder", "<tool_call>", "</tool_call>", syntax="xml")
SEED_OSS = ToolFormat("seed_oss", "<seed:tool_call>", "</seed:tool_call>", syntax="xml", tags=XmlTags(padding=""))
GLM45 = ToolFormat(
    "glm45",
    "<tool_call>",
    "</tool_call>",
    syntax="xml",
    tags=XmlTags(("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "", "", has_lines=False),
)
MINIMAX_M2 = ToolFormat(
    "minimax_m2",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    syntax="xml",
    is_list=True,
    tags=XmlTags(('<invoke name="', '">'), ('<parameter name="', '">'), end="</invoke>", padding=""),
)
DEEPSEEK_V31 = ToolFormat(
    "deepseek_v31",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    syntax="marked",
    arguments_mark="<｜tool▁sep｜>",
    call_marks=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
)
DEEPSEEK_V3 = replace(DEEPSEEK_V31, name="deepseek_v3", is_fenced=True)
KIMI_K2 = ToolFormat(
    "kimi_k2",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    syntax="marked",
    arguments_mark="<|tool_call_argument_begin|>",
    call_marks=("<|tool_call_begin|>", "<|tool_call_end|>"),
    id_prefix="functions.",
)
LLAMA4_PYTHONIC = ToolFormat(
    "llama4_pythonic", "<|python_start|>", "<|python_end|>", syntax="python", has_bare_calls=True
)
LFM2 = ToolFormat("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", syntax="python")
GEMMA4 = ToolFormat("gemma4", "<|tool_call>", "<tool_call|>", syntax="braces", string_mark='<|"|>')
HARMONY = ToolFormat(
    "harmony",
    HARMONY_CALL,
    "<|call|>",
    syntax="named",
    arguments_mark=MESSAGE,
    constraint=" <|constrain|>json",
    text_mark=HARMONY_REASONING.answer,
)
GENERIC = ToolFormat("generic", "<tool_call>", "</tool_call>", is_generic=True)

TOOL_FORMATS = {
    form.name: form
    for form in (
        HERMES,
        QWEN3_CODER,
        GLM45,
        SEED_OSS,
        MINIMAX_M2,
        LLAMA3_JSON,
        LLAMA4_PYTHONIC,
        LFM2,
        MISTRAL,
        MISTRAL_ARGS,
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        KIMI_K2,
        GEMMA4,
        HARMONY,
        GENERIC,
    )
}
"""The formats by name: an option may choose one instead of what :func:`find_tool_format` finds."""


def find_tool_format(template: str | None, has_token: Callable[[str], bool]) -> ToolFormat:
    """The form of a checkpoint, from its chat template for conversations with tools and its vocabulary.

    It is ``generic`` for a template that does not read ``tools``, and for one that fits none of these:

    - ``seed_oss`` (Seed-OSS), ``minimax_m2`` (MiniMax M2): it mentions ``<seed:tool_call>`` or ``<minimax:tool_call>``.
    - ``gemma4`` (Gemma 4): it mentions ``<|tool_call>``.
    - ``kimi_k2`` (Kimi K2 and Linear): it mentions ``<|tool_calls_section_begin|>``.
    - ``glm45`` (GLM 4.5 to 4.7): it mentions ``<tool_call>`` and ``<arg_key>``.
    - ``qwen3_coder`` (Qwen3-Coder, Qwen 3.5, Nemotron 3): it mentions ``<tool_call>`` and ``<function=``.
    - ``hermes`` (Hermes, Qwen 2.5 and 3): it mentions ``<tool_call>`` around JSON.
    - ``mistral_args``, ``mistral``: it mentions ``[TOOL_CALLS]`` with or without ``[ARGS]``.
    - ``deepseek_v3`` (DeepSeek V3 and R1), ``deepseek_v31``: it mentions ``<｜tool▁calls▁begin｜>`` with or without a
      fence for JSON.
    - ``harmony`` (gpt-oss): it mentions the channel of its reasoning. :class:`.HarmonyParser` reads an answer first.
    - ``llama4_pythonic`` (Llama 4 and 3.2): it describes calls as ``[func_name1(``.
    - ``lfm2`` (LFM2): it mentions ``<|tool_call_start|>``, or the vocabulary has it.
    - ``llama3_json`` (Llama 3.1 to 3.3): the vocabulary has ``<|python_tag|>``.
    """
    source = template or ""
    if re.search(r"\btools\b", source) is None:
        return GENERIC
    if _MISTRAL in source:
        return MISTRAL_ARGS if MISTRAL_ARGS.arguments_mark in source else MISTRAL
    for form in (SEED_OSS, MINIMAX_M2, KIMI_K2, GEMMA4):
        if form.begin in source:
            return form
    if HERMES.begin in source:
        if GLM45.tags.key[0] in source:
            return GLM45
        return QWEN3_CODER if QWEN3_CODER.tags.function[0] in source else HERMES
    if DEEPSEEK_V3.begin in source:
        return DEEPSEEK_V3 if "```json" in source else DEEPSEEK_V31
    if HARMONY_REASONING.begin in source:
        return HARMONY
    if "[func_name1(" in source:
        return LLAMA4_PYTHONIC
    if LFM2.begin in source:
        return LFM2
    return next((form for form in (LLAMA3_JSON, LFM2) if has_token(form.begin)), GENERIC)


def tool_format(name: str) -> ToolFormat:
    """The form of that name. Raises ``UsageError`` if there is none."""
    if name not in TOOL_FORMATS:
        raise UsageError(f"there is no form of tool calls {name!r}; {choices(name, TOOL_FORMATS)}")
    return TOOL_FORMATS[name]


def check_tools(tools: Any) -> None:
    """Raise ``UsageError`` for a value that is neither None nor a list of tools; it lists wrong ones by number."""
    if tools is None:
        return
    form = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise UsageError(f"tools is {tools!r}, but must be a list of {form}")
    functions = [tool.get("function") if isinstance(tool, Mapping) else None for tool in tools]
    wrong = [i for i, f in enumerate(functions) if not (isinstance(f, Mapping) and isinstance(f.get("name"), str))]
    if wrong:
        raise UsageError(f"each of the tools must be {form}; not so: {', '.join(map(str, wrong[:20]))}")


def function_names(tools: Sequence[Tool]) -> list[str]:
    """The names of the functions, in order."""
    return [tool["function"]["name"] for tool in tools]


def parameters_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON schema of a function's arguments; without one it has none."""
    return function.get("parameters") or {"properties": {}, "additionalProperties": False}
