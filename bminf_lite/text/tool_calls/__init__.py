"""Calls of functions in a model's text: how a model writes them, and their parts while the text arrives.

Models are trained to write calls in one of a few forms (:mod:`.formats`). :func:`find_tool_format` finds the form from
the chat template and the vocabulary, :class:`ToolCallParser` separates the calls from the text around them, and
:func:`tool_grammar` describes them for constrained decoding. For a model whose form is unknown,
:func:`generic_messages` describes the generic form in the prompt.
"""

from .formats import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GEMMA4,
    GENERIC,
    GLM45,
    HARMONY,
    HERMES,
    KIMI_K2,
    LFM2,
    LLAMA3_JSON,
    LLAMA4_PYTHONIC,
    MINIMAX_M2,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN3_CODER,
    SEED_OSS,
    TOOL_FORMATS,
    Tool,
    ToolFormat,
    check_tools,
    find_tool_format,
    function_names,
    parameters_of,
    tool_format,
)
from .generic import generic_instructions, generic_messages
from .grammars import tool_grammar
from .parser import ArgumentsDelta, CallBegin, CallEnd, Event, ToolCallParser

__all__ = [
    "DEEPSEEK_V3",
    "DEEPSEEK_V31",
    "GEMMA4",
    "GENERIC",
    "GLM45",
    "HARMONY",
    "HERMES",
    "KIMI_K2",
    "LFM2",
    "LLAMA3_JSON",
    "LLAMA4_PYTHONIC",
    "MINIMAX_M2",
    "MISTRAL",
    "MISTRAL_ARGS",
    "QWEN3_CODER",
    "SEED_OSS",
    "TOOL_FORMATS",
    "ArgumentsDelta",
    "CallBegin",
    "CallEnd",
    "Event",
    "Tool",
    "ToolCallParser",
    "ToolFormat",
    "check_tools",
    "find_tool_format",
    "function_names",
    "generic_instructions",
    "generic_messages",
    "parameters_of",
    "tool_format",
    "tool_grammar",
]
