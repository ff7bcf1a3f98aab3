"""What is asked of the mover when a request's turn comes and passes; it moves nothing by itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from fakes import FakeClock
from small_cache import TOKENS

from forebay import Cache, CacheSettings, Mode
from forebay.core.planner import Running
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
LOAD_S = 4.0
"""Of four blocks."""


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

    def end(self, transfer: int, outcome: Outcome = Outcome.DONE, done: int | None = None) -> None:
        """Of its blocks the first `done` have landed."""
        blocks = len(self.flying.pop(transfer).sources)
        landed = blocks if done is None else done
        size = landed * BYTES
        completion = Completion(transfer, outcome, landed, landed, size, 0.0, 1.0, "")
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
        self, mode: Mode, *, in_flight_s: float = 100.0, waits_on_host: bool = False
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
            ticket = self.cache.admit(self.ask(path), first=True)
            assert isinstance(ticket, Ticket)
            self.compute(ticket)
            for transfer in list(self.mover.flying):
                self.mover.end(transfer)
            self.cache.poll()

    def ask(self, path: int, blocks: int = 4, **more: int) -> int:
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

    def compute(self, ticket: Ticket) -> None:
        """Run the request as if it had one token less, so that four requests fill the pool."""
        tokens = 4 * TOKENS
        assert self.cache.grow(ticket, tokens) is Growth.GROWN
        start = min(ticket.cached_tokens, tokens - 1)
        step = self.cache.begin_step([(ticket, start, tokens - start)])
        self.cache.step_launched(step)
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


@pytest.fixture
def rig() -> Rig:
    return Rig(Mode.ASYNCHRONOUS)


@pytest.fixture
def ahead() -> Rig:
    return Rig(Mode.LOOK_AHEAD)


def test_what_is_on_its_way_is_expedited_once_when_the_turn_comes(ahead: Rig):
    request = ahead.ask(0)
    ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    assert ahead.mover.loads == {ahead.load(): TransferClass.PREFETCH}
    for _ in range(3):
        assert ahead.admit(request) is NotYet.LOADING
    assert ahead.mover.expedited == [ahead.load()]


def test_what_begins_when_the_turn_has_come_is_demanded_from_the_start(rig: Rig):
    rig.admit(rig.ask(0))
    assert rig.mover.loads == {rig.load(): TransferClass.DEMAND}
    assert rig.cache.stats().prefetch_open_bytes == 0


def test_what_is_not_issued_by_its_bound_is_stopped_and_what_landed_is_kept(rig: Rig):
    request = rig.ask(0)
    assert rig.admit(request) is NotYet.LOADING
    load = rig.load()
    rig.clock.now_s += 2 * LOAD_S - 0.1
    assert rig.admit(request) is NotYet.LOADING
    assert not rig.mover.cancelled
    rig.clock.now_s += 0.2
    assert rig.admit(request) is NotYet.LOADING
    assert rig.mover.cancelled == [load]
    rig.mover.end(load, Outcome.CANCELLED, done=3)
    ticket = rig.admit(request)
    assert isinstance(ticket, Ticket)
    assert ticket.cached_tokens == 3 * TOKENS
    assert (ticket.misses["late"], ticket.sources["host"]) == (1, 3)


def test_a_link_that_does_not_end_what_was_cancelled_is_not_waited_for(rig: Rig):
    request = rig.ask(0, 3)
    bound_s = 2 * 3.0
    assert rig.admit(request) is NotYet.LOADING
    rig.clock.now_s += bound_s + 0.1
    assert rig.admit(request) is NotYet.LOADING
    rig.clock.now_s += bound_s + 0.8
    assert rig.admit(request) is NotYet.LOADING
    assert not rig.cache.stats().link_stopped
    rig.clock.now_s += 0.2
    ticket = rig.admit(request)
    assert isinstance(ticket, Ticket)
    assert (ticket.cached_tokens, ticket.misses["late"]) == (0, 3)
    assert rig.cache.stats().link_stopped


def test_a_load_that_two_want_is_stopped_when_both_are_gone(rig: Rig):
    both = [rig.ask(0), rig.ask(0)]
    for request in both:
        assert rig.admit(request, first=request == both[0]) is NotYet.LOADING
    load = rig.load()
    rig.cache.abort(both[0])
    assert not rig.mover.cancelled
    assert rig.covered(both[1]) == 4
    rig.cache.abort(both[1])
    assert rig.mover.cancelled == [load]


def test_a_load_that_is_late_for_one_and_in_time_for_another_stops_no_link(ahead: Rig):
    ahead.cache.rates.prefill_tokens_per_s.value = 4.0 * TOKENS
    now, later = ahead.ask(0, 3), ahead.ask(0, 3)
    ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    assert ahead.covered(later) == 3
    assert ahead.admit(now) is NotYet.LOADING
    for waited_s in (1.1, 2.0):  # past its bound, then past two of them and the grace
        ahead.clock.now_s += waited_s
        ticket = ahead.admit(now)
    assert isinstance(ticket, Ticket)
    assert (ticket.cached_tokens, ticket.misses["late"]) == (0, 3)
    assert not ahead.cache.stats().link_stopped
    assert not ahead.mover.cancelled
    ahead.mover.end(ahead.load())
    ahead.cache.poll()
    other = ahead.cache.admit(later, first=True)
    assert isinstance(other, Ticket)
    assert other.sources["host"] == 3


def test_a_link_that_brings_nothing_stops_though_others_want_the_load_still(ahead: Rig):
    ahead.cache.rates.prefill_tokens_per_s.value = 4.0 * TOKENS
    line = [ahead.ask(0, 3) for _ in range(20)]
    for _ in line:
        ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    assert all(ahead.covered(each) == 3 for each in line)
    for each in line:
        while not isinstance(ahead.admit(each), Ticket):
            ahead.clock.now_s += 0.5
        if ahead.cache.stats().link_stopped:
            break
        ahead.cache.abort(each)
    # Four times what it should take, and the grace.
    assert 4 * 3.0 + 1.0 < ahead.clock.now_s < 4 * 3.0 + 5.0
    assert not ahead.mover.cancelled


def test_what_is_issued_already_is_not_stopped(rig: Rig):
    request = rig.ask(0)
    rig.admit(request)
    rig.mover.issue(rig.load())
    rig.cache.poll()
    rig.cache.abort(request)
    assert not rig.mover.cancelled


def test_the_first_takes_back_what_the_last_in_line_has_and_stops_its_load(ahead: Rig):
    last, middle = ahead.ask(0, 2, priority=9), ahead.ask(1, 2, priority=8)
    ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    assert (ahead.covered(middle), ahead.covered(last)) == (2, 2)
    loads = list(ahead.mover.loads)
    first = ahead.ask(5, 5)
    ahead.admit(first)
    assert (ahead.covered(middle), ahead.covered(last)) == (2, 0)
    assert ahead.mover.cancelled == [loads[-1]]


def test_nothing_is_taken_back_where_that_would_not_make_the_room(ahead: Rig):
    ticket = ahead.cache.admit(ahead.ask(6, 1), first=True)
    assert isinstance(ticket, Ticket)
    assert ahead.cache.grow(ticket, 3 * TOKENS) is Growth.GROWN
    later = ahead.ask(0, 2)
    ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    assert ahead.covered(later) == 2
    assert ahead.admit(ahead.ask(5, 6, priority=-1)) is NotYet.FULL
    assert ahead.covered(later) == 2


@pytest.mark.parametrize("outcome", [Outcome.DONE, Outcome.CANCELLED, Outcome.FAILED])
def test_only_loads_that_were_done_measure_the_link(rig: Rig, outcome: Outcome):
    rate = rig.cache.rates.link_bytes_per_s
    rate.weight = 1.0
    rig.admit(rig.ask(0))
    rig.mover.end(rig.load(), outcome, done=2)
    rig.cache.poll()
    assert (rate.value == 2 * BYTES) == (outcome is Outcome.DONE)


def test_what_is_in_flight_bounds_what_look_ahead_begins():
    ahead = Rig(Mode.LOOK_AHEAD, in_flight_s=3.0)
    both = [ahead.ask(0), ahead.ask(1)]
    for _ in range(3):
        ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    assert [ahead.covered(each) for each in both] == [3, 0]
    ahead.mover.end(ahead.load())
    ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    assert [ahead.covered(each) for each in both] == [4, 2]


@pytest.mark.parametrize("on_host", [False, True])
def test_a_request_starts_when_its_loads_are_issued_or_where_the_host_waits_landed(on_host: bool):
    rig = Rig(Mode.ASYNCHRONOUS, waits_on_host=on_host)
    request = rig.ask(0)
    assert rig.admit(request) is NotYet.LOADING
    load = rig.load()
    rig.mover.issue(load)
    if on_host:
        assert rig.admit(request) is NotYet.LOADING
        rig.mover.end(load)
    ticket = rig.admit(request)
    assert isinstance(ticket, Ticket)
    assert ticket.waits == (set() if on_host else {load})


@pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.FAILED])
def test_what_did_not_come_of_a_prefetch_ended_as_its_load_did(ahead: Rig, outcome: Outcome):
    ahead.ask(0)
    ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    ahead.mover.end(ahead.load(), outcome, done=3)
    ahead.cache._take_report()
    stats = ahead.cache.stats()
    assert stats.prefetch_bytes[outcome.name.lower()] == BYTES
    assert stats.prefetch_open_bytes == 3 * BYTES
