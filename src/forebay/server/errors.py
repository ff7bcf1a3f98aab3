"""What clients are told when something is wrong: a status, and OpenAI's form of an error."""

from __future__ import annotations

import msgspec

from forebay.errors import ForebayError, QueueFullError, RequestError


class ErrorDetail(msgspec.Struct, frozen=True):
    """What was wrong and what to do; `param` names the field of the request."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(ForebayError):
    """An error with an HTTP status. `retry_after_s` is sent as Retry-After."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> bytes:
        """The JSON of the error."""
        # What a client sent may come back in the message, and need not be valid Unicode.
        message = self.message.encode(errors="replace").decode()
        return msgspec.json.encode(
            ErrorBody(ErrorDetail(message, _type_of(self.status), self.param, self.code))
        )

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the answer, raw."""
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(self.body)).encode()),
        ]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.status in (408, 413):
            headers.append((b"connection", b"close"))
        return headers


def api_error(error: ForebayError, retry_after_s: int = 1) -> ApiError:
    """The HTTP face of an error of the engine."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="rate_limit_exceeded", retry_after_s=retry_after_s)
    if isinstance(error, RequestError):
        return ApiError(400, str(error))
    return ApiError(500, "the server failed on this request; its log says why")


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
