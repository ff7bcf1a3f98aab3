"""In front of every endpoint: keys first, then the size and the pace of the body.

Plain ASGI, since what wraps responses in tasks of its own costs more than streaming does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException

from forebay.server.access import Access
from forebay.server.errors import ApiError
from forebay.server.settings import ServerSettings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPERATOR_PATHS = ("/metrics", "/v1/forebay/mode", "/v1/forebay/trace")
WATCH_PATH = "/v1/forebay/live"
_TENANT_PREFIX = "/v1/"


class Guard:
    """Refuses what may not come in; puts the tenant into `scope["state"]["tenant"]`, or, where
    somebody wants to watch, the viewer into `["viewer"]`, and its own `send` into `["send"]`.
    """

    def __init__(self, app: App, access: Access, settings: ServerSettings) -> None:
        self._app = app
        self._access = access
        self._most_bytes = settings.max_body_bytes
        self._timeout_s = settings.body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._admit(scope)
        except ApiError as error:
            await refuse(error, send)
            return
        scope.setdefault("state", {})["send"] = send
        await self._app(scope, self._bounded(receive), send)

    def _admit(self, scope: Scope) -> None:
        path, headers = scope["path"], scope["headers"]
        if path in OPERATOR_PATHS:
            self._access.require_operator(headers)
        elif path == WATCH_PATH:
            scope.setdefault("state", {})["viewer"] = self._access.viewer(headers)
        elif path.startswith(_TENANT_PREFIX):
            scope.setdefault("state", {})["tenant"] = self._access.tenant(headers)
        for name, value in headers:
            if name == b"content-length" and (
                not value.isdigit() or len(value) > 18 or int(value) > self._most_bytes
            ):
                raise self._too_large()

    def _bounded(self, receive: Receive) -> Receive:
        """`receive` with bounds on a body's bytes and time; after the body without any."""
        got_bytes = 0
        ends_s: float | None = None
        whole = False

        async def bounded() -> Message:
            nonlocal got_bytes, ends_s, whole
            if whole:
                return await receive()
            now_s = asyncio.get_running_loop().time()
            ends_s = now_s + self._timeout_s if ends_s is None else ends_s
            try:
                message = await asyncio.wait_for(receive(), max(0.0, ends_s - now_s))
            except TimeoutError as error:
                raise HTTPException(408, "the body took too long; send it faster") from error
            got_bytes += len(message.get("body", b""))
            if got_bytes > self._most_bytes:
                raise HTTPException(413, self._too_large().message)
            whole = not message.get("more_body", False)
            return message

        return bounded

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body is larger than the {self._most_bytes} bytes that are taken; shorten it"
        )


async def refuse(error: ApiError, send: Send) -> None:
    """Answer with `error`, before anything else was sent."""
    await send({"type": "http.response.start", "status": error.status, "headers": error.headers})
    await send({"type": "http.response.body", "body": error.body})
