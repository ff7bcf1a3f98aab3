"""Between HTTP and the engine's thread: who is let in, what is open, and how it all ends.

Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from forebay.core.modes import Mode
from forebay.core.rates import Average
from forebay.engine.engine import Engine
from forebay.engine.stats import EngineStats
from forebay.errors import ForebayError
from forebay.server.driver import EngineThread, Event, Job, Pieces
from forebay.server.errors import ApiError, api_error
from forebay.server.exchange import Exchange
from forebay.server.live import Live
from forebay.server.look import record
from forebay.server.metrics import Metrics
from forebay.server.settings import ServerSettings
from forebay.server.state import State

logger = logging.getLogger("forebay.server")

_JOIN_S = 40.0
_LONGEST_RETRY_S = 60


class Front:
    """Takes exchanges in, up to as many answers as can wait and run, and accounts for each."""

    def __init__(self, engine: Engine, settings: ServerSettings, metrics: Metrics) -> None:
        self.state = State.STARTING
        self.loaded = engine.loaded
        self.block_tokens = engine.pool.block_tokens
        self.block_bytes = engine.pool.geometry.block_bytes
        self.pool_tokens = engine.pool.slots * self.block_tokens
        batch = engine.settings.batch
        self._most_open = batch.max_waiting + batch.max_running
        self._metrics = metrics
        self._thread = EngineThread(
            engine, self._post, metrics.answered, self._died, settings.max_sessions
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keep_alive_s = settings.keep_alive_s
        self._ticker: asyncio.TimerHandle | None = None
        self._exchanges: set[Exchange] = set()
        self._reserved: dict[Exchange, int] = {}
        self.live = Live(record(engine), settings.max_watchers)
        self._open = 0
        self._gap_s = Average(1.0)
        self._ended_s: float | None = None

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve; called on the loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self.live.start(self._thread.look)
        self.state = State.SERVING
        self._tick()

    def drain(self, within_s: float) -> None:
        """Take nothing new; end what is still open after `within_s`."""
        if self.state is State.SERVING:
            self.state = State.DRAINING
        self.live.end()
        if self._loop is not None:
            self._loop.call_later(within_s, self._end_all, _shut_down())

    async def close(self) -> None:
        """End everything and the engine's thread, within a bound."""
        self.live.end()
        self._end_all(_shut_down())
        if self._ticker is not None:
            self._ticker.cancel()
        self._thread.stop()
        if not await asyncio.to_thread(self._thread.join, _JOIN_S):
            logger.error("the engine's thread did not end in %s s", _JOIN_S)

    @property
    def stats(self) -> EngineStats:
        """The engine's newest snapshot, at most a step or a fifth of a second old."""
        return self._thread.stats

    # -- exchanges -------------------------------------------------------------------------------

    def admit(self, answers: int) -> Exchange:
        """Room for `answers` answers. Raises ApiError 429 or 503 if there is none.

        Whoever gets an exchange calls :meth:`leave` in the end, whatever happened.
        """
        self._require_serving()
        if answers > self._most_open:
            raise ApiError(
                400, f"{answers} answers are more than the {self._most_open} that may wait"
            )
        if self._open + answers > self._most_open:
            self._metrics.refused()
            raise ApiError(
                429,
                f"{self._open} answers wait or run, and {self._most_open} may; come back later",
                code="rate_limit_exceeded",
                retry_after_s=self.retry_after_s,
            )
        exchange = Exchange(answers)
        self._exchanges.add(exchange)
        self._reserved[exchange] = answers
        self._open += answers
        return exchange

    def submit(self, jobs: list[Job]) -> None:
        """Hand the answers of one exchange to the engine."""
        self._require_serving()
        exchange = jobs[0].exchange
        exchange.submitted = True
        self.live.used(jobs[0].salt)
        self._thread.submit(jobs)

    def leave(self, exchange: Exchange) -> None:
        """The client got all it gets. What is still open is aborted; its room is free after."""
        if exchange in self._exchanges:
            self._exchanges.discard(exchange)
            if exchange.submitted and exchange.open and self.state is not State.DEAD:
                self._thread.abort(exchange, lambda: self._release(exchange))
            else:
                self._release(exchange)

    def told(self, error: ForebayError) -> ApiError:
        """The HTTP face of an error that ended an exchange; a full queue is counted."""
        said = api_error(error, self.retry_after_s)
        if said.status == 429:
            self._metrics.refused()
        return said

    @property
    def retry_after_s(self) -> int:
        """About how long half of what is open will take."""
        wait_s = 0.5 * self._open * self._gap_s.value
        return min(_LONGEST_RETRY_S, max(1, math.ceil(wait_s)))

    # -- the mode --------------------------------------------------------------------------------

    async def set_mode(self, mode: Mode) -> None:
        """Change the engine's mode. Raises ApiError 400 if it has no such mode."""
        self._require_serving()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def then(error: ForebayError | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(ApiError(400, str(error), param="mode"))

        self._thread.set_mode(mode, then)
        try:
            await asyncio.wait_for(done, _JOIN_S)
        except TimeoutError as error:
            raise ApiError(503, "the engine did not answer in time; ask again") from error

    # -- inside ----------------------------------------------------------------------------------

    def _tick(self) -> None:
        for exchange in self._exchanges:
            exchange.tick()
        self._ticker = asyncio.get_running_loop().call_later(self._keep_alive_s, self._tick)

    def _require_serving(self) -> None:
        if self.state is State.DEAD:
            raise _dead()
        if self.state is not State.SERVING:
            raise _shut_down()

    def _release(self, exchange: Exchange) -> None:
        self._open -= self._reserved.pop(exchange, 0)
        loop = asyncio.get_running_loop()
        if self._ended_s is not None:
            self._gap_s.add(loop.time() - self._ended_s)
        self._ended_s = loop.time()

    def _end_all(self, error: ApiError) -> None:
        for exchange in list(self._exchanges):
            if exchange.open:
                if exchange.submitted and self.state is not State.DEAD:
                    self._thread.abort(exchange, _nothing)
                exchange.fail(error)

    def _post(self, events: list[Event], pieces: Pieces) -> None:
        """On the engine's thread."""
        self._call(_hand_out, events, pieces)

    def _died(self) -> None:
        """On the engine's thread."""
        self._call(self._note_death)

    def _note_death(self) -> None:
        self.state = State.DEAD
        self.live.end()
        for exchange in list(self._exchanges):
            exchange.fail(_dead())

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        if self._loop is None or self._loop.is_closed():
            return
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # Closed in between: nobody is left to be told.
            logger.debug("the event loop closed before the engine")


def _hand_out(events: list[Event], pieces: Pieces) -> None:
    for event in events:
        event()
    for exchange, added in pieces.items():
        exchange.push(added)


def _nothing() -> None:
    return


def _shut_down() -> ApiError:
    return ApiError(503, "the server is shutting down; ask another one", retry_after_s=1)


def _dead() -> ApiError:
    return ApiError(503, "the engine failed and the server has to be restarted; its log says why")
