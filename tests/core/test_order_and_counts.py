"""The eviction order against two lists, block counts against a dictionary, and what both refuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray

from forebay._native import BlockCounts, EvictionOrder
from forebay.errors import ProtocolError, SettingsError

BLOCKS = 12

blocks_of_one_path = st.lists(st.integers(0, BLOCKS - 1), unique=True, max_size=6)
ranks = st.integers(0, 1)
layouts = st.sampled_from(["contiguous", "backwards", "every other"])


def ids(blocks: list[int], layout: str = "contiguous") -> NDArray[np.int32]:
    """`blocks` as an array that lies in memory as `layout` says."""
    packed = np.array(blocks, np.int32)
    if layout == "backwards":
        return packed[::-1].copy()[::-1]
    if layout == "every other":
        return np.repeat(packed, 2)[::2]
    return packed


class OrderMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.order = EvictionOrder(BLOCKS, "a lease")
        self.model: tuple[list[int], list[int]] = ([], [])
        self.holds: Counter[int] = Counter()

    def drop(self, blocks: list[int]) -> None:
        for standing in self.model:
            standing[:] = [block for block in standing if block not in blocks]

    @rule(blocks=blocks_of_one_path, rank=ranks, layout=layouts)
    def append(self, blocks: list[int], rank: int, layout: str) -> None:
        if any(self.holds[block] for block in blocks):
            with pytest.raises(ProtocolError, match="is under a lease"):
                self.order.append(ids(blocks, layout), rank)
            return
        self.order.append(ids(blocks, layout), rank)
        self.drop(blocks)
        self.model[rank].extend(reversed(blocks))

    @rule(blocks=blocks_of_one_path, rank=ranks, layout=layouts)
    def prepend(self, blocks: list[int], rank: int, layout: str) -> None:
        if any(self.holds[block] for block in blocks):
            with pytest.raises(ProtocolError, match="is under a lease"):
                self.order.prepend(ids(blocks, layout), rank)
            return
        self.order.prepend(ids(blocks, layout), rank)
        self.drop(blocks)
        self.model[rank][:0] = blocks

    @rule(blocks=blocks_of_one_path, layout=layouts)
    def discard(self, blocks: list[int], layout: str) -> None:
        self.order.discard(ids(blocks, layout))
        self.drop(blocks)

    @rule(blocks=blocks_of_one_path, layout=layouts)
    def hold(self, blocks: list[int], layout: str) -> None:
        self.order.hold(ids(blocks, layout))
        self.holds.update(blocks)
        self.drop(blocks)

    @rule(blocks=blocks_of_one_path, layout=layouts)
    def release(self, blocks: list[int], layout: str) -> None:
        if all(self.holds[block] for block in blocks):
            self.holds.subtract(blocks)
            idle = [block for block in blocks if not self.holds[block]]
            assert self.order.release(ids(blocks, layout)).tolist() == idle
            return
        with pytest.raises(ProtocolError, match="a lease was given back twice"):
            self.order.release(ids(blocks, layout))

    @rule(count=st.integers(-1, 8), rank=ranks, busy=st.none() | st.sets(st.integers(0, 11)))
    def pop(self, count: int, rank: int, busy: set[int] | None) -> None:
        free = [block for block in self.model[rank] if busy is None or block not in busy]
        expected = free[: max(0, count)]
        flags = None if busy is None else np.isin(np.arange(BLOCKS), list(busy))
        assert self.order.pop(count, rank, flags).tolist() == expected
        self.drop(expected)

    @rule(count=st.integers(0, 4), rank=ranks)
    def pop_newest(self, count: int, rank: int) -> None:
        expected = self.model[rank][::-1][:count]
        assert self.order.pop_newest(count, rank).tolist() == expected
        self.drop(expected)

    @invariant()
    def agrees(self) -> None:
        for rank, standing in enumerate(self.model):
            assert self.order.count(rank) == len(standing)
            assert self.order.peek(BLOCKS, rank).tolist() == standing
            assert self.order.peek(2, rank).tolist() == standing[:2]
        everything = np.arange(BLOCKS, dtype=np.int32)
        standing = self.model[0] + self.model[1]
        assert (self.order.contains(everything) == np.isin(everything, standing)).all()
        holds = [self.holds[block] for block in range(BLOCKS)]
        assert self.order.holds(everything).tolist() == holds
        assert self.order.held(everything).tolist() == [count > 0 for count in holds]


TestOrder = OrderMachine.TestCase
TestOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

changes = st.tuples(st.booleans(), st.lists(st.integers(0, BLOCKS - 1), max_size=5), layouts)


@given(st.lists(changes, max_size=30))
def test_counts_agree_with_a_dictionary(history: list[tuple[bool, list[int], str]]) -> None:
    counts = BlockCounts(BLOCKS, "a lease")
    model: Counter[int] = Counter()
    everything = np.arange(BLOCKS, dtype=np.int32)
    for adds, blocks, layout in history:
        after, changed = model.copy(), list[int]()
        for block in blocks:
            after[block] += 1 if adds else -1
            if after[block] == (1 if adds else 0):
                changed.append(block)
        if min(after.values(), default=0) < 0:
            with pytest.raises(ProtocolError, match="a lease was given back twice"):
                counts.take_away(ids(blocks, layout))
        else:
            call = counts.add if adds else counts.take_away
            assert call(ids(blocks, layout)).tolist() == changed
            model = after
        expected = [model[block] for block in range(BLOCKS)]
        assert counts.of(everything).tolist() == expected
        assert counts.any(everything).tolist() == [count > 0 for count in expected]
        assert counts.held == sum(count > 0 for count in expected)


ODD_ARRAYS: dict[str, object] = {
    "negative": ids([1, -1]),
    "too large": ids([1, BLOCKS]),
    "largest": ids([1, 2**31 - 1]),
    "64 bits": np.array([1, 2]),
    "unsigned": np.array([1, 2], np.uint32),
    "float": np.array([1, 2], np.float32),
    "other byte order": np.array([1, 2], ">i4"),
    "two dimensions": np.zeros((2, 2), np.int32),
    "none": np.int32(1),
    "list": [1, 2],
    "text": "12",
    "bytes": b"\x01\x00\x00\x00",
}


@pytest.mark.parametrize("blocks", ODD_ARRAYS.values(), ids=ODD_ARRAYS)
@pytest.mark.parametrize(
    "call",
    [
        lambda order, counts, blocks: order.append(blocks, 0),
        lambda order, counts, blocks: order.prepend(blocks, 1),
        lambda order, counts, blocks: order.discard(blocks),
        lambda order, counts, blocks: order.contains(blocks),
        lambda order, counts, blocks: order.hold(blocks),
        lambda order, counts, blocks: order.release(blocks),
        lambda order, counts, blocks: order.holds(blocks),
        lambda order, counts, blocks: order.held(blocks),
        lambda order, counts, blocks: counts.add(blocks),
        lambda order, counts, blocks: counts.take_away(blocks),
        lambda order, counts, blocks: counts.of(blocks),
        lambda order, counts, blocks: counts.any(blocks),
    ],
)
def test_what_are_no_blocks_is_refused_without_change(
    call: Callable[[EvictionOrder, BlockCounts, object], object], blocks: object
) -> None:
    order, counts = EvictionOrder(BLOCKS, "a lease"), BlockCounts(BLOCKS, "a lease")
    order.append(ids([1, 2]), 0)
    order.hold(ids([3]))
    counts.add(ids([1, 2]))
    with pytest.raises(ProtocolError):
        call(order, counts, blocks)
    assert order.peek(BLOCKS, 0).tolist() == [2, 1]
    assert order.count(1) == 0
    assert order.holds(np.arange(4, dtype=np.int32)).tolist() == [0, 0, 0, 1]
    assert counts.of(np.arange(4, dtype=np.int32)).tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    "call",
    [
        lambda order: order.append(ids([1]), 2),
        lambda order: order.prepend(ids([1]), -1),
        lambda order: order.pop(1, 2),
        lambda order: order.pop_newest(1, -1),
        lambda order: order.peek(1, 2),
        lambda order: order.count(2),
        lambda order: order.pop(1, 0, np.zeros(BLOCKS - 1, np.bool_)),
        lambda order: order.pop(1, 0, np.zeros(BLOCKS, np.int8)),
    ],
)
def test_odd_ranks_and_flags_are_refused(call: Callable[[EvictionOrder], object]) -> None:
    order = EvictionOrder(BLOCKS, "a lease")
    order.append(ids([3]), 0)
    with pytest.raises(ProtocolError):
        call(order)
    assert order.peek(BLOCKS, 0).tolist() == [3]


@pytest.mark.parametrize(
    "make", [lambda most: EvictionOrder(most, "a lease"), lambda most: BlockCounts(most, "a lease")]
)
@pytest.mark.parametrize("most", [-1, 2**31])
def test_there_are_no_so_many_blocks(make: Callable[[int], object], most: int) -> None:
    with pytest.raises(SettingsError, match="max_blocks"):
        make(most)


def test_results_cannot_be_written() -> None:
    order, counts = EvictionOrder(BLOCKS, "a lease"), BlockCounts(BLOCKS, "a lease")
    order.append(ids([1, 2]), 0)
    for result in (order.peek(1, 0), counts.add(ids([1])), counts.any(ids([1]))):
        assert not result.flags.writeable
