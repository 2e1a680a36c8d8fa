"""``/v1/completions``: texts continued, and the log-probabilities of prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.routing import Route

from ...text.prompts import EncodedPrompt
from ...text.text_stream import NewText, ScoredToken, score_prompt
from ...text.tokenizer import Tokenizer
from ..client import Generation, Output
from ..errors import bad_request
from ..event_stream import EventStream
from ..generating import (
    Ending,
    check_count,
    check_model,
    encode,
    ending,
    generation_request,
    grammar_of,
    guarded,
    read,
    sampling_params,
)
from ..request_record import RequestRecord
from ..schemas.completions import DEFAULT_MAX_TOKENS, CompletionBody
from ..state import ServerState
from ..work import Endpoint
from .chunks import TokenUsage, chunk_end, finite, head, reports_usage, write_chunks

_encode = msgspec.json.encode


def routes(server: ServerState) -> list[Route]:
    """The route."""
    return [ENDPOINT.route(server)]


async def _prepare(server: ServerState, body: CompletionBody, record: RequestRecord) -> _Completions:
    """Check a request as far as HTTP can, and submit it."""
    adapter = check_model(server, body.model)
    n, prompts, is_encoder_decoder = body.n or 1, body.prompts, server.client.info.is_encoder_decoder
    drawn = max(n, body.best_of or 1)
    _check_counts(server, len(prompts), drawn, "best_of" if drawn > n else "n")
    prompt_logprobs = body.logprobs if body.echo else None
    if prompt_logprobs is not None and is_encoder_decoder:
        raise bad_request(
            "echo with logprobs needs the log-probabilities of the prompt, which this model's encoder reads and does "
            "not predict: leave out one of them",
            "echo",
        )
    tokenizer = server.prompts.tokenizer  # an error, if it has none, before anything runs
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    logprobs = 0 if drawn > n and body.logprobs is None else body.logprobs
    params = sampling_params(server, body, max(max_tokens, 1), "max_tokens", logprobs)
    grammar = await grammar_of(server, body.structures, record.client)
    special = body.add_special_tokens is not False
    encoded = []
    for i, prompt in enumerate(prompts):
        if i:
            await asyncio.sleep(0)  # a thousand prompts must not hold up the streams of others
        if isinstance(prompt, str) and server.splits(body.split_special_tokens):
            prompt = await guarded(server, prompt)
        encoded.append(await encode(server, prompt, f"prompt[{i}]" if len(prompts) > 1 else "prompt", special))
    generation = await server.client.generate(
        *(
            generation_request(
                adapter,
                prompt,
                params,
                body,
                drawn,
                prompt_logprobs,
                grammar,
                body.stream,
                ends_by_text=bool(body.stop or server.default_stops),
            )
            for prompt in encoded
        ),
        record=record,
    )
    ends = ending(server, body.stop, body, params)
    return _Completions(server, body, generation, tokenizer, encoded, drawn, grammar is not None, ends)


def _check_counts(server: ServerState, num_prompts: int, drawn: int, field: str) -> None:
    """Raise for more prompts, completions of each (``field``), or completions in all than a request may have.

    The last would fill the engine's queue, and while they come and go no other request would find room there.
    """
    limits = server.settings.limits
    check_count(server, field, drawn)
    if num_prompts > limits.prompts:
        raise bad_request(f"prompt has {num_prompts:,} prompts, but may have {limits.prompts:,}", "prompt")
    total, most = num_prompts * drawn, max(limits.prompts, limits.n)
    if total > most:
        problem = f"{num_prompts:,} prompts with {drawn:,} completions each are {total:,}"
        raise bad_request(f"{problem}, but a request may have {most:,} completions: send fewer at a time", field)


class _Choice:
    """One of a response's choices while it arrives: what is echoed, and then the completion."""

    def __init__(self, completions: _Completions, prompt: EncodedPrompt, echo: str):
        body, tokenizer = completions.body, completions.tokenizer
        before = prompt.before_text(completions.has_grammar)
        self.completion = completions.ending.text(tokenizer, before, completions.texts)
        self.is_empty = body.max_tokens == 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.num_cached = 0
        self.num_characters = 0
        self._ending = completions.ending
        self._prompt = prompt
        self._echo = echo
        self._has_begun = False
        self._texts = completions.texts
        self._tokenizer = tokenizer

    def read(self, generation: Generation, output: Output) -> NewText:
        """What an output adds, with the prompt before the first of it."""
        if self.is_empty:  # the engine generates a token at least
            reason = "length" if output.finish_reason == "stop" else output.finish_reason
            output = Output(
                output.index,
                [],
                finish_reason=reason,
                prompt_logprobs=output.prompt_logprobs,
                cached_tokens=output.cached_tokens,
                error=output.error,
            )
        new = read(generation, self.completion, output)
        self.finish_reason, self.num_cached = new.finish_reason, output.cached_tokens
        if new.finish_reason is not None:
            self.stop_reason = self._ending.reason(self.completion, output)
        if self._has_begun:
            return new
        self._has_begun = True
        if output.prompt_logprobs is None or self._texts is None:
            return new._replace(text=self._echo + new.text)
        scored = score_prompt(self._tokenizer, self._texts, self._prompt.token_ids, output.prompt_logprobs)
        text = "".join(token.text for token in scored)  # without special tokens, whose places have no text
        return NewText(text + new.text, [*scored, *new.tokens], new.finish_reason)

    def logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """OpenAI's form of log-probabilities, of the tokens that are next in the text."""
        offsets = []
        for token in tokens:
            offsets.append(self.num_characters)
            self.num_characters += len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [None if token.logprob is None else finite(token.logprob) for token in tokens],
            "top_logprobs": [_most_likely(token) for token in tokens],
            "text_offset": offsets,
        }


