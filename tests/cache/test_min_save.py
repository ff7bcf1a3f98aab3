"""Below a minimum length nothing is offloaded, in neither way of saving; from it on, all is."""

from __future__ import annotations

import pytest
from small_cache import BYTES, TOKENS, answer, prompt

from forebay import SaveMode
from forebay.core.ledger import Source


@pytest.mark.parametrize("save_mode", SaveMode)
def test_short_paths_are_never_saved_not_even_when_they_are_evicted(make_cache, save_mode):
    cache = make_cache(min_save_tokens=5 * TOKENS, save_mode=save_mode)
    for number in range(6):
        answer(cache, number, prompt(number))
    stats = cache.stats()
    assert stats.saved_bytes == 0
    assert stats.dropped_dirty_blocks > 0
    assert answer(cache, 10, prompt(0)).sources.get(Source.HOST, 0) == 0


def test_a_path_that_grows_to_the_minimum_is_saved_from_its_root(make_cache):
    cache = make_cache(min_save_tokens=4 * TOKENS)
    answer(cache, 1, prompt(1)[: 3 * TOKENS])
    assert cache.stats().saved_bytes == 0
    answer(cache, 2, prompt(1))
    assert cache.stats().saved_bytes == 4 * BYTES
    for number in range(3, 6):
        answer(cache, number, prompt(number))
    ticket = answer(cache, 10, prompt(1))
    assert ticket.sources[Source.HOST] == 3


def test_a_short_path_beside_a_long_one_leaves_what_they_share_saved(make_cache):
    cache = make_cache(min_save_tokens=4 * TOKENS)
    answer(cache, 1, prompt(1))
    short = prompt(1)[: 3 * TOKENS].copy()
    short[2 * TOKENS :] += 500
    answer(cache, 2, short)
    assert cache.stats().saved_bytes == 4 * BYTES
    for number in range(3, 6):
        answer(cache, number, prompt(number))
    assert answer(cache, 10, short).sources[Source.HOST] == 2


def test_without_a_minimum_every_block_is_saved(make_cache):
    cache = make_cache()
    answer(cache, 1, prompt(1)[:TOKENS])
    assert cache.stats().saved_bytes == BYTES
