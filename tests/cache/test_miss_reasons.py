"""Why a block was computed that might have been cached."""

from __future__ import annotations

from small_cache import TOKENS, answer, prompt

from forebay.core.ledger import MissReason, Source


def reasons(ticket):
    return {reason: count for reason, count in ticket.misses.items() if count}


def test_what_nobody_computed_is_absent(make_cache):
    cache = make_cache()
    assert reasons(answer(cache, 1, prompt(1)[:-1])) == {MissReason.ABSENT: 3}


def test_the_block_of_a_prompts_last_token_is_always_computed(make_cache):
    cache = make_cache()
    answer(cache, 1, prompt(1))
    again = answer(cache, 2, prompt(1))
    assert again.sources[Source.DEVICE] == 3
    assert reasons(again) == {MissReason.LAST: 1}
    longer = answer(cache, 3, [*prompt(1), *range(TOKENS)])
    assert longer.sources[Source.DEVICE] == 4
    assert reasons(longer) == {MissReason.LAST: 1}
