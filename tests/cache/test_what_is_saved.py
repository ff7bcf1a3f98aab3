"""Which computed blocks are saved, and when: none that are gone, so many at once as may be."""

from __future__ import annotations

import numpy as np
from computed_saves import BLOCK_BYTES, SLOTS, Computed

from forebay import Mode, SaveMode
from forebay.core.arrays import Ids
from forebay.core.device_pool import LeaseKind
from forebay.transfer.messages import Completion, Outcome

TWO_AT_ONCE = {"link_bytes_per_s": 2.0 * BLOCK_BYTES, "saves_in_flight_s": 1.0}


def end_all(computed: Computed) -> None:
    """What was saved last has arrived."""
    for each in computed.sent.transfers:
        count = len(each.sources)
        size = count * BLOCK_BYTES
        arrived = Completion(each.id, Outcome.DONE, count, count, size, 0.0, 0.0, "")
        computed.saves.ended(arrived, 0.0)


def slots(computed: Computed, blocks: Ids) -> list[int]:
    return computed.store.device.slot_of(blocks).tolist()


def test_blocks_whose_ids_others_have_now_are_not_saved_for_them():
    computed = Computed(link_bytes_per_s=1e12)
    gone = computed.compute(SLOTS // 2)
    computed.saves.again(gone)
    while not np.isin(path := computed.compute(SLOTS // 2), gone).any():
        pass  # what is computed takes the slots of what was computed before
    computed.saves.again(path)
    saved, *_ = computed.saved()  # then come the next victims, which nobody asked to save
    assert sorted(saved) == sorted(slots(computed, path))


def test_what_waits_to_be_saved_is_bounded_by_the_pool():
    computed = Computed()
    for _ in range(20):
        computed.saves.again(computed.compute(SLOTS // 2))
    assert len(computed.saves._pending) <= 4
    assert computed.saves._pending_blocks <= 2 * SLOTS


def test_no_more_is_saved_at_once_than_the_bound_on_saves_in_flight():
    computed = Computed(**TWO_AT_ONCE)
    computed.saves.again(computed.compute(5))
    assert [len(each) for each in computed.saved()] == [2]
    before = list(computed.sent.transfers)
    assert computed.saved() == []
    computed.sent.transfers = before
    end_all(computed)
    assert [len(each) for each in computed.saved()] == [2]


def test_nothing_is_saved_in_a_mode_without_host_memory():
    computed = Computed(mode=Mode.RECOMPUTE, step_blocks=SLOTS)
    computed.saves.again(computed.compute(SLOTS))
    assert not computed.saves.pending
    assert computed.saved() == []


def test_while_a_look_at_the_next_victims_was_cut_short_they_go_first():
    computed = Computed(step_blocks=4, **TWO_AT_ONCE)
    first, second = computed.compute(SLOTS // 2), computed.compute(SLOTS // 2)
    for run in (first, second):
        computed.saves.again(run)
    computed.store.touch(first, LeaseKind.HARD)  # used again: the other path goes before it
    computed.store.release(first, LeaseKind.HARD)
    saved: list[int] = []
    for _ in range(4):
        (some,) = computed.saved()
        saved += some
        end_all(computed)
    assert len(saved) == 8
    assert set(saved) <= set(slots(computed, second))


def test_of_what_is_in_use_as_much_is_saved_as_there_are_too_few_victims():
    computed = Computed(save_mode=SaveMode.ON_EVICT, step_blocks=4, link_bytes_per_s=1e12)
    used = computed.compute(SLOTS - 3)
    computed.store.touch(used, LeaseKind.HARD)
    computed.saves.again(used)
    # Eleven may be allocated soon, eight in two steps and a reserve of three, and three are free.
    assert computed.saved() == [slots(computed, used[:8])]
