"""``/v1/embeddings`` of OpenAI, ``/v1/rerank`` of Cohere and Jina, ``/score`` and ``/classify`` of vLLM."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..engine.pooling import PoolingText
from ..errors import CheckpointError, UsageError
from ..pooling.scores import ClassifierSettings, cosines, ranked
from ..pooling.settings import PoolingSettings
from ..pooling.texts import QUERY_PROMPTS, TEXT_PROMPTS, TextEncoder, first_prompt
from ..pooling.yes_no import Questions, relevances
from .errors import bad_request
from .event_stream import answered
from .generating import check_model, run_briefly
from .health import json_response
from .protocol import PoolingInfo
from .schemas.base import parse
from .schemas.embeddings import MAX_INPUTS, ClassifyBody, EmbeddingBody, RerankBody, ScoreBody
from .state import ServerState

NO_VECTORS = "this model generates text: embeddings need serve --embeddings, or a model that makes them, as labels do"


def routes(server: ServerState) -> list[Route]:
    """The routes."""
    texts = TextService(server)

    def check_name(name: str | None) -> None:
        check_model(server, name)
        if server.has_adapter(name):
            raise bad_request(f"{name} is an adapter, and adapters make no vectors: name {server.model_name}", "model")

    async def embeddings(request: Request) -> Response:
        body = parse(EmbeddingBody, await request.body())
        check_name(body.model)
        info, inputs = texts.info, body.inputs
        if info.labels:
            raise bad_request("this model classifies: it has no embeddings", "model")
        if body.dimensions is not None and not 1 <= body.dimensions <= info.dimensions:
            raise bad_request(f"dimensions is {body.dimensions}, but must be 1 to {info.dimensions:,}", "dimensions")
        encoder = texts.encoder
        prompt = _checked(lambda: encoder.prompt_text(body.prompt_name, body.prompt), "prompt_name")
        truncate = body.truncate is not False
        repeated = len(prompt) * len(inputs)
        encoded = await texts.encoded(inputs, lambda: encoder.encode(inputs, prompt, truncate), "input", repeated)
        rows = await texts.rows(request, encoded, body.dimensions, body.normalize)
        as_text = body.encoding_format == "base64"
        data = await run_briefly(lambda: _embeddings(rows, as_text), rows.size)
        return json_response(
            {
                "object": "list",
                "data": data,
                "model": body.model or server.model_name,
                "usage": _usage(encoded),
            }
        )

    async def rerank(request: Request) -> Response:
        body = parse(RerankBody, await request.body())
        check_name(body.model)
        pairs = [(body.query, text) for text in body.texts]
        scores, tokens = await texts.scores(request, pairs, body.truncate is not False, "documents", body.instruction)
        results: list[dict[str, Any]] = []
        for hit in ranked(scores, body.texts, body.top_n):
            results.append({"index": hit.index, "relevance_score": hit.score})
            if body.return_documents is not False:
                results[-1]["document"] = {"text": hit.text}
        name = body.model or server.model_name
        return json_response(
            {
                "id": f"rerank-{secrets.token_hex(16)}",
                "model": name,
                "results": results,
                "usage": tokens,
            }
        )

    async def score(request: Request) -> Response:
        body = parse(ScoreBody, await request.body())
        check_name(body.model)
        truncate = body.truncate is not False
        scores, tokens = await texts.scores(request, body.pairs, truncate, "text_2", body.instruction)
        data = [{"index": i, "object": "score", "score": float(value)} for i, value in enumerate(scores)]
        return json_response(_listed("score", body.model or server.model_name, data, tokens))

    async def classify(request: Request) -> Response:
        body = parse(ClassifyBody, await request.body())
        check_name(body.model)
        info, inputs = texts.info, body.texts
        if not info.labels or info.classifies_tokens:
            raise bad_request("this model has no head that classifies texts", "model")
        encode = texts.encoder.encode
        encoded = await texts.encoded(inputs, lambda: encode(inputs, truncate=body.truncate is not False), "input")
        numbers, classes = await texts.rows(request, encoded), texts.classes
        data = await run_briefly(lambda: _classifications(numbers, classes), numbers.size)
        return json_response(_listed("classify", body.model or server.model_name, data, _usage(encoded)))

    return [
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        *(Route(path, rerank, methods=["POST"]) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
        *(Route(path, score, methods=["POST"]) for path in ("/v1/score", "/score")),
        *(Route(path, classify, methods=["POST"]) for path in ("/v1/classify", "/classify")),
    ]


class TextService:
    """Makes tokens of a request's texts, and has the engine make numbers of them."""

    def __init__(self, server: ServerState):
        self._server = server

    @property
    def info(self) -> PoolingInfo:
        """What the model makes of texts. Raises ``ApiError`` for one that generates alone."""
        info = self._server.client.info.pooling
        if info is None:
            raise bad_request(NO_VECTORS, "model")
        return info

    @property
    def encoder(self) -> TextEncoder:
        """Makes tokens of texts as the model's folder says."""
        info, prompts = self.info, self._server.prompts
        settings = PoolingSettings(
            include_prompt=info.include_prompt,
            prompts=info.prompts,
            default_prompt=info.default_prompt,
            max_length=info.max_length,
            lower_case=info.lower_case,
        )
        return TextEncoder(lambda: prompts.tokenizer, settings, self._server.client.info.vocab_size, info.longest)

    @property
    def classes(self) -> ClassifierSettings:
        """How a classifier's numbers become scores."""
        info = self.info
        return ClassifierSettings(tuple(info.labels), info.function, info.relevance)

    async def encoded(
        self, inputs: Sequence[Any], encode: Callable[[], list[PoolingText]], field: str, repeated: int = 0
    ) -> list[PoolingText]:
        """The tokens of a request's texts, which stand in ``field``.

        ``repeated`` counts the characters that are read with each text again, of a prompt or a query.
        """
        length = self._checked_length(inputs, field, repeated)
        try:
            return await run_briefly(encode, length)
        except (UsageError, CheckpointError) as error:
            raise bad_request(f"{field}: {error}", field) from None

    def _checked_length(self, inputs: Sequence[Any], field: str, repeated: int) -> int:
        """The characters of texts with what is ``repeated``; raises ``ApiError`` for too many, and too many texts."""
        if len(inputs) > MAX_INPUTS:
            raise bad_request(f"{field} has {len(inputs):,} texts, but may have {MAX_INPUTS:,} at most", field)
        length, most = sum(map(len, inputs)) + repeated, self._server.settings.limits.body
        if length > most:
            problem = f"{len(inputs):,} texts have {length:,} characters, with the query or prompt before each"
            remedy = f"{most:,} are the most (the limit body): send fewer texts at a time, or a shorter query or prompt"
            raise bad_request(f"{field}: {problem}, and {remedy}", field)
        return length

    async def rows(
        self, request: Request, texts: list[PoolingText], dimensions: int | None = None, normalize: bool | None = None
    ) -> np.ndarray:
        """The engine's rows for texts, fp32 ``[n, width]``; cancelled if the client goes."""
        return await self._server.client.pool(texts, partial(answered, request), dimensions, normalize)

    async def judged(
        self, request: Request, pairs: list[tuple[str, str]], truncate: bool, field: str, instruction: str | None
    ) -> tuple[np.ndarray, dict[str, int]]:
        """The same as :meth:`scores` of a model that generates, which is asked about each pair."""
        questions, client = Questions(self._server.prompts), self._server.client
        repeated = sum(len(first) for first, _ in pairs) + len(instruction or "") * len(pairs)
        self._checked_length([second for _, second in pairs], field, repeated)

        def ask() -> tuple[list[int], list[Sequence[int]]]:
            return questions.answers, [questions.prompt(*pair, instruction, truncate) for pair in pairs]

        try:
            answers, prompts = await asyncio.to_thread(ask)  # the chat template runs in a process of its own
        except (UsageError, CheckpointError) as error:
            raise bad_request(f"{field}: {error}", field) from None
        count = sum(map(len, prompts))
        rows = await client.ask(prompts, answers, partial(answered, request))
        return relevances(rows), {"prompt_tokens": count, "total_tokens": count}

    async def scores(
        self,
        request: Request,
        pairs: list[tuple[str, str]],
        truncate: bool,
        field: str,
        instruction: str | None = None,
    ) -> tuple[np.ndarray, dict[str, int]]:
        """The relevance of each pair's second text for the first, fp32 ``[n]``, and the usage."""
        if self._server.client.info.generates:
            return await self.judged(request, pairs, truncate, field, instruction)
        if instruction is not None:
            raise bad_request("instruction is for models that generate text: leave it out", "instruction")
        info, encoder = self.info, self.encoder
        seconds = [second for _, second in pairs]
        if info.classifies_tokens:
            raise bad_request("this model labels tokens: it ranks no texts", "model")
        if info.labels:
            _checked(self.classes.require_one_label, "model")
            repeated = sum(len(first) for first, _ in pairs)
            encoded = await self.encoded(seconds, lambda: encoder.encode_pairs(pairs, truncate), field, repeated)
            return self.classes.relevances(await self.rows(request, encoded)), _usage(encoded)
        firsts = {first: i for i, first in enumerate(dict.fromkeys(first for first, _ in pairs))}
        query, document = (first_prompt(info.prompts, names) for names in (QUERY_PROMPTS, TEXT_PROMPTS))

        def encode() -> list[PoolingText]:
            queries = encoder.encode(list(firsts), encoder.prompt_text(query, None), truncate)
            return queries + encoder.encode(seconds, encoder.prompt_text(document, None), truncate)

        encoded = await self.encoded(seconds, encode, field, sum(map(len, firsts)))
        rows = await self.rows(request, encoded, normalize=True)
        queries = rows[[firsts[first] for first, _ in pairs]]
        return cosines(queries, rows[len(firsts) :]), _usage(encoded)