def _most_likely(token: ScoredToken) -> dict[str, float] | None:
    """The most likely tokens and the chosen one by their texts; of equal texts the likelier token counts."""
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    for text, logprob in (*((likely.text, likely.logprob) for likely in token.top), (token.text, token.logprob)):
        found[text] = max(finite(logprob), found.get(text, finite(logprob)))
    return found


class _Completions:
    """A request under way: ``drawn`` completions of each prompt, of which the response has ``n``."""

    def __init__(
        self,
        server: ServerState,
        body: CompletionBody,
        generation: Generation,
        tokenizer: Tokenizer,
        prompts: Sequence[EncodedPrompt],
        drawn: int,
        has_grammar: bool,
        ending: Ending,
    ):
        self.body = body
        self.has_grammar = has_grammar
        self.ending = ending
        self.generation = generation
        self._prompts = prompts
        self._drawn = drawn
        has_scores = body.logprobs is not None or drawn > (body.n or 1)
        self.tokenizer = tokenizer
        self.texts = server.token_texts if has_scores else None
        echoes = [_text(tokenizer, given) if body.echo else "" for given in body.prompts]
        self._choices = [
            _Choice(self, prompt, echo) for prompt, echo in zip(prompts, echoes, strict=True) for _ in range(drawn)
        ]
        self._head = head("cmpl", "text_completion", body.model or server.model_name)

    @property
    def usage(self) -> dict[str, Any]:
        """The tokens so far."""
        first_of_each = self._choices[:: self._drawn]
        generated = sum(choice.completion.num_tokens for choice in self._choices)
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self._prompts)
        return TokenUsage(prompt_tokens, generated, sum(choice.num_cached for choice in first_of_each)).openai()

    async def whole(self) -> dict[str, Any]:
        """The response, when all completions have ended."""
        texts: list[list[str]] = [[] for _ in self._choices]
        tokens: list[list[ScoredToken]] = [[] for _ in self._choices]
        async for output in self.generation:
            new = self._choices[output.index].read(self.generation, output)
            texts[output.index].append(new.text)
            tokens[output.index] += new.tokens
        wanted = self.body.n or 1
        kept: list[int] = []
        for first in range(0, len(self._choices), self._drawn):
            drawn = range(first, first + self._drawn)
            kept += drawn if wanted == self._drawn else sorted(drawn, key=lambda i: -_mean(tokens[i]))[:wanted]
        choices = [
            {
                "index": index,
                "text": "".join(texts[i]),
                "logprobs": None if self.body.logprobs is None else self._choices[i].logprobs(tokens[i]),
                "finish_reason": self._choices[i].finish_reason,
                "stop_reason": self._choices[i].stop_reason,
            }
            for index, i in enumerate(kept)
        ]
        return {**self._head, "choices": choices, "usage": self.usage}

    async def stream(self, stream: EventStream) -> bytes:
        """The response as events, one for what each output adds. A chunk is bytes around the text."""
        has_usage = reports_usage(self.body.stream_options)
        start = b"data: " + _encode(self._head)[:-1] + b',"choices":[{"index":'
        heads = [start + b"%d" % index + b',"text":' for index in range(len(self._choices))]
        end = chunk_end(self.body.stream_options, lambda: self.usage)

        def chunk(output: Output) -> bytes:
            index, choice = output.index, self._choices[output.index]
            new = choice.read(self.generation, output)
            if self.body.logprobs is None and new.finish_reason is None:
                plain = b',"logprobs":null,"finish_reason":null}]'
                return heads[index] + _encode(new.text) + plain + end() if new.text else b""
            logprobs = _encode(None if self.body.logprobs is None else choice.logprobs(new.tokens))
            ended = (new.finish_reason, choice.stop_reason)
            reason = b',"finish_reason":%b,"stop_reason":%b}]' % tuple(map(_encode, ended))
            return heads[index] + _encode(new.text) + b',"logprobs":' + logprobs + reason + end()

        def last() -> dict[str, Any]:
            return {**self._head, "choices": [], "usage": self.usage} if has_usage else {}

        return await write_chunks(stream, self.generation, chunk, last)


def _text(tokenizer: Tokenizer, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt)


def _mean(tokens: Sequence[ScoredToken]) -> float:
    """The log-probability per token."""
    generated = [token.logprob for token in tokens if token.logprob is not None]
    return sum(generated) / len(generated) if generated else 0.0


ENDPOINT = Endpoint("/v1/completions", CompletionBody, _prepare)
"""The interface, for HTTP and for callers in this process."""
