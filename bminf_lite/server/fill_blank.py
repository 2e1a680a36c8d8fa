"""``/v1/fill_blank``: BMInf's interface for models that fill the blanks of a text, such as T5 and CPM-2."""

from __future__ import annotations

import secrets
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import UsageError
from ..text.infilling import NO_BLANKS, encode_blanks, fill_spans
from .client import CompletionFailed
from .errors import bad_request
from .event_stream import cancelled_on_disconnect
from .generating import check_model, encode, generation_request, run_briefly, sampling_params
from .health import json_response
from .openai.chunks import TokenUsage
from .recorder import record_of
from .schemas.base import parse
from .schemas.tokens import FillBlankBody
from .state import ServerState


def routes(server: ServerState) -> list[Route]:
    """The route."""

    async def fill_blank(request: Request) -> Response:
        body = parse(FillBlankBody, await request.body())
        adapter = check_model(server, body.model)
        params = sampling_params(server, body, body.max_tokens, "max_tokens")
        tokenizer, info = server.prompts.tokenizer, server.client.info
        try:
            if not info.is_encoder_decoder:
                raise UsageError(NO_BLANKS)
            server.prompts.check_length(body.text)
            blanked = await run_briefly(lambda: encode_blanks(tokenizer, body.text), len(body.text))
        except UsageError as error:
            raise bad_request(str(error), "text") from None
        prompt = await encode(server, blanked.prompt, "text")
        tokens: list[int] = []
        finish_reason: str | None = None
        cached = 0
        generation = await server.client.generate(
            generation_request(adapter, prompt, params, body), record=record_of(request)
        )
        async with generation, cancelled_on_disconnect(request.receive, generation):
            async for output in generation:
                if output.finish_reason == "error":
                    raise CompletionFailed(output.error or "the engine ended this request with an error")
                tokens += output.token_ids
                finish_reason, cached = output.finish_reason, output.cached_tokens
        fillings = blanked.fillings(tokenizer, tokens, frozenset(info.eos_ids))
        return json_response(
            {
                "id": f"fill-{secrets.token_hex(16)}",
                "object": "fill_blank",
                "model": body.model or server.model_name,
                "text": fill_spans(body.text, fillings),
                "fillings": [asdict(filling) for filling in fillings],
                "finish_reason": "stop" if finish_reason == "stop" else "length",
                "usage": TokenUsage(len(prompt.token_ids), len(tokens), cached).openai(),
            }
        )

    return [Route("/v1/fill_blank", fill_blank, methods=["POST"])]
