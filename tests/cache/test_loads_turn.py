"""What is asked of the mover when a request's turn comes and passes; it moves nothing by itself."""

from __future__ import annotations

import pytest
from small_cache import TOKENS
from turn_rig import BYTES, Rig

from forebay import Mode
from forebay.core.planner import Running
from forebay.core.requests import Growth, NotYet, Ticket
from forebay.errors import LinkTimeoutError, ProtocolError
from forebay.transfer.messages import Outcome, TransferClass

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
    assert rig.cache.grow(ticket, 4 * TOKENS + 1) is Growth.GROWN
    with pytest.raises(ProtocolError, match="not issued"):
        rig.cache.begin_step([(ticket, 4 * TOKENS, 1)])
    rig.mover.issue(rig.load())
    rig.cache.poll()
    rig.cache.begin_step([(ticket, 4 * TOKENS, 1)])


def test_a_load_that_was_waited_for_in_vain_is_not_waited_for_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    both = [rig.ask(0, 2), rig.ask(0, 2)]
    for request in both:
        assert rig.admit(request) is NotYet.LOADING
    load = rig.load()
    rig.mover.issue(load)
    rig.cache.poll()
    waited: list[list[int]] = []

    def in_vain(ids: list[int], _: int, timeout_s: float, **__: object) -> None:
        waited.append(ids)
        if ids:
            rig.clock.now_s += timeout_s
            raise LinkTimeoutError

    monkeypatch.setattr(rig.mover, "wait", in_vain)
    tickets = [rig.cache.admit(request, first=True) for request in both]
    for ticket in tickets:
        assert isinstance(ticket, Ticket)
        assert rig.cache.ready([ticket]) == [ticket]
    assert waited == [[load], []]
