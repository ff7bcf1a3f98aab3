"""What becomes of prefetched blocks, in the books."""

from __future__ import annotations

import numpy as np
import pytest
from small_cache import BYTES, answer, prompt

from forebay import Mode
from forebay.core.requests import Request


@pytest.mark.parametrize("rule", ["kept", "broken"])
def test_a_prefetched_block_that_loses_its_slot_unread_is_wasted(make_cache, rule: str):
    cache = make_cache(Mode.LOOK_AHEAD, host_slots=10, slack_s=1000.0)
    if rule == "broken":
        cache._store.lost_slot = lambda blocks: None
    for number in (1, 2, 3):  # the first one lies in host memory alone then
        answer(cache, number, prompt(number))
    keys = prompt(1).astype(np.int32).tobytes()
    cache.enqueue(
        Request(id=4, namespace=b"n", keys=keys, tokens=65, max_answer_tokens=1, arrival_s=4.0)
    )
    for _ in range(1000):
        cache.poll()
        if cache.stats().loaded_bytes == 4 * BYTES:
            break
        cache.wait_news(0.01)
    cache.abort(4)
    assert cache.stats().prefetch_open_bytes == 4 * BYTES
    # It is given up unread, in both tiers, and its ids are those of others.
    for number in range(6, 60):
        answer(cache, number, prompt(number // 2 + 10))
    stats = cache.stats()
    if rule == "kept":
        assert (stats.prefetch_bytes["wasted"], stats.prefetch_open_bytes) == (4 * BYTES, 0)
        assert sum(stats.prefetch_bytes.values()) == 4 * BYTES
    else:
        assert stats.prefetch_bytes["used"] > 0, "by who computed what has their ids"
