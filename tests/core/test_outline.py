"""The directory's drawing as Python gets it; `native/tests/outline_test.cpp` looks closer."""

from __future__ import annotations

import numpy as np
import pytest

from forebay.core.directory import Directory
from forebay.errors import ProtocolError

WIDTH = 4


def keys(*numbers):
    return np.array(numbers, np.int32).tobytes()


@pytest.fixture
def directory():
    """a: 0 1 2 then 3 4, or 5; b: 6."""
    directory = Directory(WIDTH)
    directory.insert(b"a", keys(10, 11, 12, 13, 14), 0, np.arange(5, dtype=np.int32))
    directory.insert(b"a", keys(10, 11, 12, 99), 3, np.array([5], np.int32))
    directory.insert(b"b", keys(10), 0, np.array([6], np.int32))
    return directory


def outline(directory, namespaces=None, most_runs=100, most_samples=100):
    return directory.outline(namespaces, 64, most_runs=most_runs, most_samples=most_samples)


def test_runs_come_parents_first_with_their_blocks_and_all_below(directory):
    drawn = outline(directory, [b"a"])
    assert drawn.exact
    assert drawn.total == 6
    assert drawn.parents.tolist() == [-1, 0, 0]
    assert drawn.blocks[0] == 3
    assert sorted(drawn.blocks[1:].tolist()) == [1, 2]
    assert drawn.weights[0] == 6
    assert drawn.counts.tolist() == drawn.blocks.tolist()
    parts = np.split(drawn.samples, np.cumsum(drawn.counts)[:-1])
    assert sorted(part.tolist() for part in parts) == [[0, 1, 2], [3, 4], [5]]


def test_all_namespaces_or_the_given_ones(directory):
    assert outline(directory).total == 7
    assert outline(directory, [b"b"]).samples.tolist() == [6]
    assert outline(directory, [b"b", b"unknown"]).total == 1
    for empty in (outline(directory, []), outline(Directory(WIDTH))):
        assert empty.total == 0
        assert not len(empty.parents)
        assert not len(empty.samples)


def test_bounds_keep_the_heaviest_and_a_few_blocks(directory):
    drawn = outline(directory, most_runs=2, most_samples=1)
    assert drawn.parents.tolist() == [-1, 0]
    assert drawn.blocks.tolist() == [3, 2]
    assert drawn.counts.tolist() == [1, 1]
    assert drawn.samples.tolist() == [1, 4]
    assert drawn.total == 7


def test_what_is_no_bound_or_name_is_refused(directory):
    with pytest.raises(ProtocolError):
        outline(directory, most_runs=-1)
    with pytest.raises(ProtocolError):
        outline(directory, ["a"])
