"""The one thread that owns the engine.

Everybody else puts commands into its queue; what its steps bring goes to the event loop, all of one
step in one call. While the engine has nothing to do the thread sleeps on the queue.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.core.directory import Session
from forebay.core.ledger import Source
from forebay.core.modes import Mode
from forebay.engine.engine import Engine
from forebay.engine.request import Delta, EngineRequest, FinishReason
from forebay.engine.sampler import SamplingParams
from forebay.engine.stats import EngineStats
from forebay.errors import ForebayError
from forebay.server.exchange import Exchange, Outcome, Piece

logger = logging.getLogger("forebay.server")

# While copies are on their way and no request is there, reports are taken in this often.
_SETTLE_S = 0.02
# A snapshot for /metrics costs some 50 us; steps can be shorter than that.
_STATS_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to generate. `session` names the conversation within its salt; "" is none.

    `each_token`: pieces name the tokens of which their text came.
    """

    exchange: Exchange
    index: int
    prompt_ids: NDArray[np.int64]
    params: SamplingParams
    salt: str
    session: str
    priority: int
    no_cache: bool
    no_save: bool
    each_token: bool


Event = Callable[[], None]
"""Something to do on the event loop."""

Pieces = dict[Exchange, list[Piece]]
"""What a step added to which exchange."""


