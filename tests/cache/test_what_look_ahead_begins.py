"""What look-ahead brings, for how many, by when, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from turn_rig import Rig

from forebay import Mode
from forebay.core.planner import Running
from forebay.core.requests import Hint

BUSY = [Running(0, 10_000)]


def test_the_deadline_of_what_it_brings_is_when_the_request_starts(ahead: Rig):
    """A run slot comes free after a second; to compute a token takes one, an answer 0.64."""
    ahead.cache.rates.prefill_tokens_per_s.value = 1.0
    for path in (0, 1):
        ahead.ask(path, 3)
    ahead.cache.poll([Running(0, 100)], free_run_slots=0)
    deadlines = [each.deadline_s for each in ahead.mover.flying.values()]
    assert deadlines == pytest.approx([1.0, 1.0 + 1.0 + 0.64])


def test_it_looks_no_further_than_it_is_to():
    ahead = Rig(Mode.LOOK_AHEAD, look_ahead_requests=1)
    both = [ahead.ask(0, 2), ahead.ask(1, 2)]
    for _ in range(3):
        ahead.cache.poll(BUSY, free_run_slots=0)
    assert [ahead.covered(each) for each in both] == [2, 0]


def test_it_leaves_the_reserve_to_those_that_run(ahead: Rig):
    ahead.running(6, 4)
    later = ahead.ask(0)
    ahead.cache.poll(BUSY, free_run_slots=0)
    assert ahead.covered(later) == 3


def test_it_finds_what_was_published_since_a_request_came(ahead: Rig):
    ticket = ahead.start(ahead.ask(7))
    later = ahead.ask(7)
    ahead.compute(ticket)
    ahead.cache.poll(BUSY, free_run_slots=0)
    assert ahead.covered(later) == 4


def test_who_runs_is_not_asked_where_there_is_nothing_to_bring(ahead: Rig):
    def nobody() -> Iterator[Running]:
        raise AssertionError("asked")
        yield

    ahead.ask(9)
    ahead.cache.poll(nobody(), free_run_slots=0)  # type: ignore[arg-type]


def test_who_waits_goes_before_a_hint_whose_time_is_past(ahead: Rig):
    ahead.clock.now_s = 100.0
    late, first = ahead.ask(0, hint=Hint(50.0, 1e6)), ahead.ask(1)
    ahead.cache.poll((), free_run_slots=1)
    assert [ahead.covered(each) for each in (first, late)] == [4, 3]


def test_nobody_gives_way_to_one_that_comes_sooner_by_less_than_its_load_takes(ahead: Rig):
    ahead.cache.rates.prefill_tokens_per_s.value = 1e6
    later = ahead.ask(0)
    ahead.cache.poll([Running(0, 100)], free_run_slots=0)
    sooner = ahead.ask(1, priority=-1)
    ahead.cache.poll([Running(0, 100)], free_run_slots=0)
    assert [ahead.covered(each) for each in (sooner, later)] == [3, 4]
