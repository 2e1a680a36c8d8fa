"""Whether the server lives, whether it is ready, what it is, and which model it serves."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..version import __version__
from .errors import ApiError
from .generating import check_model
from .state import ServerState


def json_response(value: Any, status: int = 200) -> Response:
    """A value as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def capabilities(server: ServerState) -> dict[str, bool]:
    """What a model does: ``chat``, ``rerank``, and if it makes vectors of texts ``embeddings`` and ``classify``."""
    found, pooling = {"chat": server.has_chat, "rerank": server.ranks_by_answers}, server.client.info.pooling
    if pooling is not None:
        labels, reads_whole = pooling.labels, not pooling.classifies_tokens
        found |= {"embeddings": not labels, "classify": bool(labels) and reads_whole}
        if not server.client.info.generates:
            found["rerank"] = len(labels) < 2 and reads_whole
    return found


def routes(server: ServerState) -> list[Route]:
    """``/health``, ``/health/live``, ``/health/ready``, ``/version`` and ``/v1/models``."""
    started = int(time.time())
    started_text = datetime.fromtimestamp(started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    async def live(request: Request) -> Response:
        """200 unless the engine has failed."""
        if server.client.failure is not None:
            return ApiError(503, server.client.failure, code="engine_failed").response(request.scope)
        return json_response({"status": "live"})

    async def ready(request: Request) -> Response:
        """200 when requests are served without waiting for the engine to be prepared."""
        if server.client.failure is not None:
            return ApiError(503, server.client.failure, code="engine_failed").response(request.scope)
        if not server.client.is_ready:
            not_ready = ApiError(503, "the engine prepares its memory and its steps", code="not_ready")
            return not_ready.response(request.scope)
        return json_response({"status": "ready"})

    async def version(request: Request) -> Response:
        return json_response({"version": __version__})

    def model(name: str) -> dict[str, Any]:
        """An adapter names the model as its ``parent``, and its folder as ``root``."""
        length, folder = server.client.info.max_model_len, server.client.adapters.get(name)
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "bminf-lite",
            "root": server.model_name if folder is None else folder,
            "parent": None if folder is None else server.model_name,
            "max_model_len": length,
            "type": "model",
            "display_name": name,
            "created_at": started_text,
            "capabilities": capabilities(server),
            "default_sampling_params": server.default_sampling,
        }

    async def models(request: Request) -> Response:
        """OpenAI's list and Anthropic's at once: their fields have different names."""
        names = server.model_names
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return json_response({"object": "list", "data": [model(name) for name in names], **ends})

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        check_model(server, name)
        return json_response(model(name))

    return [
        Route("/health", ready),
        Route("/health/live", live),
        Route("/health/ready", ready),
        Route("/version", version),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
    ]
