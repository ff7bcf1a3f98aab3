"""What two requests computed is kept once: never as a block that is not there yet."""

from __future__ import annotations

import pytest
from invariants import check
from turn_rig import Rig

from forebay.core.requests import NotYet, Ticket


def computed(rig: Rig, path: int) -> Ticket:
    """A request that computed its path, whatever the cache has of it."""
    ticket = rig.start(rig.ask(path, 2, no_cache=True))
    rig.step(ticket, 2)
    return ticket


def test_who_publishes_what_another_has_goes_on_with_the_blocks_of_the_other(rig: Rig):
    first, second = computed(rig, 7), computed(rig, 7)
    for ticket in (first, second):
        rig.cache.commit(ticket, ticket.request.keys)
    assert second.blocks.tolist() == first.blocks.tolist()
    assert second.slots.tolist() == first.slots.tolist()
    assert rig.cache.view.occupancy().device_free == 2
    check(rig.cache)


@pytest.mark.parametrize("on_its_way", [False, True])
def test_who_publishes_what_is_not_on_the_device_yet_keeps_its_own(rig: Rig, on_its_way: bool):
    ticket = computed(rig, 0)
    own = ticket.blocks.tolist()
    if on_its_way:
        assert rig.admit(rig.ask(0, 2)) is NotYet.LOADING
    rig.cache.commit(ticket, ticket.request.keys)
    assert ticket.blocks.tolist() == own
    check(rig.cache)
