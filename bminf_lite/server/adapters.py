"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, as vLLM has them.

They read folders of the server's machine, so they need a key: a server without keys refuses them.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from .errors import ApiError, bad_request
from .schemas.adapters import LoadAdapterBody, UnloadAdapterBody
from .schemas.base import parse
from .state import ServerState


def routes(server: ServerState) -> list[Route]:
    """The routes."""

    def check(name: str) -> None:
        """Raise unless adapters may change, and for a name of the model itself."""
        if not server.settings.security.key_digests:
            raise ApiError(403, "adapters are loaded by those who have a key: start the server with --api-key-file")
        if not server.client.info.takes_adapters:
            raise bad_request("the server has no room for adapters: start it with --adapter or --max-adapters")
        if name in server.settings.served_model_names:
            raise bad_request(f"{name!r} is the name of the model itself; choose another for the adapter", "lora_name")

    async def load(request: Request) -> Response:
        body = parse(LoadAdapterBody, await request.body())
        check(body.lora_name)
        await server.client.change_adapter(body.lora_name, body.lora_path, bool(body.load_inplace))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(request: Request) -> Response:
        body = parse(UnloadAdapterBody, await request.body())
        check(body.lora_name)
        if not server.has_adapter(body.lora_name):
            raise ApiError(404, f"there is no adapter {body.lora_name[:100]!r}", "lora_name", "model_not_found")
        await server.client.change_adapter(body.lora_name, None)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return [
        Route("/v1/load_lora_adapter", load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
    ]
