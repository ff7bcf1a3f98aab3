"""A link that stopped is tried again, one load at a time, and trusted once a byte arrives."""

from __future__ import annotations

import numpy as np
import pytest

from forebay.cache.link import FAILED_IN_A_ROW, FIRST_PAUSE_S, LONGEST_PAUSE_S, LinkWatch
from forebay.core.flights import Flight, Flights
from forebay.transfer.messages import Completion, Outcome


class Link:
    """The watch, with loads of two blocks that start and end as a test says."""

    def __init__(self) -> None:
        self.flights = Flights(1)
        self.watch = LinkWatch(self.flights)

    def start(self, *, is_load: bool = True) -> int:
        transfer = self.flights.next_id()
        self.flights.add(Flight(transfer, is_load, np.zeros(2, np.int32), 0.0))
        return transfer

    def end(self, transfer: int, outcome: Outcome, copied_bytes: int, now_s: float) -> None:
        self.flights.end(transfer)
        completion = Completion(transfer, outcome, 0, 0, copied_bytes, 0.0, now_s, "")
        self.watch.ended(completion, now_s)


@pytest.fixture
def link() -> Link:
    return Link()


def test_loads_start_as_long_as_none_hangs(link: Link) -> None:
    assert link.watch.may_load(0.0)
    link.start()
    assert link.watch.may_load(0.0)
    link.watch.hangs({99}, 0.0)  # one that has ended
    link.watch.hangs(set(), 0.0)
    assert link.watch.may_load(0.0)
    assert link.watch.stops == 0


def test_none_starts_while_one_hangs(link: Link) -> None:
    load = link.start()
    link.watch.hangs({load}, 10.0)
    assert not link.watch.may_load(10.0)
    assert not link.watch.may_load(1e6)
    link.end(load, Outcome.DONE, 100, 1e6)
    assert link.watch.may_load(1e6)
    assert link.watch.stops == 1


@pytest.mark.parametrize(
    ("outcome", "copied_bytes", "trusted"),
    [
        (Outcome.DONE, 1, True),
        (Outcome.CANCELLED, 1, True),
        (Outcome.CANCELLED, 0, False),
        (Outcome.FAILED, 1, False),
        (Outcome.FAILED, 0, False),
    ],
)
def test_what_shows_that_it_moves(
    outcome: Outcome, copied_bytes: int, trusted: bool, link: Link
) -> None:
    load = link.start()
    link.watch.hangs({load}, 0.0)
    link.end(load, outcome, copied_bytes, 0.0)
    assert link.watch.stopped is not trusted
    assert link.watch.may_load(0.0) is trusted


def test_tries_come_at_pauses_that_double(link: Link) -> None:
    now_s, pause_s = 0.0, FIRST_PAUSE_S
    link.watch.hangs({link.start()}, now_s)
    link.end(1, Outcome.CANCELLED, 0, now_s)
    for _ in range(12):
        assert not link.watch.may_load(now_s + 0.999 * pause_s)
        now_s += pause_s
        assert link.watch.may_load(now_s)
        probe = link.start()
        assert not link.watch.may_load(now_s), "one at a time"
        link.end(probe, Outcome.FAILED, 0, now_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    assert link.watch.stops == 1


def test_saves_that_hang_stop_no_load(link: Link) -> None:
    link.watch.hangs({link.start()}, 0.0)
    link.start(is_load=False)
    link.end(1, Outcome.CANCELLED, 0, 0.0)
    assert link.watch.may_load(FIRST_PAUSE_S)


def test_the_next_stop_begins_with_the_first_pause(link: Link) -> None:
    for round_s in (0.0, 1000.0):
        load = link.start()
        link.watch.hangs({load}, round_s)
        link.end(load, Outcome.FAILED, 0, round_s)
        probe = link.start()
        link.end(probe, Outcome.DONE, 5, round_s)
        assert not link.watch.stopped
    last = link.start()
    link.watch.hangs({last}, 2000.0)
    link.end(last, Outcome.CANCELLED, 0, 2000.0)
    assert link.watch.may_load(2000.0 + FIRST_PAUSE_S)


@pytest.mark.parametrize(
    ("outcome", "copied_bytes", "stopped"),
    [
        (Outcome.FAILED, 0, True),
        (Outcome.FAILED, 1, False),
        (Outcome.CANCELLED, 0, False),
        (Outcome.DONE, 1, False),
    ],
)
def test_loads_that_fail_one_after_the_other_and_bring_nothing_stop_it(
    outcome: Outcome, copied_bytes: int, stopped: bool, link: Link
) -> None:
    for _ in range(FAILED_IN_A_ROW - 1):
        link.end(link.start(), Outcome.FAILED, 0, 0.0)
    assert link.watch.may_load(0.0)
    link.end(link.start(), outcome, copied_bytes, 0.0)
    assert link.watch.stopped == stopped
    assert link.watch.may_load(FIRST_PAUSE_S / 2) != stopped
    assert link.watch.may_load(FIRST_PAUSE_S)
    link.end(link.start(), Outcome.DONE, 1, FIRST_PAUSE_S)
    assert not link.watch.stopped
    for _ in range(FAILED_IN_A_ROW - 1):
        link.end(link.start(), Outcome.FAILED, 0, 0.0)
    assert not link.watch.stopped
