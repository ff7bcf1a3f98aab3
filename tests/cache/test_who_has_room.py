"""Who may take room from whom, and what waits for room is not taken from it again."""

from __future__ import annotations

import pytest
from invariants import check
from small_cache import TOKENS
from turn_rig import BYTES, Rig

from forebay import Mode
from forebay.core.planner import Running
from forebay.core.requests import Growth, NotYet, Ticket
from forebay.core.slots import SlotState
from forebay.errors import RequestError
from forebay.transfer.messages import Outcome


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
    ahead.running(6, 3)
    later = ahead.ask(0, 2)
    ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    assert ahead.covered(later) == 2
    assert ahead.admit(ahead.ask(5, 6, priority=-1)) is NotYet.FULL
    assert ahead.covered(later) == 2


def test_who_takes_leases_back_to_load_keeps_its_own(ahead: Rig):
    later = [ahead.ask(0, 4, priority=9), ahead.ask(1, 2, priority=8)]
    for _ in range(2):
        ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    assert [ahead.covered(each) for each in later] == [4, 2]
    first = ahead.ask(2, 4)
    assert ahead.cache.admit(first, first=True) is NotYet.FULL
    assert ahead.covered(later[0]) == 0
    assert ahead.covered(first) > 0


def test_who_takes_leases_back_in_vain_keeps_its_own(ahead: Rig):
    """What a running request uses too is no room, whoever gives up its lease on it."""
    assert isinstance(ahead.cache.admit(ahead.ask(2), first=True), Ticket)
    first, later = ahead.ask(0, 1, priority=-1), ahead.ask(2)
    ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    assert (ahead.covered(first), ahead.covered(later)) == (1, 4)
    ahead.cache._loads.revoke(7, spare=ahead.cache._line[first])
    assert (ahead.covered(first), ahead.covered(later)) == (1, 0)


def test_its_own_leases_are_no_room_that_the_first_could_take_back(ahead: Rig):
    first, later = ahead.ask(0, 3), ahead.ask(1, 1)
    for _ in range(2):
        ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    assert (ahead.covered(first), ahead.covered(later)) == (3, 1)
    ahead.cache._loads.revoke(6, spare=ahead.cache._line[first])
    assert ahead.covered(later) == 1
    ahead.cache._loads.revoke(5, spare=ahead.cache._line[first])
    assert ahead.covered(later) == 0


def test_what_look_ahead_had_no_room_for_is_counted_when_its_turn_comes(ahead: Rig):
    ahead.running(6, 8)
    request = ahead.ask(0)
    ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    refused = [ahead.cache.stats().prefetch_bytes["refused"]]
    for _ in range(2):
        assert ahead.cache.admit(request, first=True) is NotYet.FULL
        refused.append(ahead.cache.stats().prefetch_bytes["refused"])
    assert refused == [0, 4 * BYTES, 4 * BYTES]


def test_only_the_first_takes_back_leases(ahead: Rig):
    later = ahead.ask(0, 4)
    ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    assert ahead.covered(later) == 4
    other = ahead.ask(5, 5)
    assert ahead.cache.admit(other, first=False) is NotYet.FULL
    assert ahead.covered(later) == 4
    assert isinstance(ahead.cache.admit(other, first=True), Ticket)
    assert ahead.covered(later) == 0


def test_only_the_first_displaces_what_others_that_wait_want(rig: Rig):
    for path in (2, 3):
        rig.ask(path)
    other = rig.ask(9, 3)
    assert rig.cache.admit(other, first=False) is NotYet.FULL
    assert isinstance(rig.cache.admit(other, first=True), Ticket)


def test_what_the_first_waits_for_look_ahead_does_not_take(ahead: Rig):
    ahead.running(6, 3)
    later, first = ahead.ask(0, 4), ahead.ask(5, 5, priority=-1)
    assert ahead.cache.admit(first, first=True) is NotYet.FULL
    ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    assert ahead.covered(later) == 0
    ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    assert ahead.covered(later) == 4, "nobody asked again"


def test_what_a_running_request_lacks_look_ahead_does_not_take_again(ahead: Rig):
    ticket = ahead.start(ahead.ask(6, 1))
    later = ahead.ask(0, 4)
    ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    assert ahead.cache.grow(ticket, 7 * TOKENS) is Growth.LATER
    ahead.mover.end(ahead.load(), Outcome.CANCELLED, done=0)
    ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    assert ahead.covered(later) < 4
    assert ahead.cache.grow(ticket, 7 * TOKENS) is Growth.GROWN


@pytest.mark.parametrize("no_save", [False, True])
def test_what_is_not_to_be_saved_is_not_found_by_others(rig: Rig, no_save: bool):
    ticket = rig.start(rig.ask(7, no_save=no_save))
    rig.compute(ticket)
    again = rig.start(rig.ask(7))
    assert again.cached_tokens == (0 if no_save else 4 * TOKENS)


def test_who_shares_much_with_what_is_being_computed_waits_for_it():
    rig = Rig(Mode.ASYNCHRONOUS, min_shared_tokens=2 * TOKENS)
    ticket = rig.start(rig.ask(7))
    little, much = rig.ask(7, 2), rig.ask(7, 3)
    assert rig.cache.admit(much, first=True) is NotYet.COMPUTING
    assert isinstance(rig.cache.admit(little, first=True), Ticket)
    rig.cache.finish(ticket)
    assert isinstance(rig.cache.admit(much, first=True), Ticket)


