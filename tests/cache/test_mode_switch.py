"""The mode can change while a cache works: what is off neither loads nor saves."""

from __future__ import annotations

import pytest
from small_cache import answer, prompt

from forebay import Mode
from forebay.core.ledger import MissReason, Source
from forebay.errors import SettingsError


def test_a_cache_that_is_off_keeps_the_host_tier_and_uses_it_when_on_again(make_cache):
    cache = make_cache()
    for number in range(4):
        answer(cache, number, prompt(number))
    saved = cache.stats().saved_bytes
    assert saved > 0
    cache.set_mode(Mode.RECOMPUTE)
    ticket = answer(cache, 10, prompt(0))
    assert ticket.sources[Source.HOST] == 0
    assert ticket.misses[MissReason.DISABLED] > 0
    assert cache.stats().loaded_bytes == 0
    assert cache.stats().saved_bytes == saved
    cache.set_mode(Mode.LOOK_AHEAD)
    assert cache.mode is Mode.LOOK_AHEAD
    ticket = answer(cache, 11, prompt(1))
    assert ticket.sources[Source.HOST] > 0
    assert cache.stats().loaded_bytes > 0


def test_a_mode_that_cannot_be_changes_nothing(make_cache):
    without_host = make_cache(Mode.RECOMPUTE, host_slots=0)
    with pytest.raises(SettingsError, match="host tier"):
        without_host.set_mode(Mode.LOOK_AHEAD)
    assert without_host.mode is Mode.RECOMPUTE
    with pytest.raises(SettingsError, match="layers"):
        make_cache().set_mode(Mode.LAYERED)


def test_the_pools_say_how_full_they_are(make_cache):
    cache = make_cache()
    before = cache.view.occupancy()
    assert (before.device_slots, before.device_free, before.device_idle) == (8, 8, 0)
    answer(cache, 1, prompt(1))
    after = cache.view.occupancy()
    assert after.device_free + after.device_idle == 8
    assert after.device_idle == 4
    assert before.host_free - after.host_free == 4
