"""A cache over a mover that moves nothing by itself, and a clock that a test moves on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fakes import FakeClock
from small_cache import TOKENS

from forebay import Cache, CacheSettings, Mode
from forebay.core.requests import Growth, NotYet, Request, Ticket
from forebay.transfer.messages import (
    Completion,
    Direction,
    Outcome,
    Report,
    Transfer,
    TransferClass,
)

BYTES = 1000


class ListMover:
    """Notes what it is told, and reports what a test lets happen."""

    def __init__(self) -> None:
        self.flying: dict[int, Transfer] = {}
        self.cancelled: list[int] = []
        self.expedited: list[int] = []
        self._report = Report((), (), 0)

    @property
    def loads(self) -> dict[int, TransferClass]:
        loads = (each for each in self.flying.values() if each.direction is Direction.LOAD)
        return {each.id: each.transfer_class for each in loads}

    def submit(self, transfers: Sequence[Transfer]) -> None:
        self.flying.update({each.id: each for each in transfers})

    def cancel(self, ids: Sequence[int]) -> None:
        self.cancelled += ids

    def expedite(self, ids: Sequence[int], transfer_class: TransferClass, _: float) -> None:
        assert transfer_class is TransferClass.DEMAND
        self.expedited += ids

    def step_launched(self, step: int, stream: int = 0) -> None: ...

    def wait(self, *_: object, **__: object) -> None: ...

    def end(
        self,
        transfer: int,
        outcome: Outcome = Outcome.DONE,
        done: int | None = None,
        torn: int = 0,
    ) -> None:
        """Of its blocks the first `done` have landed, and the next `torn` may never have."""
        blocks = len(self.flying.pop(transfer).sources)
        landed = blocks if done is None else done
        size = landed * BYTES
        completion = Completion(transfer, outcome, landed, landed + torn, size, 0.0, 1.0, "")
        self._report = Report((), (*self._report.completions, completion), 0)

    def issue(self, transfer: int) -> None:
        self._report = Report((transfer,), (), 0)

    def poll(self) -> Report:
        report, self._report = self._report, Report((), (), 0)
        return report


class Rig:
    """A cache over eight device blocks; four prompts of four are in host memory, two alone there.

    The link takes a second for a block, and to compute one takes a hundred.
    """

    def __init__(
        self, mode: Mode, *, in_flight_s: float = 100.0, waits_on_host: bool = False, **more: Any
    ) -> None:
        self.mover, self.clock = ListMover(), FakeClock()
        sizes = CacheSettings(
            block_tokens=TOKENS,
            block_bytes=BYTES,
            device_slots=8,
            host_slots=64,
            window_bytes=BYTES,
            mode=mode,
            min_load_tokens=0,
            prefetch_share=0.9,
            link_bytes_per_s=float(BYTES),
            saves_in_flight_s=100.0,
            in_flight_s=in_flight_s,
            waits_on_host=waits_on_host,
            give_up_grace_s=1.0,
            **more,
        )
        self.cache = Cache(sizes, self.mover, key_bytes=4 * TOKENS, clock=self.clock)
        rates = self.cache.rates
        for rate, value in (
            (rates.link_bytes_per_s, float(BYTES)),
            (rates.prefill_tokens_per_s, TOKENS / 100.0),
            (rates.step_s, 0.01),
            (rates.load_latency_s, 0.0),
        ):
            rate.value, rate.weight, rate.samples = value, 0.0, 1
        self._requests = 0
        for path in range(4):
            self.compute(self.start(self.ask(path)))
            for transfer in list(self.mover.flying):
                self.mover.end(transfer)
            self.cache.poll()

    def ask(self, path: int, blocks: int = 4, **more: Any) -> int:
        self._requests += 1
        keys = (1000 * path + np.arange(blocks * TOKENS)).astype(np.int32).tobytes()
        self.cache.enqueue(
            Request(
                id=self._requests,
                namespace=b"n",
                keys=keys,
                tokens=blocks * TOKENS + 1,
                max_answer_tokens=1,
                arrival_s=float(self._requests),
                **more,
            )
        )
        return self._requests

    def start(self, request: int) -> Ticket:
        """The ticket of a request that starts at once, before all others."""
        ticket = self.cache.admit(request, first=True)
        assert isinstance(ticket, Ticket)
        return ticket

    def running(self, path: int, blocks: int) -> Ticket:
        """A request that runs with so many blocks, of a path of one."""
        ticket = self.start(self.ask(path, 1))
        assert self.cache.grow(ticket, blocks * TOKENS) is Growth.GROWN
        return ticket

    def step(self, ticket: Ticket, blocks: int) -> None:
        """Compute what is not cached of its first `blocks`."""
        tokens = blocks * TOKENS
        assert self.cache.grow(ticket, tokens) is Growth.GROWN
        start = min(ticket.cached_tokens, tokens - 1)
        step = self.cache.begin_step([(ticket, start, tokens - start)])
        self.cache.step_launched(step)

    def compute(self, ticket: Ticket, blocks: int = 4) -> None:
        """Run the request as if it had one token less, so that four requests fill the pool."""
        self.step(ticket, blocks)
        self.cache.commit(ticket, ticket.request.keys)
        self.cache.finish(ticket)
        self.cache.poll()

    def admit(self, request: int, *, first: bool = True) -> Ticket | NotYet:
        self.cache.poll()
        return self.cache.admit(request, first=first)

    def load(self) -> int:
        """The only load in flight."""
        (transfer,) = self.mover.loads
        return transfer

    def covered(self, request: int) -> int:
        return self.cache._line[request].covered