def test_who_matches_what_another_has_published_so_far_waits_for_the_rest():
    rig = Rig(Mode.ASYNCHRONOUS, min_shared_tokens=TOKENS)
    ticket = rig.start(rig.ask(7, 5))
    other = rig.ask(7, 5)
    rig.step(ticket, 2)
    rig.cache.commit(ticket, ticket.request.keys)
    assert rig.cache.admit(other, first=True) is NotYet.COMPUTING
    assert len(rig.cache._line[other].blocks) == 2


def test_where_steps_stall_a_load_begins_only_where_its_request_starts():
    rig = Rig(Mode.SYNCHRONOUS)
    rig.running(6, 4)
    assert rig.admit(rig.ask(0, 3)) is NotYet.FULL
    assert not rig.mover.loads


def saving(rig: Rig, count: int) -> None:
    """So many idle blocks on the device are being saved, and never cease to be."""
    rig.compute(rig.start(rig.ask(7, count)), count)
    assert rig.cache._store.device.counts()[SlotState.SAVING] == count


def test_what_is_being_saved_is_no_room_for_which_look_ahead_keeps_what_it_has(ahead: Rig):
    """Others may be saved when these are: a running request does not wait for that."""
    ticket = ahead.start(ahead.ask(6, 1))
    later = ahead.ask(0, 2)
    ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    for load in list(ahead.mover.loads):
        ahead.mover.end(load)
    ahead.cache._take_report()
    saving(ahead, 1)
    assert ahead.covered(later) == 2
    assert ahead.cache.grow(ticket, 5 * TOKENS) is Growth.GROWN
    assert ahead.covered(later) == 2
    assert ahead.cache.grow(ticket, 6 * TOKENS) is Growth.GROWN
    assert ahead.covered(later) == 0


def test_look_ahead_leaves_what_a_running_request_waits_for_beside_what_is_being_saved(ahead: Rig):
    ticket = ahead.start(ahead.ask(6, 1))
    saving(ahead, 4)
    later = ahead.ask(0, 1)
    assert ahead.cache.grow(ticket, 5 * TOKENS) is not Growth.GROWN
    ahead.cache.poll([Running(0, 10_000)], free_run_slots=0)
    assert ahead.covered(later) == 0


def test_a_running_request_waits_for_copies_as_long_as_some_end(rig: Rig):
    ticket = rig.running(6, 4)
    for path in (0, 1):
        assert rig.admit(rig.ask(path, 2)) is NotYet.LOADING
    first, second = rig.mover.loads
    assert rig.cache.grow(ticket, 8 * TOKENS) is Growth.LATER
    rig.clock.now_s += 0.9
    rig.mover.end(first, Outcome.CANCELLED, done=0)
    rig.cache.poll()
    for _ in range(2):
        assert rig.cache.grow(ticket, 8 * TOKENS) is Growth.LATER
        rig.clock.now_s += 0.9
    assert rig.cache.grow(ticket, 8 * TOKENS) is Growth.FULL, "none ended for a second"
    rig.mover.end(second, Outcome.CANCELLED, done=0)
    rig.cache.poll()
    assert rig.cache.grow(ticket, 8 * TOKENS) is Growth.GROWN


def test_a_running_request_waits_for_nothing_where_no_copy_is_in_flight(rig: Rig):
    ticket, _ = rig.running(6, 4), rig.running(7, 4)
    assert rig.cache.grow(ticket, 5 * TOKENS) is Growth.FULL


def test_room_to_grow_is_left_to_those_that_run(rig: Rig):
    alone = rig.cache.admit(rig.ask(8, 7), first=True)
    assert isinstance(alone, Ticket), "eight blocks, and nobody else runs"
    rig.cache.finish(alone)
    rig.running(6, 1)
    for blocks, fits in ((6, False), (5, True)):  # and one for the last token, and one of reserve
        assert isinstance(rig.cache.admit(rig.ask(9, blocks), first=True), Ticket) is fits


def test_who_does_not_fit_what_is_left_of_the_pool_never_starts(rig: Rig):
    large = rig.ask(8, 7)
    other = rig.ask(0, 2)
    assert rig.admit(other) is NotYet.LOADING
    rig.mover.end(rig.load(), Outcome.FAILED, done=0, torn=1)
    assert rig.admit(large) is NotYet.NEVER
    rig.cache.abort(other)
    with pytest.raises(RequestError):
        rig.ask(8, 7)
    assert isinstance(rig.admit(rig.ask(9, 6)), Ticket)


def test_who_waits_finds_what_was_published_behind_its_match(rig: Rig):
    ticket = rig.start(rig.ask(7))
    other = rig.ask(7)
    rig.compute(ticket)
    found = rig.start(other)
    assert found.cached_tokens == 4 * TOKENS


def test_what_look_ahead_displaced_for_one_it_does_not_count_on_for_the_next(ahead: Rig):
    ahead.cache.rates.prefill_tokens_per_s.value = 1e6
    ahead.running(6, 2)
    store = ahead.cache._store
    ahead.ask(0, 1, priority=-2)
    ahead.ask(3)
    second = ahead.ask(2, priority=-1)
    path = ahead.cache._line[second].blocks
    assert store.resident(path).tolist() == [True, True, False, False]
    # The last of it on the device is only there, under others that host memory alone has.
    store._host_room.of_copies(64, store.device.next_victims(0))
    ahead.cache.poll([Running(0, 0)], free_run_slots=1)
    assert store.published(path).tolist() == [True, False, False, False]
    assert ahead.covered(second) == 1
    check(ahead.cache)
