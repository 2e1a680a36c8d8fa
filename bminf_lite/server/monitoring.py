"""``/metrics``, which Prometheus reads."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .metrics import CONTENT_TYPE, render
from .state import ServerState


def routes(server: ServerState) -> list[Route]:
    """The route."""

    async def metrics(request: Request) -> Response:
        """The metrics of the whole server, whichever of its processes answers."""
        server.observer.flush()  # the engine reads this before it answers the next message
        stats = await server.client.stats()
        body = render(server.model_name, stats.stats, server.observer.observations, stats.observed)
        return Response(body, headers={"Content-Type": CONTENT_TYPE})

    return [Route("/metrics", metrics)]
