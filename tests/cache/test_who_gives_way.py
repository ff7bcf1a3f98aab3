"""Whose prefetched blocks are given up where not all fit: hints first, and never for a hint."""

from __future__ import annotations

import numpy as np
import pytest
from small_cache import TOKENS, answer, prompt

from forebay import Cache, Mode
from forebay.core.planner import Running
from forebay.core.requests import Hint, Request

SOON, LATER = 5.0, 500.0


def request(number: int, path: int, blocks: int, **more) -> Request:
    """For the first `blocks` of a prompt, and one token."""
    keys = prompt(path)[: blocks * TOKENS].astype(np.int32).tobytes()
    sizes = {"tokens": blocks * TOKENS + 1, "max_answer_tokens": 1, "arrival_s": float(number)}
    return Request(id=number, namespace=b"n", keys=keys, **sizes, **more)


def hint(number: int, path: int, blocks: int, eta_s: float) -> Request:
    return request(number, path, blocks, hint=Hint(eta_s, eta_s + 1000.0))


def plan(cache: Cache, *ends_s: float) -> None:
    """Requests run that end in so many seconds, and no other may start before; plan once."""
    step_s = cache.rates.step_s.value
    cache.poll([Running(0, round(end_s / step_s)) for end_s in ends_s], free_run_slots=0)


def covered(cache: Cache) -> dict[int, int]:
    return {entry.request.id: entry.covered for entry in cache._line}


@pytest.fixture
def cache(make_cache) -> Cache:
    """Seven of eight blocks may be leased ahead; of six prompts of four blocks the first three are
    in host memory alone.
    """
    cache = make_cache(Mode.LOOK_AHEAD, prefetch_share=0.9)
    for number in range(6):
        answer(cache, number, prompt(number))
    # Whatever this machine took for it.
    for rate, value in ((cache.rates.link_bytes_per_s, 1e9), (cache.rates.step_s, 0.01)):
        rate.value, rate.weight = value, 0.0
    cache._clock = lambda: 0.0
    return cache


def test_who_waits_keeps_what_it_has_where_a_hint_does_not_fit(cache: Cache):
    cache.enqueue(request(10, 0, 4))
    plan(cache, LATER)
    cache.enqueue(hint(11, 1, 4, eta_s=0.0))
    plan(cache, LATER)
    plan(cache, LATER)
    assert covered(cache) == {10: 4, 11: 3}


def test_who_comes_sooner_takes_what_a_later_one_has(cache: Cache):
    cache.enqueue(request(10, 0, 4))
    plan(cache, SOON, LATER)
    cache.enqueue(request(11, 1, 4, priority=-1))
    plan(cache, SOON, LATER)
    assert covered(cache) == {11: 3, 10: 0}


def test_what_hints_have_is_given_up_before_what_is_kept_for_who_waits(cache: Cache):
    cache.enqueue(request(10, 0, 2))
    # Between the two that wait.
    cache.enqueue(hint(11, 1, 2, eta_s=SOON + 0.3))
    plan(cache, SOON, LATER)
    assert covered(cache) == {10: 2, 11: 2}
    cache.enqueue(request(12, 2, 4, priority=-1))
    plan(cache, SOON, LATER)
    assert covered(cache) == {12: 3, 10: 2, 11: 0}


def test_of_those_that_come_later_the_last_that_has_something_gives_way(cache: Cache):
    for number, path in ((10, 0), (11, 1), (12, 9)):
        cache.enqueue(request(number, path, 2))
    plan(cache, SOON, LATER)
    assert covered(cache) == {10: 2, 11: 2, 12: 0}
    cache.enqueue(request(13, 2, 4, priority=-1))
    plan(cache, SOON, LATER)
    assert covered(cache) == {13: 3, 10: 2, 11: 0, 12: 0}


@pytest.mark.parametrize(("eta_s", "left"), [(500.0, 0), (0.0, 4)])
def test_a_hint_gives_way_to_one_that_is_sooner(cache: Cache, eta_s: float, left: int):
    cache.enqueue(hint(10, 0, 4, eta_s))
    plan(cache, LATER)
    cache.enqueue(hint(11, 1, 4, eta_s=0.0))
    plan(cache, LATER)
    assert covered(cache) == {10: left, 11: 3}


def test_of_two_hints_the_sooner_one_is_brought_first(cache: Cache):
    cache.enqueue(hint(10, 0, 4, eta_s=500.0))
    cache.enqueue(hint(11, 1, 4, eta_s=0.0))
    plan(cache, LATER)
    assert covered(cache) == {10: 3, 11: 4}


def test_whose_turn_has_come_is_left_to_it(cache: Cache):
    """Look-ahead brings nothing for it, and takes nothing from it for who comes later."""
    cache.enqueue(request(10, 0, 4))
    cache.enqueue(request(11, 1, 4, priority=-1))
    cache._line[10].turn_s = 0.0
    plan(cache, LATER)
    assert covered(cache) == {11: 4, 10: 0}


def test_only_what_is_long_enough_is_brought(make_cache):
    cache = make_cache(Mode.LOOK_AHEAD, min_load_tokens=3 * TOKENS)
    for number in range(6):
        answer(cache, number, prompt(number))
    cache.enqueue(request(10, 0, 2))
    plan(cache, LATER)
    assert covered(cache) == {10: 0}
    cache.enqueue(request(11, 0, 3))
    plan(cache, LATER)
    assert covered(cache) == {10: 0, 11: 3}
