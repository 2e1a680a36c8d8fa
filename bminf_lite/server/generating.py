"""What all interfaces do to generate: check a request against the server, and make the engine's request of it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from ..engine.sampling_params import SamplingParams
from ..errors import BminfError, CheckpointError, UsageError, choices
from ..grammar import Grammar, Structure, only_structure
from ..request_builder import GenerationRequest
from ..text.chat_template import Message, content_text, template_messages
from ..text.control_tokens import GuardedText, new_mark
from ..text.prompts import EncodedPrompt, Prompt
from ..text.text_stream import NewText, TextStream
from ..text.token_bytes import TokenTexts
from ..text.tokenizer import Tokenizer
from ..text.tool_calls import Tool
from .client import CompletionFailed, Generation, Output
from .errors import ApiError, api_error, bad_request
from .schemas.sampling import SamplingFields
from .state import ServerState

T = TypeVar("T")

_log = logging.getLogger(__name__)

_TOO_LONG = "context_length_exceeded"
"""OpenAI's code. LangChain recognizes a context that is full by "prompt is too long" in the message."""
SHORT_TEXT = 4096
"""Characters of a text that is tokenized at once; a longer one would keep other requests waiting."""


def check_model(server: ServerState, name: str | None) -> str | None:
    """The adapter that a model's name stands for, or None. Raises for another model than the server's.

    It is found once for a request: an adapter that is unloaded meanwhile must not become the model without it.
    """
    if name is not None and name not in server.model_names:
        known = choices(name, server.model_names, "GET /v1/models lists all")
        message = f"the model {name[:100]!r} is not served here; {known}"
        raise ApiError(404, message, "model", "model_not_found")
    return server.adapter_of(name)


def check_count(server: ServerState, field: str, count: int) -> None:
    """Raise for more completions than a request may have."""
    most = server.settings.limits.n
    if count > most:
        raise bad_request(f"{field} is {count:,}, but may be {most:,} at most", field)


async def run_briefly(work: Callable[[], T], length: int) -> T:
    """Run what takes time for a text of ``length`` characters: in a thread unless the text is short."""
    return work() if length <= SHORT_TEXT else await asyncio.to_thread(work)


def text_length(prompt: Prompt) -> int:
    """The characters of a prompt that are to be tokenized: of a text, or of the messages of a dialogue."""
    if isinstance(prompt, str):
        return len(prompt)
    is_dialogue = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
    return sum(len(str(message.get("content") or "")) for message in prompt) if is_dialogue else 0  # type: ignore


async def encode(server: ServerState, prompt: Prompt, field: str, add_special_tokens: bool = True) -> EncodedPrompt:
    """The tokens of a prompt, which stands in ``field``."""
    length = text_length(prompt)
    if isinstance(prompt, str) and length > (most := server.max_characters):
        problem = f"it has {length:,} characters, but at most {most:,} fit the model's context, in its longest tokens"
        raise bad_request(f"the prompt is too long: {problem}; shorten it", field, _TOO_LONG)
    try:
        return await run_briefly(lambda: server.prompts.encode(prompt, add_special_tokens), length)
    except (UsageError, CheckpointError) as error:  # the latter for a text for which the tokenizer has no tokens
        code = _TOO_LONG if "prompt is too long" in str(error) else None
        raise bad_request(str(error), field, code) from None


async def guarded(server: ServerState, text: str) -> str:
    """A text that has no control tokens, whatever it spells."""
    return await run_briefly(lambda: server.prompts.control_tokens.guard(text), len(text))


async def render(
    server: ServerState,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    field: str,
    variables: Mapping[str, Any],
    splits: bool = False,
) -> str:
    """A conversation as the text of a prompt, by the checkpoint's chat template in its process.

    A conversation that the template refuses is rendered as :func:`_merged`. With ``splits``, what users, tools and
    documents say has no control tokens, and the text is a :class:`.GuardedText`.
    """
    if splits:
        mark, control_tokens = new_mark(), server.prompts.control_tokens
        messages = await asyncio.to_thread(control_tokens.guard_messages, messages, mark)
        if "documents" in variables:
            documents = await asyncio.to_thread(control_tokens.guard_values, variables["documents"], mark)
            variables = {**variables, "documents": documents}
        return GuardedText.of(await render(server, messages, tools, field, variables), mark)
    try:
        messages = template_messages(messages)
        try:
            return await asyncio.to_thread(server.prompts.render, messages, tools=tools or None, **variables)
        except UsageError:
            merged = _merged(messages)
            if merged == messages:
                raise
            return await asyncio.to_thread(server.prompts.render, merged, tools=tools or None, **variables)
    except (UsageError, CheckpointError) as error:
        raise bad_request(str(error), field) from None


def _merged(messages: Sequence[Message]) -> list[Message]:
    """A conversation whose system messages are one, the first message, and whose user does not speak twice in turn.

    Many templates refuse others.
    """
    system = [content_text(message) for message in messages if message["role"] == "system"]
    merged: list[Message] = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    others = (message for message in messages if message["role"] != "system")
    for is_user, group in groupby(others, lambda message: message["role"] == "user"):
        turn = list(group)
        merged += [{**turn[-1], "content": "\n\n".join(map(content_text, turn))}] if is_user and turn[1:] else turn
    return merged


