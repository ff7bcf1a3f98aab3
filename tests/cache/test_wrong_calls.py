"""A caller's mistakes are refused with a typed error, and leave nothing behind."""

from __future__ import annotations

import numpy as np
import pytest
from small_cache import BYTES, TOKENS, answer, prompt

from forebay import Cache, CacheSettings, HostArena, NativeMover, Pool
from forebay.core.requests import Request, Ticket
from forebay.errors import ProtocolError, RequestError, SettingsError

KEYS = bytes(4 * 4 * TOKENS)


def request(**fields):
    whole = {"namespace": b"n", "keys": KEYS, "tokens": 4 * TOKENS, "max_answer_tokens": 1}
    return Request(**{"id": 1, "arrival_s": 0.0, **whole, **fields})


@pytest.mark.parametrize(
    "fields", [{"namespace": "n"}, {"keys": np.frombuffer(KEYS, np.uint8)}, {"keys": KEYS[:-1]}]
)
def test_a_refused_request_is_not_in_the_queue(make_cache, fields):
    cache = make_cache()
    with pytest.raises(RequestError, match="bytes"):
        cache.enqueue(request(**fields))
    assert cache.waiting() == []
    answer(cache, 1, prompt(1))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tokens": 0, "keys": b""}, "at least one token"),
        ({"tokens": 64, "max_answer_tokens": -60}, "no answer of -60 tokens"),
        ({"arrival_s": float("nan")}, "arrival_s is not a number"),
    ],
)
def test_a_request_of_numbers_that_cannot_be_is_not_in_the_queue(make_cache, fields, why):
    """One that came at no time would stand anywhere, and others be taken for it."""
    cache = make_cache()
    with pytest.raises(RequestError, match=why):
        cache.enqueue(request(**fields))
    assert cache.waiting() == []


def test_a_request_that_does_not_wait_is_not_admitted(make_cache):
    cache = make_cache()
    with pytest.raises(ProtocolError, match="request 7 does not wait"):
        cache.admit(7, first=True)


def test_a_closed_cache_takes_no_request(make_cache):
    cache = make_cache()
    cache.close()
    with pytest.raises(ProtocolError, match="closed"):
        cache.enqueue(request())
    assert cache.waiting() == []


def test_a_step_is_launched_or_abandoned_once(make_cache):
    cache = make_cache()
    step = cache.begin_step([])
    cache.step_launched(step)
    for again in (cache.step_launched, cache.step_abandoned):
        for number in (step, step + 1):
            with pytest.raises(ProtocolError, match=f"step {number} was not begun"):
                again(number)


def test_a_ticket_that_is_not_current_is_refused(make_cache):
    """Its blocks may be those of others by now."""
    cache = make_cache()
    cache.enqueue(request())
    ended = cache.admit(1, first=True)
    assert isinstance(ended, Ticket)
    cache.preempt(ended, request())
    current = None
    for _ in range(2):
        for call in (
            lambda: cache.finish(ended),
            lambda: cache.preempt(ended, request()),
            lambda: cache.grow(ended, 1),
            lambda: cache.begin_step([(ended, 0, 0)]),
            lambda: cache.commit(ended, KEYS),
        ):
            with pytest.raises(ProtocolError, match="the ticket of request 1 is not current"):
                call()
        current = current or cache.admit(1, first=True)
    assert isinstance(current, Ticket)
    cache.finish(current)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"device_slots": 9}, "device_slots is 9, and the mover's pool has 8 slots"),
        ({"host_slots": 65}, "host_slots is 65, and the mover's pool has 64 slots"),
        ({"block_bytes": 2 * BYTES}, "blocks of 4096 bytes"),
    ],
)
def test_settings_that_are_not_those_of_the_pools(other, why):
    pools = (
        Pool.of([np.zeros((8, BYTES), np.uint8)]),
        Pool.of([HostArena(64 * BYTES).blocks(64, BYTES)]),
    )
    sizes = {"block_tokens": TOKENS, "block_bytes": BYTES, "device_slots": 8, "host_slots": 64}
    mover = NativeMover(*pools, window_bytes=BYTES)
    with pytest.raises(SettingsError, match=why):
        Cache(CacheSettings(**{**sizes, **other}, window_bytes=BYTES), mover, key_bytes=4 * TOKENS)
    mover.close(1.0)