class EngineThread:
    """Runs `engine` from :meth:`start` to :meth:`stop`, and closes it.

    `post` is called on this thread with events for the loop and, after them, pieces; `died` as the
    last thing if the engine raised; `ended` on the loop for every answer that ends, before its
    piece. The queue is bounded by its users: one
    submission and one abort for each exchange.
    """

    def __init__(
        self,
        engine: Engine,
        post: Callable[[list[Event], Pieces], None],
        ended: Callable[[Outcome], None],
        died: Callable[[], None],
        max_sessions: int,
    ) -> None:
        self.stats: EngineStats = engine.stats()
        self._engine = engine
        self._post = post
        self._ended = ended
        self._died = died
        self._max_sessions = max_sessions
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: dict[int, tuple[EngineRequest, Job]] = {}
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self._events: list[Event] = []
        self._pieces: Pieces = {}
        self._stats_s = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="forebay-engine", daemon=True)

    # -- from any thread -------------------------------------------------------------------------

    def start(self) -> None:
        """Begin. Nobody else may touch the engine from here on."""
        self._thread.start()

    def submit(self, jobs: list[Job]) -> None:
        """Queue all answers of one exchange, or refuse it."""
        self._commands.put(partial(self._submit, jobs))

    def abort(self, exchange: Exchange, then: Event) -> None:
        """End what is left of `exchange`; `then` runs on the loop once its blocks are free."""
        self._commands.put(partial(self._abort, exchange, then))

    def set_mode(self, mode: Mode, then: Callable[[ForebayError | None], None]) -> None:
        """Change the mode; `then` runs on the loop."""
        self._commands.put(partial(self._set_mode, mode, then))

    def look(
        self,
        at: Callable[[Engine, Mapping[int, tuple[EngineRequest, Job]]], Any],
        then: Callable[[Any], None],
    ) -> None:
        """Call `at` between two steps; `then` gets its value on the loop, None if it failed."""
        self._commands.put(partial(self._look, at, then))

    def stop(self) -> None:
        """End after the current step; aborts everything."""
        self._commands.put(self._stop)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; False if it did not come in time."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- on its own thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                if not self._engine.settled:
                    for delta in self._engine.step():
                        self._add(delta)
                self._note_stats()
                self._flush()
            self._note_stats(now=True)
        except BaseException:
            logger.critical("the engine failed and serves no more: restart", exc_info=True)
            self._died()
        finally:
            self._close()

    def _take_commands(self) -> None:
        """Do what is queued; sleep on the queue while there is nothing else to do."""
        engine = self._engine
        wait_s = None if engine.settled else _SETTLE_S
        if not engine.busy and not self._stopping:
            self._note_stats(now=True)
            try:
                self._commands.get(timeout=wait_s)()
            except queue.Empty:
                return
        # Nobody else takes from it, so what is there stays.
        while not self._stopping and not self._commands.empty():
            self._commands.get_nowait()()

    def _submit(self, jobs: list[Job]) -> None:
        exchange = jobs[0].exchange
        accepted: list[EngineRequest] = []
        try:
            accepted.extend(self._enqueue(job) for job in jobs)
        except Exception as error:
            for request_id in [r.id for r, job in self._jobs.values() if job.exchange is exchange]:
                self._engine.abort(request_id)
                del self._jobs[request_id]
            if not isinstance(error, ForebayError):
                logger.exception("a request was not queued")
                error = ForebayError(repr(error))
            self._events.append(partial(exchange.fail, error))
            return
        self._events.append(exchange.accept)

    def _enqueue(self, job: Job) -> EngineRequest:
        request = self._engine.submit(
            job.prompt_ids,
            job.params,
            salt=job.salt,
            follows=self._sessions.get((job.salt, job.session)) if job.session else None,
            label=job.session,
            priority=job.priority,
            no_cache=job.no_cache,
            no_save=job.no_save,
        )
        self._jobs[request.id] = (request, job)
        return request

    def _abort(self, exchange: Exchange, then: Event) -> None:
        for request_id, (request, job) in list(self._jobs.items()):
            if job.exchange is exchange:
                del self._jobs[request_id]
                self._engine.abort(request_id)
                self._remember(request, job)
                outcome = self._outcome(request, FinishReason.ABORTED)
                self._events.append(partial(self._ended, outcome))
                self._give(exchange, Piece(job.index, "", (), outcome))
        self._events.append(then)

    def _set_mode(self, mode: Mode, then: Callable[[ForebayError | None], None]) -> None:
        try:
            self._engine.set_mode(mode)
        except ForebayError as error:
            self._events.append(partial(then, error))
        else:
            logger.info("mode %s (%s) from now on", mode.value, mode.name.lower())
            self._note_stats(now=True)
            self._events.append(partial(then, None))

    def _look(
        self,
        at: Callable[[Engine, Mapping[int, tuple[EngineRequest, Job]]], Any],
        then: Callable[[Any], None],
    ) -> None:
        value = None
        try:
            value = at(self._engine, self._jobs)
        except Exception:
            logger.exception("what the engine does could not be shown")
        self._events.append(partial(then, value))

    def _stop(self) -> None:
        self._stopping = True

    def _add(self, delta: Delta) -> None:
        request, job = self._jobs[delta.request_id]
        outcome = None
        if delta.finished is not None:
            del self._jobs[delta.request_id]
            self._remember(request, job)
            outcome = self._outcome(request, delta.finished)
            self._events.append(partial(self._ended, outcome))
        tokens = delta.tokens if job.each_token else ()
        if not (delta.text or tokens or outcome):
            return
        self._give(job.exchange, Piece(job.index, delta.text, tokens, outcome))

    def _give(self, exchange: Exchange, piece: Piece) -> None:
        pieces = self._pieces.get(exchange)
        if pieces is None:
            self._pieces[exchange] = [piece]
        else:
            pieces.append(piece)

    def _remember(self, request: EngineRequest, job: Job) -> None:
        if not job.session or request.session is None:
            return
        key = (job.salt, job.session)
        self._sessions[key] = request.session
        self._sessions.move_to_end(key)
        while len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)

    def _outcome(self, request: EngineRequest, reason: FinishReason) -> Outcome:
        timing, pool = request.timing, self._engine.pool
        ended_s = timing.arrival_s if timing.finished_s is None else timing.finished_s
        started_s = ended_s if timing.started_s is None else timing.started_s
        first_s = timing.first_token_s
        return Outcome(
            reason=reason,
            error=request.error,
            prompt_tokens=len(request.prompt_ids),
            answer_tokens=len(request.drawn),
            device_tokens=request.sources.get(Source.DEVICE, 0) * pool.block_tokens,
            host_tokens=request.sources.get(Source.HOST, 0) * pool.block_tokens,
            queued_s=started_s - timing.arrival_s,
            load_wait_s=request.load_wait_s,
            first_token_s=None if first_s is None else first_s - timing.arrival_s,
            total_s=ended_s - timing.arrival_s,
            prefetched_bytes=request.prefetched_blocks * pool.geometry.block_bytes,
        )

    def _note_stats(self, *, now: bool = False) -> None:
        now_s = time.monotonic()
        if now or now_s - self._stats_s >= _STATS_EVERY_S:
            self._stats_s, self.stats = now_s, self._engine.stats()

    def _flush(self) -> None:
        if self._events or self._pieces:
            events, self._events = self._events, []
            pieces, self._pieces = self._pieces, {}
            self._post(events, pieces)

    def _close(self) -> None:
        try:
            self._engine.close()
        except (ForebayError, OSError, RuntimeError):
            logger.exception("the engine did not close cleanly")
        # The web framework keeps endpoints for ever, and through them this: not the pools too.
        self._jobs.clear()
        self._sessions.clear()
        del self._engine
