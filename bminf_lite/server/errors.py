"""Errors as OpenAI's API reports them, ``{"error": {"message", "type", "param", "code"}}``, and as Anthropic's does."""

from __future__ import annotations

from collections.abc import Container

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from ..errors import BminfError, QueueFull, UsageError
from .client import EngineFailure

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An error that is the answer to a request.

    ``param`` names the field that is wrong, as in ``messages[0].content``, ``code`` the kind of error in a word;
    ``retry_after`` is in seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.type = type or _TYPES.get(status, "invalid_request_error")
        self.retry_after = retry_after

    def body(self) -> bytes:
        """The error as JSON, also for an event of a stream that has begun."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def anthropic_body(self) -> bytes:
        """The error as Anthropic's API reports it."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": self.message}})

    def response(self, scope: Scope) -> Response:
        """The error as the response to a request, in the form of the API that its path belongs to."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        body = self.anthropic_body() if path_of(scope).startswith("/v1/messages") else self.body()
        return Response(body, self.status, headers, media_type="application/json")


def path_of(scope: Scope) -> str:
    """The path of a request within the application, which may be mounted elsewhere."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A wrong request."""
    return ApiError(400, message, param, code)


def api_error(error: Exception, fields: Container[str] = ()) -> ApiError:
    """The answer to a client for an exception.

    Messages of ``UsageError`` begin with the name of the wrong argument, which becomes ``param`` if it is one of
    ``fields``. What is not an error of this package is a bug, and its text stays on the server.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", retry_after=1)
    if isinstance(error, UsageError):
        first = str(error).split(" ", 1)[0]
        return bad_request(str(error), first if first in fields else None)
    if isinstance(error, EngineFailure):
        return ApiError(503, str(error), code="engine_failed")
    if isinstance(error, BminfError):
        return ApiError(500, str(error), code="internal_error")
    return ApiError(500, "the server made an error, which its log describes", code="internal_error")
