"""Errors as OpenAI's API reports them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An error that is the answer to a request.

    ``param`` names the field that is wrong, ``code`` the kind of error in a word; ``retry_after`` is in seconds.
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

    def response(self) -> Response:
        """The error as a response."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return Response(self.body(), self.status, headers, media_type="application/json")
