"""Conversations with tools, as all interfaces have them: what the model reads, and how its answer is read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UsageError
from ..grammar import Grammar, Structure
from ..grammar.value import specification
from ..text.chat_template import Message, content_text
from ..text.lark import TokenId, after_reasoning, mark_rule, no_token
from ..text.prompts import EncodedPrompt
from ..text.reasoning import ReasoningFormat, find_reasoning_format
from ..text.token_bytes import TokenTexts
from ..text.tokenizer import Tokenizer
from ..text.tool_calls import CallBegin, Tool, ToolCallParser, ToolFormat, parameters_of, tool_grammar
from .answer import Answer
from .errors import ApiError, bad_request
from .generating import Ending, checked_grammar, encode, grammar_of, render
from .schemas.base import MAX_LISTED
from .schemas.chat import NO_TOOLS, ToolChoice
from .state import ServerState


@dataclass(frozen=True)
class Conversation:
    """A request to continue a conversation.

    - ``messages`` and ``tools`` are in OpenAI's form; ``field`` is where a request has the messages.
    - ``variables`` are given to the chat template. ``structures`` that the answer must have: none or one.
    - ``parallel_calls``: the answer may call several functions.
    - ``separates_reasoning``: reasoning is no part of the answer's text.
    - ``continues_last``: the answer continues the last message, which is the assistant's.
    - ``has_generation_prompt``: the prompt ends where an answer begins, unless it continues the last message.
    - ``add_special_tokens``: the template's text is framed as a plain prompt is. ``split_special_tokens``: what users
      and tools say has no control tokens; None is the server's default.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    choice: ToolChoice = NO_TOOLS
    structures: Sequence[Structure] = ()
    variables: Mapping[str, object] = dataclasses.field(default_factory=dict)
    parallel_calls: bool = True
    separates_reasoning: bool = True
    continues_last: bool = False
    has_generation_prompt: bool = True
    add_special_tokens: bool = False
    split_special_tokens: bool | None = None
    field: str = "messages"

    @property
    def callable_tools(self) -> Sequence[Tool]:
        """The tools that may be called. The model is not told of the others."""
        choice = self.choice
        if choice.mode == "none":
            return ()
        allowed = None if choice.allowed is None else frozenset(choice.allowed)
        return [tool for tool in self.tools if allowed is None or tool["function"]["name"] in allowed]


@dataclass(frozen=True)
class PreparedConversation:
    """A conversation in tokens, the grammar of its answer, and how the answer is read."""

    prompt: EncodedPrompt
    grammar: Grammar | None
    tokenizer: Tokenizer
    tools: ToolFormat | None
    schemas: Mapping[str, Mapping[str, Any]]
    reasoning: ReasoningFormat | None
    reasoning_is_open: bool
    parallel_calls: bool
    default_stops: Sequence[str] = ()

    def answer(self, ending: Ending, texts: TokenTexts | None = None) -> Answer:
        """A new answer; ``texts`` is given if log-probabilities are wanted."""
        before = self.prompt.before_text(self.grammar is not None)
        return Answer(
            ending.text(self.tokenizer, before, texts),
            ending,
            self.reasoning.parser(self.reasoning_is_open) if self.reasoning else None,
            ToolCallParser(self.tools, self.schemas, self.schemas) if self.tools else None,
            self.parallel_calls,
        )

    def ends_by_text(self, stop: Sequence[str]) -> bool:
        """Whether an answer may end before the engine ends it: at a stop string, or behind a tool call."""
        return bool(stop or self.default_stops or self.tools)

    def call_id(self, begin: CallBegin) -> str:
        """The id of a call: what the model wrote, or a random one."""
        assert self.tools is not None
        return begin.id or self.tools.new_call_id()


async def prepare(server: ServerState, conversation: Conversation, client: str) -> PreparedConversation:
    """Render and tokenize a conversation of ``client``, and make the answer's grammar. Raises ``ApiError`` 400."""
    if not server.client.info.generates:
        raise bad_request("this model makes vectors of texts, and generates none: ask for embeddings or scores")
    tokenizer, tools = server.prompts.tokenizer, conversation.callable_tools
    form = server.prompts.tool_format if tools else None
    reasoning = find_reasoning_format(tokenizer.tool_chat_template if tools else tokenizer.chat_template)
    prompt, is_open = await _prompt(server, conversation, reasoning)
    grammar = await _grammar(server, client, conversation, form, tokenizer, reasoning, is_open)
    shown = (*(form.visible_tokens if form else ()), *(reasoning.visible_tokens if reasoning else ()))
    return PreparedConversation(
        prompt,
        grammar,
        server.tokenizer_showing(shown) if shown else tokenizer,
        form,
        {tool["function"]["name"]: parameters_of(tool["function"]) for tool in tools},
        reasoning if reasoning is None or conversation.separates_reasoning else reasoning.unseparated,
        is_open,
        conversation.parallel_calls,
        server.default_stops,
    )


