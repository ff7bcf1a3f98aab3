"""What one event costs the planner: 256 requests waiting, a million blocks cached.

Every event (an arrival, the end of transfers, a step, the end of a request, an abort) is followed
by one `Cache.poll`, which takes in reports, plans and flushes saves; the figure is the CPU time of
the event and that poll together, garbage collection included. The mover is instant: it moves
nothing.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from forebay.cache import Cache
from forebay.config import CacheSettings
from forebay.core.planner import Running
from forebay.core.requests import Request, Ticket
from forebay.measure.report import Figure, Goal, arguments, finish
from forebay.transfer.messages import Completion, Outcome, Report, Transfer, TransferClass

BLOCK_TOKENS = 16
KEY_BYTES = 4 * BLOCK_TOKENS
SYSTEM_BLOCKS, TURN_BLOCKS, TURNS = 32, 66, 4
SYSTEMS, CONVERSATIONS = 64, 60
WAITING = 256
EVENTS = 10_000
RUNNING = 32


class InstantMover:
    """Ends transfers, oldest first, when told to; moves nothing."""

    def __init__(self) -> None:
        self.flying: deque[Transfer] = deque()
        self._report: list[Completion] = []
        self._issued: list[int] = []
        self._step = 0

    def submit(self, transfers: Sequence[Transfer]) -> None:
        self.flying.extend(transfers)

    def end(self, count: int) -> None:
        for _ in range(min(count, len(self.flying))):
            transfer = self.flying.popleft()
            blocks = len(transfer.sources)
            self._issued.append(transfer.id)
            self._report.append(
                Completion(transfer.id, Outcome.DONE, blocks, blocks, blocks << 21, 0.0, 1e-3, "")
            )

    def cancel(self, ids: Sequence[int]) -> None: ...

    def expedite(
        self, ids: Sequence[int], transfer_class: TransferClass, deadline_s: float
    ) -> None: ...

    def use_bands(self, ids: Sequence[int], ends: Sequence[int]) -> None: ...

    def step_launched(self, step: int, stream: int = 0) -> None:
        self._step = step

    def step_abandoned(self, step: int) -> None: ...

    def poll(self) -> Report:
        told = Report(tuple(self._issued), tuple(self._report), self._step)
        self._issued, self._report = [], []
        return told

    def wait(
        self,
        ids: Sequence[int],
        stream: int = 0,
        timeout_s: float = 30.0,
        *,
        band: int | None = None,
    ) -> None: ...

    def wait_news(self, timeout_s: float) -> bool:
        return True

    def windows(self) -> np.ndarray:
        return np.empty(0)

    @property
    def windows_dropped(self) -> int:
        return 0

    def close(self, timeout_s: float) -> None: ...


class Load:
    """A cache filled with conversations, and the events that happen to it."""

    def __init__(self) -> None:
        self.rng = random.Random(7)
        blocks = SYSTEMS * (SYSTEM_BLOCKS + CONVERSATIONS * TURNS * TURN_BLOCKS)
        self.mover = InstantMover()
        settings = CacheSettings(
            block_tokens=BLOCK_TOKENS,
            block_bytes=2 << 20,
            device_slots=40_000,
            host_slots=blocks + 40_000,
            link_bytes_per_s=50e9,
        )
        self.cache = Cache(settings, self.mover, key_bytes=KEY_BYTES)
        self.paths = [
            self._keys(100 + system, SYSTEM_BLOCKS)
            + self._keys(1000 + system * CONVERSATIONS + talk, TURNS * TURN_BLOCKS)
            for system in range(SYSTEMS)
            for talk in range(CONVERSATIONS)
        ]
        self.next_id = 1
        self.running: list[Ticket] = []
        self.cached_blocks = blocks
        gc.freeze()  # as a serving process does once it is up

    def _keys(self, seed: int, blocks: int) -> bytes:
        tokens = np.random.default_rng(seed).integers(0, 50_000, blocks * BLOCK_TOKENS)
        return tokens.astype(np.int32).tobytes()

    def fill(self) -> None:
        """Compute and save every conversation once."""
        for keys in self.paths:
            ticket = self.start(self.enqueue(keys), first=True)
            if ticket is None:
                raise SystemExit("the pool is too small for the fill")
            self.step([ticket], len(keys) // KEY_BYTES * BLOCK_TOKENS + 1)
            self.cache.commit(ticket, keys)
            self.cache.finish(ticket)
            self.mover.end(1000)
            self.cache.poll()
            self.mover.end(1000)
            self.cache.poll()

    def enqueue(self, keys: bytes) -> int:
        request = self.next_id
        self.next_id += 1
        tokens = len(keys) // KEY_BYTES * BLOCK_TOKENS
        self.cache.enqueue(
            Request(
                id=request,
                namespace=b"bench",
                keys=keys,
                tokens=tokens + 5,
                max_answer_tokens=200,
                arrival_s=float(request),
            )
        )
        return request

    def start(self, request: int, *, first: bool) -> Ticket | None:
        answer = self.cache.admit(request, first=first)
        return answer if isinstance(answer, Ticket) else None

    def step(self, tickets: list[Ticket], tokens: int) -> None:
        for ticket in tickets:
            self.cache.grow(ticket, tokens)
        number = self.cache.begin_step([(ticket, tokens - 1, 1) for ticket in tickets])
        self.cache.step_launched(number)

    # -- the events --------------------------------------------------------------------------------

    def arrive(self) -> None:
        keys = self.rng.choice(self.paths)
        blocks = SYSTEM_BLOCKS + self.rng.randint(1, TURNS) * TURN_BLOCKS
        self.enqueue(keys[: blocks * KEY_BYTES])

    def event(self) -> None:
        """One event and the poll behind it."""
        waiting = self.cache.waiting()
        kind = self.rng.random()
        if len(waiting) < WAITING or kind < 0.2:
            self.arrive()
        elif kind < 0.5:
            self.mover.end(2)
        elif kind < 0.6:
            self.cache.abort(self.rng.choice(waiting).id)
        elif kind < 0.8 and self.running:
            self.decode()
        elif len(self.running) < RUNNING:
            for place, request in enumerate(waiting[:4]):
                ticket = self.start(request.id, first=place == 0)
                if ticket is not None:
                    self.running.append(ticket)
                    break
        else:
            self.cache.finish(self.running.pop(0))
        self.cache.poll([Running(0, 50)] * len(self.running), RUNNING - len(self.running))

    def decode(self) -> None:
        number = self.cache.begin_step(
            [(t, t.cached_tokens, 1) for t in self.running if len(t.slots) * 16 > t.cached_tokens]
        )
        self.cache.step_launched(number)


GOALS = {
    "plan_ms_256_waiting": Goal(at_most=1.0),
    "plan_ms_256_waiting_worst": Goal(at_most=5.0),
}


def main() -> int:
    """Fill the cache, then time the events."""
    options = arguments(__doc__ or "").parse_args()
    load = Load()
    load.fill()
    while len(load.cache.waiting()) < WAITING:
        load.arrive()
        load.cache.poll()
    spent_ms: list[float] = []
    for _ in range(EVENTS):
        began_s = time.process_time()
        load.event()
        spent_ms.append(1e3 * (time.process_time() - began_s))
    settings = {
        "waiting": WAITING,
        "events": EVENTS,
        "cached_blocks": load.cached_blocks,
        "p99_ms": statistics.quantiles(spent_ms, n=100)[98],
    }
    # One sample per second of events: ten thousand numbers say no more than their shape.
    shown = sorted(spent_ms)[:: EVENTS // 100]
    return finish(
        [
            Figure("plan_ms_256_waiting", statistics.fmean(spent_ms), "ms", shown, settings),
            Figure("plan_ms_256_waiting_worst", max(spent_ms), "ms", shown, settings),
        ],
        GOALS,
        json=options.json,
        strict=options.strict,
    )


if __name__ == "__main__":
    sys.exit(main())
