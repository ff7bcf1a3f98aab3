"""Caches over eight device blocks: with the real mover, and with one that moves nothing."""

from __future__ import annotations

import numpy as np
import pytest
from small_cache import BYTES, TOKENS
from turn_rig import Rig

from forebay import Cache, CacheSettings, HostArena, Mode, NativeMover, Pool


@pytest.fixture
def make_cache():
    """`make_cache(mode, host_slots, ...)`: a cache over eight device blocks."""
    opened: list[Cache] = []

    def make(mode=Mode.ASYNCHRONOUS, host_slots=64, **settings):
        memory = np.zeros((8, BYTES), np.uint8)
        host = HostArena(max(1, host_slots) * BYTES).blocks(max(1, host_slots), BYTES)
        sizes = CacheSettings(
            block_tokens=TOKENS,
            block_bytes=BYTES,
            device_slots=8,
            host_slots=host_slots,
            window_bytes=BYTES,
            mode=mode,
            **{"min_load_tokens": 0, **settings},
        )
        mover = NativeMover(Pool.of([memory]), Pool.of([host]), window_bytes=BYTES)
        cache = Cache(sizes, mover, key_bytes=4 * TOKENS)
        opened.append(cache)
        return cache

    yield make
    for cache in opened:
        cache.close()


@pytest.fixture
def rig() -> Rig:
    return Rig(Mode.ASYNCHRONOUS)


@pytest.fixture
def ahead() -> Rig:
    return Rig(Mode.LOOK_AHEAD)
