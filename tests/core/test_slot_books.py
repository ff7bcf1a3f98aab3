"""The books over a pool of somebody else's against plain dictionaries, and the queue of free blocks
against a list.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray

from forebay._native import FreeQueue, SlotBooks
from forebay.core.slots import SlotState
from forebay.errors import ProtocolError, SettingsError

BLOCKS, SLOTS = 9, 6

some_blocks = st.lists(st.integers(0, BLOCKS - 1), unique=True, max_size=5)
states = st.sampled_from([SlotState.LOADING, SlotState.DIRTY, SlotState.SAVING, SlotState.CLEAN])


def ids(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)


class BooksMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.books = SlotBooks(BLOCKS, SLOTS)
        self.slot: dict[int, int] = {}
        self.block_in: dict[int, int] = {}
        self.state: dict[int, SlotState] = {}
        self.leases: Counter[int] = Counter()
        self.prefetch: Counter[int] = Counter()
        self.wants: Counter[int] = Counter()
        self.asked: Counter[int] = Counter()

    @rule(blocks=some_blocks, slots=st.permutations(range(SLOTS)), state=states)
    def settle_in(self, blocks: list[int], slots: list[int], state: SlotState) -> None:
        taken = slots[: len(blocks)]
        self.books.settle_in(ids(blocks), ids(taken), state)
        for block, slot in zip(blocks, taken, strict=True):
            self.slot[block], self.block_in[slot], self.state[block] = slot, block, state

    @rule(blocks=some_blocks)
    def leave(self, blocks: list[int]) -> None:
        self.books.leave(ids(blocks))
        for block in blocks:
            slot = self.slot.pop(block, None)
            if slot is not None and self.block_in.get(slot) == block:
                del self.block_in[slot]
            self.state.pop(block, None)

    @rule(blocks=some_blocks, state=states)
    def move(self, blocks: list[int], state: SlotState) -> None:
        known = [block for block in blocks if block in self.slot]
        loading = [block for block in known if self.state[block] is SlotState.LOADING]
        assert self.books.move(ids(known), state).tolist() == loading
        self.state.update(dict.fromkeys(known, state))

    @rule(block=st.integers(0, BLOCKS - 1), slot=st.integers(0, SLOTS - 1))
    def relocate(self, block: int, slot: int) -> None:
        if block not in self.slot:
            return
        free = self.block_in.get(slot, block) == block
        assert self.books.relocate(block, slot) == free
        if free:
            if self.block_in.get(self.slot[block]) == block:
                del self.block_in[self.slot[block]]
            self.slot[block], self.block_in[slot] = slot, block

    @rule(blocks=some_blocks, prefetch=st.booleans())
    def lease(self, blocks: list[int], prefetch: bool) -> None:
        self.books.lease(ids(blocks), prefetch)
        self.leases.update(blocks)
        self.prefetch.update(blocks if prefetch else [])

    @rule(blocks=some_blocks, prefetch=st.booleans())
    def release(self, blocks: list[int], prefetch: bool) -> None:
        counted = self.prefetch if prefetch else self.leases - self.prefetch
        if any(not counted[block] for block in blocks):
            if any(not (self.prefetch if prefetch else self.leases)[block] for block in blocks):
                with pytest.raises(ProtocolError, match="given back twice"):
                    self.books.release(ids(blocks), prefetch)
            return
        self.leases.subtract(blocks)
        self.prefetch.subtract(blocks if prefetch else [])
        idle = [block for block in blocks if not self.leases[block]]
        assert self.books.release(ids(blocks), prefetch).tolist() == idle

    @rule(blocks=some_blocks)
    def promote(self, blocks: list[int]) -> None:
        if all(self.prefetch[block] for block in blocks):
            self.books.promote(ids(blocks))
            self.prefetch.subtract(blocks)

    @rule(blocks=some_blocks, asked=st.booleans())
    def want(self, blocks: list[int], asked: bool) -> None:
        self.books.want(ids(blocks), asked)
        self.wants.update(blocks)
        self.asked.update(blocks if asked else [])

    @rule(blocks=some_blocks, asked=st.booleans())
    def unwant(self, blocks: list[int], asked: bool) -> None:
        if all((self.asked if asked else self.wants - self.asked)[block] for block in blocks):
            self.books.unwant(ids(blocks), asked)
            self.wants.subtract(blocks)
            self.asked.subtract(blocks if asked else [])

    @invariant()
    def agree(self) -> None:
        everything = ids(list(range(BLOCKS)))
        books = self.books
        assert books.slot_of(everything).tolist() == [self.slot.get(b, -1) for b in range(BLOCKS)]
        state = [self.state.get(b, SlotState.FREE) for b in range(BLOCKS)]
        assert books.state(everything).tolist() == state
        assert books.leases(everything).tolist() == [self.leases[b] for b in range(BLOCKS)]
        assert books.asked(everything).tolist() == [self.asked[b] > 0 for b in range(BLOCKS)]
        copied = (SlotState.LOADING, SlotState.SAVING)
        assert books.busy(everything).tolist() == [each in copied for each in state]
        on = [block in self.slot for block in range(BLOCKS)]
        leading = on.index(False) if False in on else BLOCKS
        leased = sum(self.leases[block] > 0 for block in self.slot)
        assert books.along(everything) == (sum(on), leading, leased)
        there = [self.block_in[slot] for slot in range(SLOTS) if slot in self.block_in]
        assert books.all_blocks().tolist() == there
        assert books.blocks_in(ids(list(range(SLOTS)) * 2)).tolist() == there
        here = [block for block in self.slot if self.state[block] not in copied]
        leased = [block for block in here if self.leases[block]]
        assert books.leased_here == len(leased)
        wanted = [block for block in here if self.wants[block] and not self.leases[block]]
        assert books.wanted_here == len(wanted)
        assert books.prefetch_leased == sum(count > 0 for count in self.prefetch.values())
        assert [books.in_state(each) for each in SlotState][1:] == [
            sum(known is each for known in self.state.values()) for each in SlotState
        ][1:]
        assert books.known == len(self.state)


TestBooks = BooksMachine.TestCase
TestBooks.settings = settings(deadline=None)


def test_a_refused_call_changes_nothing():
    books = SlotBooks(BLOCKS, SLOTS)
    books.settle_in(ids([1]), ids([2]), SlotState.CLEAN)
    books.lease(ids([1]), False)
    with pytest.raises(ProtocolError, match="given back twice"):
        books.release(ids([1, 3]), False)
    with pytest.raises(ProtocolError, match="as many slots"):
        books.settle_in(ids([1, 3]), ids([2]), SlotState.CLEAN)
    with pytest.raises(ProtocolError, match="none of the"):
        books.settle_in(ids([1]), ids([SLOTS]), SlotState.CLEAN)
    with pytest.raises(ProtocolError, match="no state 6"):
        books.move(ids([1]), 6)
    assert (books.leased_here, books.slot_of(ids([1, 3])).tolist()) == (1, [2, -1])


@dataclass(slots=True)
class Slotted:
    """As vLLM has it: attributes at fixed places."""

    block_id: int
    prev_free_block: object = None
    next_free_block: object = None


@dataclass
class Plain:
    """As another version might have it."""

    block_id: int
    prev_free_block: object = None
    next_free_block: object = None


class Queue:
    """A linked list of all of `blocks`."""

    def __init__(self, kind: type[Slotted] | type[Plain], count: int) -> None:
        self.blocks = [kind(number) for number in range(count)]
        self.num_free_blocks = count
        self.fake_free_list_head, self.fake_free_list_tail = kind(-1), kind(-1)
        self.relink(self.blocks)

    def relink(self, order: Sequence[Slotted | Plain]) -> None:
        for block in self.blocks:
            block.next_free_block = block.prev_free_block = None
        chain = [self.fake_free_list_head, *order, self.fake_free_list_tail]
        for one, other in itertools.pairwise(chain):
            one.next_free_block, other.prev_free_block = other, one

    def forwards(self) -> list[int]:
        return _walk(self.fake_free_list_head, "next_free_block")

    def backwards(self) -> list[int]:
        return _walk(self.fake_free_list_tail, "prev_free_block")


def _walk(at: object, name: str) -> list[int]:
    found: list[int] = []
    while (at := getattr(at, name)) is not None and getattr(at, "block_id") >= 0:  # noqa: B009
        found.append(getattr(at, "block_id"))  # noqa: B009
    return found


@settings(deadline=None)
@given(
    kind=st.sampled_from([Slotted, Plain]),
    order=st.permutations(range(8)),
    leased=st.sets(st.integers(0, 7)),
    wanted=st.sets(st.integers(0, 7)),
    count=st.integers(0, 9),
    most=st.integers(0, 20),
    wanted_too=st.booleans(),
)
def test_spared_blocks_go_to_the_tail(
    kind: type[Slotted] | type[Plain],
    order: list[int],
    leased: set[int],
    wanted: set[int],
    count: int,
    most: int,
    wanted_too: bool,
):
    books, queue = SlotBooks(8, 8), Queue(kind, 8)
    queue.relink([queue.blocks[number] for number in order])
    books.settle_in(ids(list(range(8))), ids(list(range(8))), SlotState.CLEAN)
    books.lease(ids(sorted(leased)), True)
    books.want(ids(sorted(wanted)), True)
    spared = leased | wanted if wanted_too else leased
    free = FreeQueue(queue, queue.blocks)
    assert free.first(5).tolist() == order[:5]
    passed = free.spare(books, count, most, wanted_too)
    now = queue.forwards()
    assert now == queue.backwards()[::-1] == free.first(8).tolist()
    others = [number for number in order if number not in spared]
    seen = [number for number in order[:most] if number not in spared]
    assert passed == min(count, len(seen))
    assert now[:passed] == others[:passed]
    # Nobody overtakes one of the same kind that was looked at.
    assert [number for number in now if number not in spared] == others
    assert sorted(now) == list(range(8))


@settings(deadline=None)
@given(
    order=st.permutations(range(8)),
    used=st.sets(st.integers(0, 7)),
    leased=st.sets(st.integers(0, 7)),
    wanted=st.permutations(range(8)),
    wants=st.integers(0, 8),
    count=st.integers(1, 9),
)
def test_way_is_made_by_what_was_wanted_last(
    order: list[int],
    used: set[int],
    leased: set[int],
    wanted: list[int],
    wants: int,
    count: int,
):
    books, queue = SlotBooks(8, 8), Queue(Slotted, 8)
    stands = [number for number in order if number not in used]
    queue.relink([queue.blocks[number] for number in stands])
    books.settle_in(ids(list(range(8))), ids(list(range(8))), SlotState.CLEAN)
    books.lease(ids(sorted(leased)), True)
    for number in wanted[:wants]:
        books.want(ids([number]), True)
    free = FreeQueue(queue, queue.blocks)
    passed = free.make_way(books, count, 8)
    now = queue.forwards()
    assert now == queue.backwards()[::-1]
    assert sorted(now) == sorted(stands)
    others = [number for number in stands if number not in leased]
    unwanted = [number for number in others if number not in wanted[:wants]]
    given = [number for number in wanted[:wants][::-1] if number in others]
    assert passed == min(count, len(others))
    assert now[:passed] == (unwanted + given)[:count]


@pytest.mark.parametrize("wanted", [[], [7]])
def test_way_is_made_past_all_that_is_leased_where_nothing_is_wanted(wanted: list[int]):
    """What is wanted makes up for blocks that were not looked at, and else nothing would."""
    books, queue = SlotBooks(8, 8), Queue(Slotted, 8)
    books.settle_in(ids(list(range(8))), ids(list(range(8))), SlotState.CLEAN)
    books.lease(ids([0, 1, 2]), True)
    books.want(ids(wanted), True)
    assert FreeQueue(queue, queue.blocks).make_way(books, 2, 3) == (1 if wanted else 2)
    assert queue.forwards()[:2] == ([7, 3] if wanted else [3, 4])


def test_a_guard_lasts_until_something_changes():
    books, queue = SlotBooks(8, 8), Queue(Slotted, 8)
    books.settle_in(ids(list(range(8))), ids(list(range(8))), SlotState.CLEAN)
    free = FreeQueue(queue, queue.blocks)

    def behind(*numbers: int) -> None:
        """As vLLM frees blocks."""
        stands = [each for each in queue.forwards() if each not in numbers]
        queue.relink([queue.blocks[number] for number in [*stands, *numbers]])

    books.lease(ids([0, 1]), True)
    free.guard(books, 4)
    assert queue.forwards()[-2:] == [0, 1]
    # Nobody told of it, and the end is the same: it does not look again.
    queue.relink([queue.blocks[number] for number in [0, 2, 3, 4, 5, 6, 7, 1]])
    free.guard(books, 4)
    assert queue.forwards()[0] == 0
    behind(2)
    free.guard(books, 4)
    assert not {0, 1} & set(queue.forwards()[:5])
    books.lease(ids([3]), True)
    free.guard(books, 4)
    assert not {0, 1, 3} & set(queue.forwards()[:5])
    books.want(ids([4]), True)
    free.guard(books, 4)
    assert queue.forwards()[4] == 4
    # More were taken than were put in front to spare.
    books.want(ids([5]), True)
    free.guard(books, 4)
    queue.relink([queue.blocks[number] for number in [0, 4, *queue.forwards()[-2:]]])
    queue.num_free_blocks = 4
    free.guard(books, 4)
    assert queue.forwards()[0] != 0


def test_a_guard_of_few_does_not_last_for_more():
    books, queue = SlotBooks(8, 8), Queue(Slotted, 8)
    books.settle_in(ids(list(range(8))), ids(list(range(8))), SlotState.CLEAN)
    books.lease(ids([3]), True)
    free = FreeQueue(queue, queue.blocks)
    free.guard(books, 2)
    assert queue.forwards() == list(range(8))
    free.guard(books, 4)
    assert queue.forwards()[-1] == 3


def test_what_is_not_as_vllm_has_it_is_refused():
    queue = Queue(Slotted, 2)
    with pytest.raises(ProtocolError, match="a list"):
        FreeQueue(queue, [])
    queue.fake_free_list_tail = Plain(-1)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(SettingsError, match="other ends"):
        FreeQueue(queue, queue.blocks)
    queue = Queue(Slotted, 2)
    free = FreeQueue(queue, queue.blocks)
    assert free.ids(queue.blocks[::-1]).tolist() == [1, 0]
    assert free.with_ids(ids([1, 0])) == queue.blocks[::-1]
    with pytest.raises(ProtocolError, match="2"):
        free.with_ids(ids([0, 2]))
    queue.blocks[1].next_free_block = None
    with pytest.raises(ProtocolError, match="none behind it"):
        free.first(3)
