"""Columns against plain lists, what they refuse, and that they hold the interpreter lock."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from interpreter_lock import let_go

from forebay._native import FlagColumn, NumberColumn, SlotColumn, StateColumn, count_true
from forebay.errors import ProtocolError, SettingsError

COUNT = 9
EVERYTHING = np.arange(COUNT, dtype=np.int32)

some_ids = st.lists(st.integers(0, COUNT - 1), max_size=12)
numbers = st.integers(-(2**63), 2**63 - 1)


def ids(given: list[int]) -> np.ndarray:
    """`given` as ids that do not lie one behind the other in memory."""
    return np.repeat(np.array(given, np.int32), 2)[::2]


@given(st.lists(st.tuples(st.sampled_from(["put", "put_up", "raise_to"]), some_ids, numbers)))
def test_numbers_agree_with_a_list(history: list[tuple[str, list[int], int]]) -> None:
    column, model = NumberColumn(COUNT), [0] * COUNT
    for call, changed, number in history:
        first = min(number, 2**63 - 1 - len(changed))
        getattr(column, call)(ids(changed), first)
        for place, each in enumerate(changed):
            if call == "put":
                model[each] = first
            elif call == "put_up":
                model[each] = first + place
            else:
                model[each] = max(model[each], first)
        assert column.take(EVERYTHING).tolist() == model
        assert column.marked(EVERYTHING).tolist() == [number != 0 for number in model]


@given(st.lists(st.integers(0, 3), min_size=COUNT, max_size=COUNT), some_ids)
def test_runs_are_of_equal_numbers_and_leave_out_zero(values: list[int], along: list[int]) -> None:
    column = NumberColumn(COUNT)
    for each, value in enumerate(values):
        column.put(ids([each]), value)
    met = [values[each] for each in along if values[each]]
    runs = [(number, len(list(run))) for number, run in itertools.groupby(met)]
    assert column.runs(ids(along)) == runs
    assert column.clear_runs(ids(along)) == runs
    left = [0 if each in along else value for each, value in enumerate(values)]
    assert column.take(EVERYTHING).tolist() == left


@given(st.lists(st.tuples(some_ids, st.booleans())))
def test_flags_agree_with_a_list(history: list[tuple[list[int], bool]]) -> None:
    column, model = FlagColumn(COUNT), [False] * COUNT
    for changed, flag in history:
        column.put(ids(changed), flag)
        for each in changed:
            model[each] = flag
        assert column.take(EVERYTHING).tolist() == model
        assert [column.of(each) for each in range(COUNT)] == model
        assert column.numbers().tolist() == [each for each in range(COUNT) if model[each]]
        assert count_true(column.take(EVERYTHING)[::2]) == sum(model[::2])


def test_a_slot_is_none_until_it_is_told() -> None:
    column = SlotColumn(4)
    column.put_each(ids([3, 1]), ids([7, 8]))
    assert column.take(ids([0, 1, 2, 3])).tolist() == [-1, 8, -1, 7]
    column.put(ids([1]), -1)
    assert column.take(ids([1, 3])).tolist() == [-1, 7]
    with pytest.raises(ProtocolError, match="2 ids need as many values, 1 are given"):
        column.put_each(ids([1, 2]), ids([5]))


def test_no_slot_has_the_first_state() -> None:
    column = StateColumn(4)
    column.put(ids([0, 2]), 4)
    assert column.take(ids([2, -1, 1, 0])).tolist() == [4, 0, 0, 4]
    assert column.counts(ids([2, -1, 1, 0])) == [2, 0, 0, 0, 2, 0]
    with pytest.raises(ProtocolError):
        column.put(ids([-1]), 1)


CALLS: list[Callable[[Any], object]] = [
    lambda given: NumberColumn(COUNT).take(given),
    lambda given: NumberColumn(COUNT).put(given, 1),
    lambda given: NumberColumn(COUNT).put_up(given, 1),
    lambda given: NumberColumn(COUNT).raise_to(given, 1),
    lambda given: NumberColumn(COUNT).marked(given),
    lambda given: NumberColumn(COUNT).runs(given),
    lambda given: NumberColumn(COUNT).clear_runs(given),
    lambda given: SlotColumn(COUNT).take(given),
    lambda given: SlotColumn(COUNT).put(given, 1),
    lambda given: SlotColumn(COUNT).put_each(given, given),
    lambda given: FlagColumn(COUNT).take(given),
    lambda given: FlagColumn(COUNT).put(given, True),
    lambda given: StateColumn(COUNT).take(given),
    lambda given: StateColumn(COUNT).counts(given),
    lambda given: StateColumn(COUNT).put(given, 1),
]


@pytest.mark.parametrize("given", [ids([1, COUNT]), ids([-2]), np.array([1]), [1]], ids=repr)
@pytest.mark.parametrize("call", CALLS)
def test_what_are_no_ids_is_refused(call: Callable[[Any], object], given: object) -> None:
    with pytest.raises(ProtocolError):
        call(given)


@pytest.mark.parametrize("make", [NumberColumn, SlotColumn, FlagColumn, StateColumn])
def test_there_are_no_so_many_ids(make: Callable[[int], object]) -> None:
    with pytest.raises(SettingsError):
        make(-1)


def test_nothing_lets_go_of_the_interpreter_lock() -> None:
    along = np.arange(COUNT, dtype=np.int32).repeat(2_000)
    flags = np.ones(len(along), np.bool_)

    def look_up() -> None:
        for call in CALLS:
            call(along)
        count_true(flags)

    assert let_go(look_up, times=20) == []
    assert let_go(lambda: time.sleep(0.01), times=5)  # who does is noticed
