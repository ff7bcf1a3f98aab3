"""The planner as a function: what it brings, delays, refuses, and where it stops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.planner import Bring, Running, View, Wanted, expected_starts, make_plan
from forebay.core.rates import Average, Rates

BLOCK_BYTES = 1000
VIEW = View(
    now_s=100.0,
    block_bytes=BLOCK_BYTES,
    obtainable=50,
    obtainable_protected=80,
    reserve=10,
    lease_room=60,
    copy_room=40,
    lead_loads=3.0,
    most_brings=8,
    wanted=(),
)


def rates() -> Rates:
    """One block a second, 100 prompt tokens a second, steps of 10 ms."""
    return Rates(
        Average(float(BLOCK_BYTES)), Average(100.0), Average(0.01), Average(10.0), Average(0.02)
    )


def wanted(request: int = 1, **changes: float) -> Wanted:
    return Wanted(request, 1e6, covered=0, here=0, kept=0, to_load=0)._replace(**changes)


def plan(*queue: Wanted, **changes: int):
    return make_plan(replace(VIEW, wanted=queue, **changes), rates())


def test_what_is_there_is_leased_and_what_fits_is_loaded():
    made = plan(wanted(1, here=3, to_load=5), wanted(2, to_load=7))
    assert made.bring == [Bring(1, 8, 5, 1e6, False), Bring(2, 7, 7, 1e6, False)]
    assert not made.refused


def test_nobody_overtakes_the_first_that_does_not_fit():
    made = plan(wanted(1, to_load=45), wanted(2, to_load=1), copy_room=100)
    assert made.bring == [Bring(1, 40, 40, 1e6, False)], "root first, as many as fit"
    assert made.refused == [1]


def test_the_reserve_is_left_alone():
    assert not plan(wanted(to_load=45), reserve=50).bring
    assert plan(wanted(to_load=45), reserve=49).bring[0].blocks == 1


def test_wanted_victims_are_displaced_only_when_it_is_time():
    lead_s = 3.0 * 45 + 0.02 + 0.01
    early = plan(wanted(to_load=45, eta_s=100.0 + lead_s + 0.1), copy_room=100)
    assert not early.bring[0].protected
    assert early.bring[0].blocks == 40
    due = plan(wanted(to_load=45, eta_s=100.0 + lead_s - 0.1), copy_room=100)
    assert due.bring[0].protected
    assert due.bring[0].blocks == 45
    assert not due.refused


def test_what_others_lease_takes_nothing_of_the_room_for_leases():
    shared = wanted(1, here=100, kept=90, to_load=5)
    made = plan(shared, wanted(2, to_load=5), lease_room=20)
    assert made.bring == [Bring(1, 105, 5, 1e6, False), Bring(2, 5, 5, 1e6, False)]


def test_a_path_longer_than_the_room_for_leases_is_leased_from_its_root():
    made = plan(wanted(1, here=100, kept=10, to_load=5), wanted(2, here=1), lease_room=20)
    assert made.bring == [Bring(1, 30, 0, 1e6, False)]
    assert made.refused == [1]


def test_what_a_sooner_one_leases_is_displaced_by_nobody():
    """It lay idle on the device, and counted as room until then."""
    sooner, later = wanted(1, here=20, kept=5, eta_s=100.0), wanted(2, to_load=40, eta_s=100.0)
    made = plan(sooner, later, obtainable=10, obtainable_protected=40)
    assert made.bring == [Bring(1, 20, 0, 100.0, False), Bring(2, 15, 15, 100.0, True)]


@pytest.mark.parametrize(("spare_s", "due"), [(44.0, True), (46.0, False)])
def test_a_load_is_due_early_enough_for_the_one_behind_it(spare_s: float, due: bool):
    """The link serves one after the other: this one takes 45 s of it."""
    first = wanted(1, to_load=45, eta_s=1e4)
    second = wanted(2, to_load=30, eta_s=100.0 + 3.0 * 30 + 0.03 + spare_s)
    assert plan(first, second, copy_room=100).bring[0].protected == due


def test_what_has_expired_gets_nothing():
    made = plan(wanted(1, here=1, expires_s=100.0), wanted(2, here=1, expires_s=100.1))
    assert not made.refused
    assert [bring.request for bring in made.bring] == [2]


def test_a_hint_that_does_not_fit_stops_nobody():
    hint, who_waits = wanted(1, to_load=45, expires_s=1e9), wanted(2, here=3)
    made = plan(hint, who_waits, copy_room=100)
    assert made.bring == [Bring(1, 40, 40, 1e6, False), Bring(2, 3, 0, 1e6, False)]
    assert made.refused == [1]
    assert plan(hint, who_waits, reserve=50).bring == [Bring(2, 3, 0, 1e6, False)]


def test_one_event_brings_no_more_than_it_may():
    queue = [wanted(request, here=1) for request in range(9)]
    assert len(plan(*queue, most_brings=3).bring) == 3


QUEUES = st.lists(
    st.builds(
        lambda here, kept, to_load, eta_s: wanted(
            here=here, kept=min(kept, here), to_load=to_load, eta_s=eta_s
        ),
        st.integers(0, 50),
        st.integers(0, 50),
        st.integers(0, 50),
        st.floats(0, 1000),
    ),
    max_size=6,
)


@settings(deadline=None)
@given(QUEUES, st.integers(0, 90), st.integers(0, 90), st.integers(1, 90), st.integers(1, 90))
def test_no_plan_exceeds_what_there_is(queue, ordinary, protected, lease_room, copy_room):
    queue = [item._replace(request=place) for place, item in enumerate(queue)]
    made = plan(
        *queue,
        obtainable=ordinary,
        obtainable_protected=ordinary + protected,
        lease_room=lease_room,
        copy_room=copy_room,
    )
    by_id = {item.request: item for item in queue}
    loads = sum(bring.blocks for bring in made.bring)
    assert loads <= copy_room
    assert loads <= max(0, ordinary + protected - VIEW.reserve)
    plain = sum(bring.blocks for bring in made.bring if not bring.protected)
    assert plain <= max(0, ordinary - VIEW.reserve)
    assert sum(bring.reach - by_id[bring.request].kept for bring in made.bring) <= lease_room
    for bring in made.bring:
        item = by_id[bring.request]
        assert 0 <= bring.blocks <= item.to_load
        assert 0 <= bring.reach <= item.here + item.to_load


def test_starts_follow_run_slots_and_the_prefill_ahead():
    # One runs for 10 more steps; a free slot serves the first at once, the second after it.
    starts = expected_starts(0.0, [Running(0, 10)], [100, 100, 0], 1, rates())
    assert starts == pytest.approx([0.0, 1.0, 2.0])
    # No free slot: the first starts when the running one ends.
    assert expected_starts(0.0, [Running(0, 500)], [100], 0, rates()) == pytest.approx([5.0])
    # Prefill under way is done first.
    assert expected_starts(0.0, [Running(300, 0)], [1], 5, rates()) == pytest.approx([3.0])
    assert not any(map(math.isnan, starts))
