"""The server's interfaces without HTTP, for batches."""

from __future__ import annotations

import json
import logging
import socket
from typing import Any, NamedTuple

from ..errors import BminfError
from .client import EngineClient, EngineFailure
from .errors import ApiError, api_error
from .openai import chat, completions, responses
from .settings import ServerSettings
from .state import ServerState

ENDPOINTS = {module.ENDPOINT.path: module.ENDPOINT for module in (completions, chat, responses)}
"""The interfaces that generate, by path."""
SECONDS_BETWEEN = 0.1
"""Seconds between searches for a stop text in the new tokens of a completion: what the engine's side of the socket
takes as ``seconds_between``."""

_log = logging.getLogger(__name__)


class DirectAnswer(NamedTuple):
    """The status that HTTP would have, and the response; of another status than 200 it is ``{"error": ...}``."""

    status: int
    body: dict[str, Any]


class DirectServer:
    """Answers requests to a model. Made by :meth:`connect`, and used in one event loop. :meth:`close` it."""

    def __init__(self, client: EngineClient, settings: ServerSettings):
        self._client = client
        self._state = ServerState(client, settings)

    @classmethod
    async def connect(cls, sock: socket.socket, settings: ServerSettings) -> DirectServer:
        """A server of the model whose engine is at the other end of a socket; see :meth:`.EngineServer.serve`.

        Raises ``EngineFailure`` if that closes before the first message.
        """
        direct = cls(await EngineClient.connect(sock), settings)
        direct._state.warm_up()
        return direct

    async def answer(self, path: str, body: bytes) -> DirectAnswer:
        """The answer to a POST request. Whether it asks for a stream does not matter: the answer is whole.

        Raises ``EngineFailure`` if the engine has failed, which is no fault of the request.
        """
        endpoint = ENDPOINTS.get(path)
        try:
            if endpoint is None:
                known = ", ".join(sorted(ENDPOINTS))
                raise ApiError(
                    404, f"there is no interface {path[:100]!r} for batches, but {known}", code="unknown_url"
                )
            return DirectAnswer(200, await endpoint.answer(self._state, body))
        except EngineFailure:
            raise
        except Exception as error:
            self._client.require_engine()
            if not isinstance(error, (ApiError, BminfError)):
                _log.error("an error in a request", exc_info=error)
            failed = api_error(error)
            return DirectAnswer(failed.status, json.loads(failed.body()))

    def close(self) -> None:
        """Cancel what runs."""
        self._client.close()
