"""What is kept of conversations that ended a moment ago, and when nothing is. Needs no vLLM."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import numpy as np
import pytest

from forebay.core.arrays import Ids
from forebay.vllm.scheduler.lately import Lately

PATH = np.arange(4, dtype=np.int32)
OTHER = np.arange(4, 8, dtype=np.int32)


class Pool:
    """Counts who keeps each block."""

    def __init__(self) -> None:
        self.kept: Counter[int] = Counter()

    def keep(self, blocks: Ids) -> None:
        self.kept.update(blocks.tolist())

    def keep_no_more(self, blocks: Ids) -> None:
        self.kept.subtract(blocks.tolist())

    def keeps(self, blocks: Ids) -> bool:
        return all(self.kept[block] > 0 for block in blocks.tolist())


@pytest.fixture
def pool() -> Pool:
    return Pool()


def lately_in(pool: Pool) -> Lately:
    return Lately(cast("Any", pool))


def test_it_is_kept_for_a_moment(pool: Pool):
    lately = lately_in(pool)
    lately.ended(PATH, 10.0)
    lately.expire(10.9)
    assert pool.keeps(PATH)
    lately.expire(11.1)
    assert not pool.kept.total()


def test_nothing_is_kept_of_what_does_not_come_back(pool: Pool):
    lately = lately_in(pool)
    for turn in range(40):
        lately.ended(PATH, 10.0 * turn)
        lately.expire(10.0 * turn + 5.0)
    lately.ended(PATH, 500.0)
    assert not pool.kept.total()
    # Once they do come back, it is kept again.
    for turn in range(40):
        lately.ended(PATH, 1000.0 + 10.0 * turn)
        lately.came(np.concatenate([PATH, OTHER]))
        lately.expire(1000.0 + 10.0 * turn + 5.0)
    lately.ended(PATH, 2000.0)
    assert pool.keeps(PATH)


def test_another_conversation_is_no_return(pool: Pool):
    lately = lately_in(pool)
    for turn in range(40):
        lately.ended(PATH, 10.0 * turn)
        lately.came(OTHER)
        lately.came(PATH[:3])
        lately.expire(10.0 * turn + 5.0)
    lately.ended(PATH, 500.0)
    assert not pool.kept.total()


def test_memory_is_bounded_and_a_reset_keeps_nothing(pool: Pool):
    lately = lately_in(pool)
    for _ in range(1000):
        lately.ended(PATH, 10.0)
        lately.came(PATH)
    assert len(lately) <= 256
    lately.drop_all()
    assert not len(lately)
    assert not pool.kept.total()
