"""What is asked of the mover when a request's turn comes and passes; it moves nothing by itself."""

from __future__ import annotations

import pytest
from small_cache import TOKENS
from turn_rig import BYTES, Rig

from forebay import Mode
from forebay.core.ledger import Source
from forebay.core.planner import Running
from forebay.core.requests import Growth, NotYet, Ticket
from forebay.errors import LinkTimeoutError, NotIssuedError, ProtocolError
from forebay.transfer.messages import Outcome, TransferClass
from forebay.transfer.mover import TransferFailedError

LOAD_S = 4.0
"""Of four blocks."""


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
    other = ahead.start(later)
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


def test_no_step_begins_that_reads_what_is_not_issued():
    rig = Rig(Mode.SYNCHRONOUS)
    ticket = rig.admit(rig.ask(0))
    assert isinstance(ticket, Ticket)
    with pytest.raises(ProtocolError, match="not issued"):
        rig.cache.begin_step([(ticket, 4 * TOKENS, 1)])
    rig.mover.issue(rig.load())
    rig.cache.poll()
    with pytest.raises(ProtocolError, match="4 slots, too few for 65 tokens"):
        rig.cache.begin_step([(ticket, 4 * TOKENS, 1)])
    assert rig.cache.grow(ticket, 4 * TOKENS + 1) is Growth.GROWN
    assert rig.cache.begin_step([(ticket, 4 * TOKENS, 1)]) > 0


def test_what_was_issued_after_its_turn_had_come_is_late_by_as_long(ahead: Rig):
    request = ahead.ask(0)
    ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    assert ahead.admit(request) is NotYet.LOADING
    ahead.clock.now_s += 2.0
    ahead.mover.issue(ahead.load())
    ticket = ahead.admit(request)
    assert isinstance(ticket, Ticket)
    assert (ticket.load_wait_s, ticket.prefetched_blocks) == (2.0, 4)
    assert ahead.cache.stats().prefetch_bytes["late"] == 4 * BYTES


def test_what_nobody_reads_is_wasted_after_its_time(ahead: Rig):
    request = ahead.ask(0)
    ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    ahead.mover.end(ahead.load())
    ahead.cache.poll()
    ahead.cache.abort(request)
    assert ahead.cache.stats().prefetch_open_bytes == 4 * BYTES
    ahead.clock.now_s += 1e4
    ahead.cache.poll()
    stats = ahead.cache.stats()
    assert (stats.prefetch_bytes["wasted"], stats.prefetch_open_bytes) == (4 * BYTES, 0)


def test_what_was_loaded_before_a_preemption_is_on_the_device_after_it(rig: Rig):
    request = rig.ask(0)
    assert rig.admit(request) is NotYet.LOADING
    rig.mover.end(rig.load())
    for source in ("host", "device"):
        ticket = rig.admit(request)
        assert isinstance(ticket, Ticket)
        assert ticket.sources[Source(source)] == 4
        rig.cache.preempt(ticket, ticket.request)


def test_a_stream_that_computes_is_the_one_that_waits_and_is_watched(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    request = rig.ask(0)
    assert rig.admit(request) is NotYet.LOADING
    rig.mover.issue(rig.load())
    ticket = rig.admit(request)
    assert isinstance(ticket, Ticket)
    told: list[tuple[str, int]] = []
    monkeypatch.setattr(
        rig.mover, "wait", lambda _, stream, *__, **___: told.append(("wait", stream))
    )
    monkeypatch.setattr(rig.mover, "step_launched", lambda _, stream: told.append(("step", stream)))
    assert rig.cache.ready([ticket], stream=7) == []
    assert rig.cache.grow(ticket, 4 * TOKENS + 1) is Growth.GROWN
    rig.cache.step_launched(rig.cache.begin_step([(ticket, 4 * TOKENS, 1)]), stream=7)
    assert told == [("wait", 7), ("step", 7)]


def test_a_cache_is_quiet_only_where_nothing_waits(rig: Rig):
    assert rig.cache.quiet
    request = rig.ask(5)
    assert not rig.cache.quiet
    rig.cache.abort(request)
    assert rig.cache.quiet
    rig.cache.rates.link_bytes_per_s.value = 1e-9
    ticket = rig.admit(rig.ask(5))
    assert isinstance(ticket, Ticket)
    rig.compute(ticket)
    (save,) = rig.mover.flying
    rig.mover.end(save)
    rig.cache._take_report()
    assert not rig.cache.quiet, "one block at a time is saved"


def issued(rig: Rig, requests: list[int]) -> list[Ticket]:
    """The tickets of `requests`, which want the same load, once that is issued."""
    for request in requests:
        assert rig.admit(request) is NotYet.LOADING
    rig.mover.issue(rig.load())
    rig.cache.poll()
    tickets = [rig.cache.admit(request, first=True) for request in requests]
    return [ticket for ticket in tickets if isinstance(ticket, Ticket)]


@pytest.mark.parametrize("timeout_s", [0.5, 1e6])
def test_a_load_that_was_waited_for_in_vain_is_not_waited_for_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, timeout_s: float
):
    tickets = issued(rig, [rig.ask(0, 2), rig.ask(0, 2)])
    waits: list[tuple[list[int], float]] = []

    def in_vain(ids: list[int], _: int, bound_s: float, **__: object) -> None:
        waits.append((ids, bound_s))
        if ids:
            rig.clock.now_s += bound_s
            raise LinkTimeoutError

    monkeypatch.setattr(rig.mover, "wait", in_vain)
    bound_s = min(timeout_s, rig.cache._loads.longest_s)
    for ticket in tickets:
        assert rig.cache.ready([ticket], timeout_s=timeout_s) == [ticket]
    assert waits == [([rig.load()], pytest.approx(bound_s)), ([], pytest.approx(bound_s))]
    assert rig.cache.stats().link_stopped


def test_a_load_that_ends_as_its_wait_does_is_there(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    (ticket,) = issued(rig, [rig.ask(0)])

    def ends(ids: list[int], _: int, bound_s: float, **__: object) -> None:
        rig.clock.now_s += bound_s
        rig.mover.end(*ids)
        raise LinkTimeoutError

    monkeypatch.setattr(rig.mover, "wait", ends)
    assert rig.cache.ready([ticket]) == []
    assert not rig.cache.stats().link_stopped


@pytest.mark.parametrize("error", [TransferFailedError, NotIssuedError])
def test_who_cannot_wait_for_a_load_has_lost_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
):
    """The report that tells why may be late."""
    (ticket,) = issued(rig, [rig.ask(0)])

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(rig.mover, "wait", refuse)
    assert rig.cache.ready([ticket]) == [ticket]
    assert not rig.cache.stats().link_stopped
