"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, as vLLM has them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import CheckpointError, UsageError
from .errors import bad_request
from .generating import check_model, guarded, render, run_briefly
from .health import json_response
from .schemas.base import parse
from .schemas.messages import plain_tool
from .schemas.tokens import DetokenizeBody, TokenizeBody
from .state import ServerState


def routes(server: ServerState) -> list[Route]:
    """The routes."""

    async def tokenize(request: Request) -> Response:
        body = parse(TokenizeBody, await request.body())
        check_model(server, body.model)
        text, special, field = body.prompt, body.add_special_tokens is not False, "prompt"
        if body.messages is not None:
            field, special = "messages", bool(body.add_special_tokens)
            messages = [message.plain() for message in body.messages]
            tools = [plain_tool(tool.function) for tool in body.tools or ()]
            variables = {"add_generation_prompt": body.add_generation_prompt is not False}
            variables = {**(body.chat_template_kwargs or {}), **variables}
            text = await render(server, messages, tools, field, variables, server.splits(body.split_special_tokens))
        elif server.splits(body.split_special_tokens):
            text = await guarded(server, text or "")
        tokenizer, given = server.prompts.tokenizer, text or ""

        def encode() -> list[int]:
            server.prompts.check_length(given)
            return server.prompts.tokens_of(given, special)

        try:
            ids = await run_briefly(encode, len(given))
        except (UsageError, CheckpointError) as error:
            raise bad_request(f"{field}: {error}", field) from None
        result = {"count": len(ids), "max_model_len": server.client.info.max_model_len, "tokens": ids}
        if body.return_token_strs:
            result["token_strs"] = [tokenizer.id_to_piece(i) or "" for i in ids]
        return json_response(result)

    async def detokenize(request: Request) -> Response:
        body = parse(DetokenizeBody, await request.body())
        check_model(server, body.model)
        info = server.client.info
        most = max(info.context_length, info.max_source_length)
        if len(body.tokens) > most:
            problem = f"it has {len(body.tokens):,} tokens, but the model's context has {most:,}"
            raise bad_request(f"tokens: {problem}; decode parts of it", "tokens")
        try:
            text = await run_briefly(lambda: server.prompts.tokenizer.decode(body.tokens), len(body.tokens))
        except (UsageError, CheckpointError) as error:
            raise bad_request(f"tokens: {error}", "tokens") from None
        return json_response({"prompt": text})

    async def info(request: Request) -> Response:
        tokenizer = server.prompts.tokenizer
        return json_response(
            {
                "tokenizer_class": type(tokenizer).__name__,
                "vocab_size": len(tokenizer),
                "model_max_length": server.client.info.max_model_len,
                "bos_token": tokenizer.bos_token,
                "eos_token": tokenizer.eos_token,
                "chat_template": tokenizer.chat_template,
            }
        )

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", info),
    ]