def _checked(work: Callable[[], Any], field: str) -> Any:
    try:
        return work()
    except UsageError as error:
        raise bad_request(str(error), field) from None


def _listed(kind: str, model: str, data: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
    """vLLM's list of results."""
    name = f"{kind}-{secrets.token_hex(16)}"
    return {"id": name, "object": "list", "created": int(time.time()), "model": model, "data": data, "usage": usage}


def _usage(texts: list[PoolingText]) -> dict[str, int]:
    count = sum(len(text.token_ids) for text in texts)
    return {"prompt_tokens": count, "total_tokens": count}


def _embeddings(rows: np.ndarray, as_text: bool) -> list[dict[str, Any]]:
    """OpenAI's list of vectors. Rows are encoded one by one, so that another thread may go on between two."""
    encode = _base64 if as_text else _raw
    return [{"object": "embedding", "index": i, "embedding": encode(row)} for i, row in enumerate(rows)]


def _classifications(numbers: np.ndarray, classes: ClassifierSettings) -> list[dict[str, Any]]:
    """vLLM's list of labels, of a classifier's numbers fp32 ``[n, labels]``."""
    labels = classes.labels
    return [
        {"index": i, "label": labels[int(row.argmax())], "probs": _raw(row), "num_classes": len(labels)}
        for i, row in enumerate(classes.scores(numbers))
    ]


def _raw(row: np.ndarray) -> msgspec.Raw:
    """The elements as a JSON array."""
    return msgspec.Raw(msgspec.json.encode(row.tolist()))


def _base64(row: np.ndarray) -> str:
    """The elements as little-endian fp32."""
    return base64.b64encode(row.astype("<f4").tobytes()).decode("ascii")
