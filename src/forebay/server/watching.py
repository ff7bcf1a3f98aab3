"""The live page: its files, the stream that feeds it, and the last minutes as a trace."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from importlib.resources import files
from itertools import islice
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from forebay.core.modes import MODES, policy_of
from forebay.release import installed_version
from forebay.server.access import Viewer
from forebay.server.errors import ApiError
from forebay.server.front import Front
from forebay.server.generation import EVENT_HEADERS, serve_connected
from forebay.server.guard import WATCH_PATH, Message, Receive, Scope, Send, refuse
from forebay.server.live import Live, Watcher
from forebay.server.live_wire import Hello, ModeChoice
from forebay.server.look import LastMinutes
from forebay.timeline.recent import timeline_of
from forebay.timeline.trace import trace_events

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page loads nothing from elsewhere, runs no script but its own files, and stands in no frame.
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_ERROR: dict[str, Any] = {
    "description": "An error.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}},
}
_STILL_HERE = b": still here\n\n"
_TRACE_S = 60.0
_EVENTS_AT_ONCE = 512


def watching_routes(front: Front, model_name: str, keep_alive_s: float) -> APIRouter:
    """The page and what it needs."""
    router = APIRouter(default_response_class=Response)
    pages = {name: _page(body, name) for name, body in _page_files()}

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        return pages["index.html"]

    @router.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in pages:
            raise ApiError(404, "the page has no such file")
        return pages[name]

    @router.get(WATCH_PATH, include_in_schema=False)
    async def live(request: Request) -> Response:
        viewer: Viewer = request.scope["state"]["viewer"]
        return Watching(front.live, viewer, _hello(front, model_name, viewer), keep_alive_s)

    @router.get(
        "/v1/forebay/trace",
        responses={
            200: {
                "description": "A Chrome trace, which opens in Perfetto.",
                "content": {"application/json": {"schema": {"type": "object"}}},
            },
            **dict.fromkeys((401, 403, 429, 503), _ERROR),
        },
    )
    async def trace() -> Response:
        """Steps, copies and requests of the last minute as a Chrome trace, for operators."""
        record = await front.live.last_minutes()
        body = await asyncio.to_thread(trace_of, record)
        headers = {"content-disposition": 'attachment; filename="forebay-last-minute.json"'}
        return Response(body, media_type="application/json", headers=headers)

    return router


class Watching(Response):
    """One page's stream: a `hello`, then a `state` whenever there is news and the client reads."""

    def __init__(self, live: Live, viewer: Viewer, hello: Hello, keep_alive_s: float) -> None:
        super().__init__()
        self._live = live
        self._viewer = viewer
        self._hello = hello
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        try:
            watcher = self._live.join(self._viewer)
        except ApiError as error:
            await refuse(error, send)
            return
        leave = partial(self._live.leave, watcher)
        await serve_connected(self._serve(watcher, send), receive, leave)

    async def _serve(self, watcher: Watcher, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        await send(_event(b"hello", msgspec.json.encode(self._hello)))
        while (state := await self._live.next(watcher, self._keep_alive_s)) is not None:
            await send(_event(b"state", state) if state else _part(_STILL_HERE))
        end: Message = {"type": "http.response.body", "body": b"event: end\ndata: {}\n\n"}
        await send(end)


def trace_of(record: LastMinutes) -> bytes:
    """The last minute of `record` in Chrome's format.

    Encoded in pieces, so that other threads run in between.
    """
    timeline = timeline_of(record.part, record.requests, record.at_s - _TRACE_S)
    pieces = [msgspec.json.encode(piece)[1:-1] for piece in _pieces(trace_events(timeline))]
    return b'{"displayTimeUnit":"ms","traceEvents":[' + b",".join(pieces) + b"]}"


def _pieces(events: Iterator[dict[str, object]]) -> Iterator[list[dict[str, object]]]:
    while piece := list(islice(events, _EVENTS_AT_ONCE)):
        yield piece


def _page_files() -> Iterator[tuple[str, bytes]]:
    for file in files("forebay.server.page").iterdir():
        if any(file.name.endswith(ending) for ending in _TYPES):
            yield file.name, file.read_bytes()


def _page(body: bytes, name: str) -> Response:
    kind = _TYPES[name[name.rindex(".") :]]
    return Response(body, media_type=kind, headers=_HEADERS)


def _hello(front: Front, model_name: str, viewer: Viewer) -> Hello:
    return Hello(
        role="operator" if viewer.tenant is None else "tenant",
        model=model_name,
        version=installed_version(),
        block_tokens=front.block_tokens,
        block_bytes=front.block_bytes,
        modes=_modes(host_tier=front.stats.occupancy.host_slots > 0) if not viewer.tenant else [],
    )


def _modes(*, host_tier: bool) -> list[ModeChoice]:
    """The modes that an engine, with or without a host tier, can go by."""
    return [
        ModeChoice(mode.value, mode.name.lower().replace("_", " "))
        for mode in MODES
        if host_tier or not policy_of(mode).host_tier
    ]


def _event(name: bytes, data: bytes) -> Message:
    return _part(b"event: %b\ndata: %b\n\n" % (name, data))


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}
