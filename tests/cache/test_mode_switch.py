"""The mode can change while a cache works: what is off neither loads nor saves."""

from __future__ import annotations

import numpy as np
import pytest

from forebay import Cache, CacheSettings, Growth, HostArena, Mode, NativeMover, Pool
from forebay.core.ledger import MissReason, Source
from forebay.core.requests import Request, Ticket
from forebay.errors import SettingsError

TOKENS, BYTES = 16, 4096


@pytest.fixture
def make_cache():
    """`make_cache(mode, host_slots)`: a cache over eight device blocks."""
    opened: list[Cache] = []

    def make(mode=Mode.ASYNCHRONOUS, host_slots=64):
        memory = np.zeros((8, BYTES), np.uint8)
        host = HostArena(max(1, host_slots) * BYTES).blocks(max(1, host_slots), BYTES)
        settings = CacheSettings(
            block_tokens=TOKENS,
            block_bytes=BYTES,
            device_slots=8,
            host_slots=host_slots,
            window_bytes=BYTES,
            mode=mode,
            min_load_tokens=0,
        )
        mover = NativeMover(Pool.of([memory]), Pool.of([host]), window_bytes=BYTES)
        cache = Cache(settings, mover, key_bytes=4 * TOKENS)
        opened.append(cache)
        return cache

    yield make
    for cache in opened:
        cache.close()


def answer(cache, number, tokens):
    keys = tokens.astype(np.int32).tobytes()
    cache.enqueue(
        Request(
            id=number,
            namespace=b"n",
            keys=keys,
            tokens=len(tokens),
            max_answer_tokens=1,
            arrival_s=float(number),
        )
    )
    while not isinstance(ticket := cache.admit(number, first=True), Ticket):
        cache.wait_news(0.01)
        cache.poll()
    while cache.grow(ticket, len(tokens)) is not Growth.GROWN:
        cache.wait_news(0.01)
        cache.poll()
    assert cache.ready([ticket]) == []
    start = ticket.cached_tokens
    cache.step_launched(cache.begin_step([(ticket, start, len(tokens) - start)]))
    cache.commit(ticket, keys)
    cache.finish(ticket)
    for _ in range(1000):
        cache.poll()
        if cache.quiet:
            return ticket
        cache.wait_news(0.01)
    raise AssertionError("the cache did not come to rest")


def prompt(number):
    return 1000 * number + np.arange(4 * TOKENS)


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
    before = cache.occupancy()
    assert (before.device_slots, before.device_free, before.device_idle) == (8, 8, 0)
    answer(cache, 1, prompt(1))
    after = cache.occupancy()
    assert after.device_free + after.device_idle == 8
    assert after.device_idle == 4
    assert before.host_free - after.host_free == 4