def sampling_params(
    server: ServerState, fields: SamplingFields, max_tokens: int | None, field: str, logprobs: int | None = None
) -> SamplingParams:
    """The engine's parameters: those of the request, else the checkpoint's.

    ``max_tokens`` is the value of ``field``. Without one the checkpoint's ``max_new_tokens`` is the bound, or else the
    rest of the context.
    """
    info, most = server.client.info, server.settings.limits.max_tokens
    if most is not None and max_tokens is not None and max_tokens > most:
        raise bad_request(f"{field} is {max_tokens:,}, but this server allows {most:,}", field)
    if max_tokens is None and info.generation_config.get("max_new_tokens") is None:
        max_tokens = info.context_length
    try:
        seed = secrets.randbits(64) if server.settings.seed is None else server.settings.seed
        params = SamplingParams.from_checkpoint(
            info.generation_config, **{"seed": seed, **fields.chosen}, max_new_tokens=max_tokens, logprobs=logprobs
        )
        params.check_model(info.vocab_size, info.eos_ids)
        wrong = next((i for i in fields.stop_token_ids or () if not 0 <= i < info.vocab_size), None)
        if wrong is not None:
            raise UsageError(f"stop_token_ids has {wrong}, but the model's tokens are 0 to {info.vocab_size - 1}")
    except UsageError as error:
        message = str(error).replace("max_new_tokens", field)
        raise bad_request(message, message.split(" ", 1)[0]) from None
    return params if most is None else replace(params, max_new_tokens=min(params.max_new_tokens, most))


async def grammar_of(server: ServerState, structures: Sequence[Structure], client: str) -> Grammar | None:
    """The grammar of a request of ``client`` that asks for a structure."""
    try:
        structure = only_structure(structures)
    except UsageError as error:
        raise bad_request(str(error), structures[1].name) from None
    return None if structure is None else await checked_grammar(server, structure.grammar, structure.name, client)


async def checked_grammar(server: ServerState, make: Callable[[], Grammar], field: str, client: str) -> Grammar:
    """A grammar that was validated for a client, which may take seconds. Errors name the ``field``."""
    try:
        grammar = make()
        await server.grammar_checks.validate(grammar, client)
    except UsageError as error:
        raise bad_request(f"{field}: {error}", field) from None
    return grammar


def generation_request(
    adapter: str | None,
    prompt: EncodedPrompt,
    params: SamplingParams,
    fields: SamplingFields,
    n: int = 1,
    prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
    is_streamed: bool | None = None,
    ends_by_text: bool = True,
) -> GenerationRequest:
    """The engine's request for ``n`` completions of a prompt, by the model with an ``adapter`` or without.

    ``prompt_logprobs``: report log-probabilities of the prompt, and beside each its ``prompt_logprobs`` most likely
    tokens.
    """
    return GenerationRequest(
        prompt,
        params,
        n,
        stop_token_ids=frozenset(fields.stop_token_ids or ()),
        priority=fields.priority or 0,
        deadline=fields.deadline,
        cache_salt=fields.cache_salt or "",
        prompt_logprobs=prompt_logprobs is not None,
        num_prompt_top=max(prompt_logprobs or 0, 1),
        grammar=grammar,
        is_streamed=bool(is_streamed),
        ends_by_text=ends_by_text,
        adapter=adapter,
    )


def told(error: Exception) -> ApiError:
    """The answer to a client for an error in a stream that has begun. An error that is a bug is logged."""
    if not isinstance(error, (ApiError, BminfError)):
        _log.error("an error in a stream", exc_info=error)
    return api_error(error)


@dataclass(frozen=True)
class Ending:
    """What may end a request's completions before their length does, beside the model's end-of-sequence tokens.

    ``stop``: texts, which count from the token behind ``min_tokens`` on, and are part of the completion with
    ``keeps_stop``. ``token_ids``: the request's own tokens.
    """

    stop: Sequence[str]
    keeps_stop: bool
    min_tokens: int
    token_ids: frozenset[int]

    def text(self, tokenizer: Tokenizer, before: Sequence[int], texts: TokenTexts | None) -> TextStream:
        """A new completion's text behind the tokens ``before``; ``texts`` is given if log-probabilities are wanted."""
        return TextStream(tokenizer, self.stop, before, texts, self.keeps_stop, self.min_tokens)

    def reason(self, text: TextStream, output: Output) -> str | int | None:
        """vLLM's ``stop_reason`` of a completion whose last output is read: the text or the token that ended it."""
        if text.found_stop is not None:
            return text.found_stop
        last = output.token_ids[-1] if output.finish_reason == "stop" and output.token_ids else None
        return last if last in self.token_ids else None


def ending(server: ServerState, stop: Sequence[str], fields: SamplingFields, params: SamplingParams) -> Ending:
    """How a request's completions end: at the texts ``stop`` or else the checkpoint's, and at the tokens of ``fields``.

    A token that is one of the model's end-of-sequence tokens ends a completion as such, but for ``ignore_eos``.
    """
    token_ids = frozenset(fields.stop_token_ids or ())
    own = token_ids if params.ignore_eos else token_ids - frozenset(server.client.info.eos_ids)
    keeps_stop = bool(fields.include_stop_str_in_output)
    return Ending(stop or server.default_stops, keeps_stop, params.min_tokens, own)


def read(generation: Generation, text: TextStream, output: Output) -> NewText:
    """What an output adds to its text, with OpenAI's finish reason at the end: ``stop`` or ``length``.

    A completion that a stop text ends is cancelled in the engine. Raises ``CompletionFailed`` for one that the engine
    ended with an error.
    """
    if output.finish_reason == "error":
        raise CompletionFailed(output.error or "the engine ended this completion with an error")
    new = text.push(output.token_ids, output.finish_reason, output.logprobs, output.top_logprobs)
    if new.finish_reason == "stop" and output.finish_reason != "stop":
        generation.stop(output.index)
    return new if new.finish_reason in (None, "stop") else new._replace(finish_reason="length")
