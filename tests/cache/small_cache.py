"""One request after the other through a cache, each computed as far as it is not cached."""

from __future__ import annotations

import numpy as np

from forebay import Growth
from forebay.core.requests import Request, Ticket

TOKENS, BYTES = 16, 4096


def answer(cache, number, tokens):
    tokens = np.asarray(tokens)
    keys = tokens[: len(tokens) // TOKENS * TOKENS].astype(np.int32).tobytes()
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
