"""One generation request from its prompt to its last byte, as an ASGI response.

A task watches for the client's end meanwhile. However the request ends, its answers are handed
back to the front, which aborts what is still open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.responses import Response

from forebay.engine.request import FinishReason
from forebay.errors import ForebayError
from forebay.server.driver import Job
from forebay.server.errors import ApiError
from forebay.server.exchange import Exchange, Outcome, Piece
from forebay.server.front import Front
from forebay.server.guard import Message, Receive, Scope, Send, refuse
from forebay.server.sender import Sender
from forebay.server.shapes import Shape, event_of
from forebay.server.wire import Usage, usage_of

logger = logging.getLogger("forebay.server")

EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies of nginx's kind collect answers otherwise.
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"
_STILL_HERE = b": still here\n\n"


@dataclass(frozen=True, slots=True)
class Plan:
    """How to answer: `jobs` makes the answers' jobs once there is room for them."""

    answers: int
    per_prompt: int
    jobs: Callable[[Exchange], Coroutine[Any, Any, list[Job]]]
    shape: Shape
    stream: bool
    include_usage: bool


class Generation(Response):
    """Answers one request. Nothing is sent before the engine has taken it."""

    def __init__(self, front: Front, plan: Plan) -> None:
        super().__init__()
        self._front = front
        self._plan = plan
        self._outcomes: dict[int, Outcome] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        try:
            exchange = self._front.admit(self._plan.answers)
        except ApiError as error:
            await refuse(error, send)
            return
        leave = partial(self._front.leave, exchange)
        # What lies between here and the guard looks at the start of a response only, and costs
        # every event of a stream a coroutine for each layer.
        more: Send = scope["state"]["send"]
        await serve_connected(self._serve(exchange, send, more), receive, leave)

    async def _serve(self, exchange: Exchange, send: Send, more: Send) -> None:
        try:
            self._front.submit(await self._plan.jobs(exchange))
            await exchange.accepted()
            if self._plan.stream:
                await self._stream(exchange, send, more)
            else:
                await self._whole(exchange, send)
        except ForebayError as error:
            await refuse(self._front.told(error), send)

    async def _whole(self, exchange: Exchange, send: Send) -> None:
        await exchange.tell(self._keep)
        body = self._plan.shape.whole(self._usage())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _keep(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            self._plan.shape.keep(piece)
            if piece.outcome is not None:
                self._note(piece.index, piece.outcome)

    async def _stream(self, exchange: Exchange, send: Send, more: Send) -> None:
        plan, shape = self._plan, self._plan.shape
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        opening = shape.opening(plan.answers)
        if opening:
            await more(_part(opening))
        sender = Sender(more, exchange)

        def write(pieces: list[Piece]) -> None:
            events = _STILL_HERE if not pieces else b""
            for piece in pieces:
                events += shape.event(piece)
            if events:
                sender.put(_part(events))
            for piece in pieces:
                if piece.outcome is not None:
                    self._note(piece.index, piece.outcome)

        try:
            await exchange.tell(write)
        except ForebayError as error:
            await sender.rest()
            await more(_part(event_of(self._front.told(error).body)))
        else:
            if plan.include_usage:
                await more(_part(shape.closing(self._usage())))
        finally:
            sender.close()
        await more({"type": "http.response.body", "body": _DONE})

    def _note(self, index: int, outcome: Outcome) -> None:
        """Take an answer's end. Raises ApiError for one that failed."""
        if outcome.reason is FinishReason.FAILED:
            logger.error("an answer failed: %s", outcome.error)
            raise ApiError(500, "the model failed on this request; the server's log says why")
        self._outcomes[index] = outcome

    def _usage(self) -> Usage:
        outcomes = [self._outcomes[index] for index in sorted(self._outcomes)]
        return usage_of(outcomes, self._plan.per_prompt)


async def serve_connected(
    serving: Coroutine[Any, Any, None], receive: Receive, leave: Callable[[], None]
) -> None:
    """Run `serving` until it ends or the client is gone; then `leave`, in either case."""
    work = asyncio.ensure_future(serving)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        leave()
        work.cancel()
        watch.cancel()


async def _disconnected(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}