async def _prompt(
    server: ServerState, conversation: Conversation, reasoning: ReasoningFormat | None
) -> tuple[EncodedPrompt, bool]:
    """The prompt, and whether the answer begins within reasoning."""
    messages, tools, continues = conversation.messages, conversation.callable_tools, conversation.continues_last
    is_plain = not tools and not continues and conversation.has_generation_prompt
    if server.prompts.tokenizer.chat_template is None and is_plain:  # models of dialogues have no template
        return await encode(server, messages, conversation.field), False
    variables = {
        **conversation.variables,
        "continue_final_message": continues,
        "add_generation_prompt": conversation.has_generation_prompt,
    }
    splits = server.splits(conversation.split_special_tokens)
    text = await render(server, messages, tools, conversation.field, variables, splits)
    encoded = await encode(server, text, conversation.field, conversation.add_special_tokens)
    is_open = reasoning is not None and (
        reasoning.is_open_after(text) or (continues and reasoning.is_open_in(content_text(messages[-1])))
    )
    return replace(encoded, continues=continues), is_open


async def _grammar(
    server: ServerState,
    client: str,
    conversation: Conversation,
    form: ToolFormat | None,
    tokenizer: Tokenizer,
    reasoning: ReasoningFormat | None,
    is_open: bool,
) -> Grammar | None:
    """The grammar of the answer: calls, or the structure that the request asks for, or either. Reasoning precedes it.

    It is validated without ids of tokens, which mean nothing without the vocabulary.
    """
    choice, structures = conversation.choice, conversation.structures
    structure = await grammar_of(server, structures, client)
    if form is None and (structure is None or reasoning is None):
        return structure

    def make(token_id: TokenId) -> Grammar | None:
        if form is None:
            assert structure is not None
            assert reasoning is not None
            answer = f"answer: {mark_rule(reasoning.answer, token_id)} {_nested(structure)}"
            return Grammar.lark(after_reasoning(answer, reasoning, is_open, token_id))
        text = tool_grammar(
            form,
            conversation.callable_tools,
            required=choice.mode == "required" or structure is not None,
            name=choice.name,
            parallel=conversation.parallel_calls,
            token_id=token_id,
            reasoning=reasoning,
            reasoning_is_open=is_open,
        )
        if text is not None and structure is not None and choice.mode == "auto":
            text = text.replace("\nanswer: ", "\nanswer: calls | structure\ncalls: ", 1)
            before = "" if reasoning is None else mark_rule(reasoning.answer, token_id)
            text += f"\nstructure: {before} {_nested(structure)}"
        return None if text is None else Grammar.lark(text)

    field = "tools" if form is not None else structures[0].name
    try:
        plain = make(no_token)
        if plain is None:
            return None
        if form is not None and form.syntax == "braces":  # the grammar follows a part of each schema
            await _check_parameters(server, conversation, structure is not None, client)
        await checked_grammar(server, lambda: plain, field, client)
        return make(tokenizer.piece_to_id)
    except UsageError as error:
        raise bad_request(f"{field}: {error}", field) from None
    except (AttributeError, KeyError, RecursionError, TypeError):  # a schema that is none, or too deep for the rules
        if form is None:
            raise
        await _check_parameters(server, conversation, structure is not None, client)
        message = (
            "the parameters of a function are nested too deeply, or their schema has a form that cannot be followed"
        )
        raise bad_request(f"{field}: {message}", field) from None
    except ApiError as error:
        if form is not None:
            await _check_parameters(server, conversation, structure is not None, client)
        raise bad_request(error.message.split("\n")[0], field) from None  # without lines of a grammar that nobody wrote


async def _check_parameters(server: ServerState, conversation: Conversation, has_structure: bool, client: str) -> None:
    """Raise for functions whose parameters are no schema that can be enforced. The error names them and the places."""
    choice = conversation.choice
    all_count = choice.mode == "required" or has_structure
    problems: list[str] = []
    for tool in conversation.callable_tools:
        function = tool["function"]
        counts = function["name"] == choice.name if choice.name else all_count or function.get("strict")
        if not counts or len(problems) == MAX_LISTED:
            continue
        try:
            await server.grammar_checks.validate(Grammar.json_schema(parameters_of(function)), client)
        except UsageError as error:
            problems.append(f"the parameters of the function {function['name']!r}: {error}")
    if problems:
        raise bad_request(f"tools: {'; '.join(problems)}", "tools")


def _nested(grammar: Grammar) -> str:
    """A grammar as the right side of a rule in Lark's notation."""
    text = specification(grammar)
    parts = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
    schema, lark = parts.get("json_schema"), parts.get("lark_grammar")
    return f"%lark {{\n{lark}\n}}" if schema is None else f"%json {json.dumps(schema)}"
