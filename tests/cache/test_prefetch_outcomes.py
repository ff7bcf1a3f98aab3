"""What becomes of prefetched blocks, in the books."""

from __future__ import annotations

import numpy as np
from small_cache import BYTES, answer, prompt

from forebay import Mode
from forebay.core.requests import Request


def test_what_takes_the_id_of_a_block_that_was_prefetched_in_vain_is_no_prefetch(make_cache):
    cache = make_cache(Mode.LOOK_AHEAD, host_slots=10, slack_s=1000.0)
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
    assert (stats.prefetch_bytes["used"], stats.prefetch_bytes["late"]) == (0, 0)
    assert sum(stats.prefetch_bytes.values()) + stats.prefetch_open_bytes == 4 * BYTES
