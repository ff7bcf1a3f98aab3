"""The directory's edges: what it refuses, what it leaves behind, and how far it bends."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from forebay.core.directory import Directory
from forebay.errors import (
    ForebayError,
    NotLeafError,
    ParentMissingError,
    ProtocolError,
    SettingsError,
)

N = b"tenant"


def ids(*blocks: int) -> NDArray[np.int32]:
    return np.array(blocks, np.int32)


def path(text: str) -> bytes:
    """One 4-byte key per letter."""
    return b"".join(letter.encode() * 4 for letter in text)


@pytest.fixture
def directory() -> Directory:
    return Directory(4)


def test_nothing_is_published_at_first(directory: Directory) -> None:
    for keys in (b"", path("abc")):
        match = directory.match(N, keys)
        assert match.ids.tolist() == []
        assert match.ids.dtype == np.int32
        assert directory.match(N, keys, match.session).ids.tolist() == []
    assert len(directory) == 0


def test_empty_keys(directory: Directory) -> None:
    assert directory.insert(N, b"", 0, ids()).tolist() == []
    directory.insert(N, path("ab"), 0, ids(0, 1))
    assert directory.match(N, b"").ids.tolist() == []
    assert directory.insert(N, path("ab"), 1, ids()).tolist() == []
    directory.check()


def test_inserting_nothing_makes_no_namespace(directory: Directory) -> None:
    directory.insert(N, path("ab"), 0, ids())
    with pytest.raises(ParentMissingError):
        directory.insert(N, path("ab"), 1, ids(7))
    directory.check()
    assert directory.node_count == 0


@pytest.mark.parametrize("key_bytes", [0, -4])
def test_key_width_must_be_positive(key_bytes: int) -> None:
    with pytest.raises(SettingsError, match="key_bytes"):
        Directory(key_bytes)


@pytest.mark.parametrize(
    "call",
    [
        lambda d: d.match(N, b"abcde"),
        lambda d: d.match(N, bytearray(b"abcd")),
        lambda d: d.insert(N, b"abcde", 0, ids(0)),
        lambda d: d.insert(N, path("a"), 0, ids(0, 1)),
        lambda d: d.insert(N, path("ab"), -1, ids(0)),
        lambda d: d.insert(N, path("ab"), 0, np.zeros((2, 1), np.int32)),
        lambda d: d.insert(N, path("ab"), 0, ids(5, 5)),
        lambda d: d.insert(N, path("ab"), 0, ids(5, -1)),
        lambda d: d.insert(N, path("ab"), 2**70, ids(5)),
        lambda d: d.insert(N, path("pq"), 1, np.array([5])),
        lambda d: d.insert(N, path("pq"), 1, [5]),
        lambda d: d.insert("tenant", path("pq"), 1, ids(5)),
        lambda d: d.match("tenant", path("p")),
        lambda d: d.match(N, path("p"), (N, 0, 1)),
        lambda d: d.match(N, path("p"), (N, 0, 1, [0], None)),
        lambda d: d.match(N, path("p"), (N, 0, 1, ids(0), bytearray(b"pppp"))),
        lambda d: d.insert(N, path("pqr"), 1, ids(3, 0)),
        lambda d: d.parent(5),
        lambda d: d.is_leaf(-1),
        lambda d: d.remove_leaf(5),
        lambda d: d.remove_leaf(10**9),
        lambda d: d.remove_leaf(-(10**30)),
        lambda d: d.parent(2**64),
        lambda d: d.remove_subtree(5),
        lambda d: d.remove_leaves(ids(5)),
        lambda d: d.remove_leaves(np.array([0])),
        lambda d: d.remove_leaves(np.zeros((1, 1), np.int32)),
    ],
)
def test_misuse_is_refused_without_change(
    directory: Directory, call: Callable[[Directory], object]
) -> None:
    directory.insert(N, path("p"), 0, ids(0))
    with pytest.raises(ProtocolError):
        call(directory)
    directory.check()
    assert len(directory) == 1
    assert directory.match(N, path("pqr")).ids.tolist() == [0]


def test_parent_missing(directory: Directory) -> None:
    directory.insert(N, path("ab"), 0, ids(0, 1))
    with pytest.raises(ParentMissingError):
        directory.insert(N, path("abcd"), 3, ids(3))
    with pytest.raises(ParentMissingError):
        directory.insert(N, path("axcd"), 2, ids(3))
    with pytest.raises(ParentMissingError):
        directory.insert(b"other", path("abc"), 2, ids(3))
    assert 3 not in directory
    directory.insert(N, path("abc"), 2, ids(3))
    assert directory.match(N, path("abcd")).ids.tolist() == [0, 1, 3]


def test_duplicates_keep_the_published_block(directory: Directory) -> None:
    directory.insert(N, path("abc"), 0, ids(0, 1, 2))
    assert directory.insert(N, path("abc"), 0, ids(7, 8, 9)).tolist() == [0, 1, 2]
    assert directory.insert(N, path("abc"), 1, ids(1)).tolist() == [1]
    assert directory.insert(N, path("abcde"), 1, ids(7, 8, 3, 4)).tolist() == [1, 2, 3, 4]
    assert 7 not in directory
    assert directory.match(N, path("abcde")).ids.tolist() == [0, 1, 2, 3, 4]


def test_keys_may_each_be_a_path_of_one_block(directory: Directory) -> None:
    directory.insert(N, path("ab"), 0, ids(0, 1))
    assert directory.match_each(N, path("abca")).tolist() == [0, -1, -1, 0]
    given = ids(2, 3, 4)
    assert directory.insert_each(N, path("cab"), given).tolist() == [2, 0, 4]
    assert given.tolist() == [2, 3, 4]
    assert directory.match_each(N, path("abcd")).tolist() == [0, 4, 2, -1]
    assert directory.match(N, path("ab")).ids.tolist() == [0, 1]
    assert 3 not in directory
    assert directory.match_each(b"another", path("ab")).tolist() == [-1, -1]
    assert directory.match_each(N, b"").tolist() == directory.insert_each(N, b"", ids()).tolist()
    directory.check()


@pytest.mark.parametrize(
    "misuse",
    [
        lambda directory: directory.match_each(N, b"aaaab"),
        lambda directory: directory.insert_each(N, b"aaaab", ids(7)),
        lambda directory: directory.insert_each(N, path("ab"), ids(7)),
        lambda directory: directory.insert_each(N, path("b"), ids(-1)),
        lambda directory: directory.insert_each(N, path("b"), ids(0)),
    ],
)
def test_misuse_of_paths_of_one_block_is_refused_without_change(
    directory: Directory, misuse: Callable[[Directory], object]
) -> None:
    directory.insert(N, path("a"), 0, ids(0))
    before = directory.dump()
    with pytest.raises(ProtocolError):
        misuse(directory)
    assert directory.dump() == before
    directory.check()


def test_split_and_partial_hits(directory: Directory) -> None:
    directory.insert(N, path("abcd"), 0, ids(0, 1, 2, 3))
    directory.insert(N, path("abxy"), 2, ids(4, 5))
    directory.insert(N, path("abc"), 0, ids(6, 7, 8))
    assert directory.match(N, path("abcq")).ids.tolist() == [0, 1, 2]
    assert directory.match(N, path("abxyz")).ids.tolist() == [0, 1, 4, 5]
    assert directory.match(N, path("ba")).ids.tolist() == []
    assert [directory.parent(block) for block in (0, 1, 2, 3, 4, 5)] == [-1, 0, 1, 2, 1, 4]
    assert [block for block in range(6) if directory.is_leaf(block)] == [3, 5]
    directory.check()


def test_namespaces_never_share(directory: Directory) -> None:
    directory.insert(b"a", path("xyz"), 0, ids(0, 1, 2))
    assert directory.match(b"b", path("xyz")).ids.tolist() == []
    session = directory.match(b"a", path("xyz")).session
    assert directory.match(b"b", path("xyz"), session).ids.tolist() == []
    assert directory.insert(b"b", path("xyz"), 0, ids(3, 4, 5)).tolist() == [3, 4, 5]
    assert directory.match(b"b", path("xyz"), session).ids.tolist() == [3, 4, 5]
    assert directory.match(b"a", path("xyz")).ids.tolist() == [0, 1, 2]


def test_a_namespace_goes_with_its_last_block(directory: Directory) -> None:
    for turn in range(300):
        name = str(turn).encode()
        directory.insert(name, path("ab"), 0, ids(0, 1))
        if turn % 2:
            directory.remove_leaves(ids(1, 0))
        else:
            directory.remove_subtree(0)
    assert len(directory) == 0
    assert directory.node_count == 0
    directory.check()


def test_only_leaves_are_removed(directory: Directory) -> None:
    directory.insert(N, path("abc"), 0, ids(0, 1, 2))
    directory.insert(N, path("abx"), 2, ids(3))
    for block in (0, 1):
        with pytest.raises(NotLeafError):
            directory.remove_leaf(block)
    assert directory.remove_leaves(ids(1, 2, 1, 3, 1, 0)).tolist() == [
        False,
        True,
        False,
        True,
        True,
        True,
    ]
    assert len(directory) == 0
    directory.check()


def test_subtree_comes_children_first(directory: Directory) -> None:
    directory.insert(N, path("abcd"), 0, ids(0, 1, 2, 3))
    directory.insert(N, path("abxy"), 2, ids(4, 5))
    directory.insert(N, path("abxz"), 3, ids(6))
    order = directory.remove_subtree(1).tolist()
    assert sorted(order) == [1, 2, 3, 4, 5, 6]
    for child, parent in ((1, 1), (2, 1), (3, 2), (4, 1), (5, 4), (6, 4)):
        assert order.index(child) <= order.index(parent)
    assert directory.match(N, path("abcd")).ids.tolist() == [0]
    directory.check()


def test_a_branch_that_went_leaves_no_trace() -> None:
    directory = Directory(4)
    directory.insert(N, path("abcdef"), 0, ids(0, 1, 2, 3, 4, 5))
    for depth in range(1, 6):
        directory.insert(N, path("abcdef"[:depth] + "x"), depth, ids(10 + depth))
    directory.remove_leaves(ids(11, 12, 13, 14, 15))
    assert directory.node_count == 2
    assert directory.match(N, path("abcdef")).ids.tolist() == [0, 1, 2, 3, 4, 5]


def test_session_resumes_and_goes_stale(directory: Directory) -> None:
    directory.insert(N, path("abc"), 0, ids(0, 1, 2))
    session = directory.match(N, path("abc")).session
    directory.insert(N, path("abcd"), 3, ids(3), session)
    directory.insert(N, path("ax"), 1, ids(9))
    for handle in (session, session.rested()):
        assert directory.match(N, path("abcde"), handle).ids.tolist() == [0, 1, 2, 3]
        assert directory.match(N, path("ab"), handle).ids.tolist() == [0, 1]
        assert directory.match(N, path("axcd"), handle).ids.tolist() == [0, 9]
        assert directory.match(N, path("abxd"), handle).ids.tolist() == [0, 1]
    directory.remove_leaves(ids(3, 2))
    assert directory.match(N, path("abcde"), session).ids.tolist() == [0, 1]
    directory.insert(N, path("axyz"), 2, ids(2))
    assert directory.match(N, path("abcde"), session).ids.tolist() == [0, 1]
    assert directory.match(N, path("axyz"), session).ids.tolist() == [0, 9, 2]


@pytest.mark.parametrize(
    "remove",
    [
        lambda d: d.remove_leaf(2),
        lambda d: d.remove_leaves(ids(2)),
        lambda d: d.remove_subtree(2),
    ],
)
def test_an_id_used_again_does_not_revive_a_session(
    directory: Directory, remove: Callable[[Directory], object]
) -> None:
    keys = path("abc")
    directory.insert(N, keys, 0, ids(0, 1, 2))
    session = directory.match(N, keys).session
    remove(directory)
    directory.insert(N, path("xyz"), 0, ids(3, 4, 2))
    assert directory.match(N, keys, session).ids.tolist() == [0, 1]
    assert directory.match(N, keys, session.rested()).ids.tolist() == [0, 1]


def test_a_session_holds_for_what_it_matched_only(directory: Directory) -> None:
    directory.insert(N, path("ab"), 0, ids(0, 1))
    session = directory.match(N, path("abxx")).session
    directory.insert(N, path("abcd"), 2, ids(2, 3))
    assert directory.match(N, path("abcd"), session).ids.tolist() == [0, 1, 2, 3]
    assert directory.match(N, path("acxx"), session).ids.tolist() == [0]


def test_what_was_inserted_last_is_tried_first_and_the_rest_is_found(directory: Directory) -> None:
    directory.insert(N, path("abcd"), 0, ids(0, 1, 2, 3))
    for block, last in enumerate("wxyz", start=4):
        directory.insert(N, path("abc" + last), 3, ids(block))
        directory.check()
        for other, letter in [(3, "d"), *enumerate("wxyz"[: block - 3], start=4)]:
            assert directory.match(N, path("abc" + letter)).ids.tolist() == [0, 1, 2, other]
    for block in (5, 7, 3, 6):
        directory.remove_leaf(block)
        directory.check()
    assert directory.match(N, path("abcw")).ids.tolist() == [0, 1, 2, 4]


def test_the_same_keys_object_is_not_compared_again(directory: Directory) -> None:
    keys = path("abc")
    directory.insert(N, keys, 0, ids(0, 1))
    first = directory.match(N, keys)
    assert first.ids.tolist() == [0, 1]
    assert directory.match(N, keys, first.session).ids is first.ids
    directory.insert(N, keys, 2, ids(2), first.session)
    assert directory.match(N, keys, first.session).ids.tolist() == [0, 1, 2]
    directory.remove_subtree(1)
    assert directory.match(N, keys, first.session).ids.tolist() == [0]


def test_a_session_may_reach_further_than_an_insert(directory: Directory) -> None:
    keys = path("abc")
    directory.insert(N, keys, 0, ids(0, 1, 2))
    session = directory.match(N, keys).session
    assert directory.insert(N, keys, 0, ids(7), session).tolist() == [0]
    assert directory.insert(N, keys, 1, ids(7), session.rested()).tolist() == [1]


def test_a_session_resumes_within_a_run_and_goes_on_below(directory: Directory) -> None:
    directory.insert(N, path("abcdef"), 0, ids(0, 1, 2, 3, 4, 5))
    directory.insert(N, path("abcdx"), 4, ids(6))
    session = directory.match(N, path("ab")).session
    for handle in (session, session.rested()):
        match = directory.match(N, path("abcdefg"), handle)
        assert match.ids.tolist() == [0, 1, 2, 3, 4, 5]
        assert not match.ids.flags.writeable


def test_a_session_is_not_believed_for_another_front(directory: Directory) -> None:
    directory.insert(N, path("abcd"), 0, ids(0, 1, 2, 3))
    directory.insert(N, path("abx"), 2, ids(4))
    directory.insert(N, path("ybcd"), 0, ids(5, 6, 7, 8))
    session = directory.match(N, path("abcd")).session
    for handle in (session, session.rested()):
        assert directory.match(N, path("ybcd"), handle).ids.tolist() == [5, 6, 7, 8]
        assert directory.match(N, path("zbcd"), handle).ids.tolist() == []


def test_a_made_up_session_is_not_believed(directory: Directory) -> None:
    keys = path("abc")
    directory.insert(N, keys, 0, ids(0, 1, 2))
    true = directory.match(N, keys).session
    for made_up in (
        true._replace(ids=ids(0)),
        true._replace(ids=ids(*range(9))),
        true._replace(block=1),
        true._replace(block=-1),
        true._replace(block=2**70),
        true._replace(generation=-(2**70)),
        true._replace(keys=b""),
        true._replace(keys=path("abx")),
    ):
        assert directory.match(N, keys, made_up).ids.tolist() == [0, 1, 2]
        assert directory.insert(N, keys, 2, ids(5), made_up).tolist() == [2]
        assert directory.match(N, b"", made_up).ids.tolist() == []


def test_blocks_may_be_numbers_of_any_kind_and_arrays_lie_anyhow(directory: Directory) -> None:
    backwards = np.array([2, 1, 0], np.int32)[::-1]
    assert directory.insert(N, path("abc"), 0, backwards).tolist() == [0, 1, 2]
    assert np.int64(1) in directory
    assert directory.parent(backwards[1]) == 0  # pyright: ignore[reportArgumentType]
    assert directory.remove_leaves(backwards[::-1]).all()
    with pytest.raises(TypeError):
        directory.parent(1.5)  # pyright: ignore[reportArgumentType]


def test_a_match_outlives_what_it_saw(directory: Directory) -> None:
    directory.insert(N, path("abc"), 0, ids(0, 1, 2))
    seen = directory.match(N, path("abc")).ids
    directory.insert(N, path("abcd"), 3, ids(3))
    directory.remove_subtree(0)
    assert seen.tolist() == [0, 1, 2]


def test_a_path_of_thousands_of_one_block_nodes() -> None:
    blocks = 1100
    directory = Directory(4)
    keys = np.arange(blocks, dtype=np.int32).tobytes()
    directory.insert(N, keys, 0, np.arange(blocks, dtype=np.int32))
    for depth in range(1, blocks):
        side = keys[: depth * 4] + b"side"
        directory.insert(N, side, depth, ids(blocks + depth))
    assert len(directory.match(N, keys).ids) == blocks
    assert directory.node_count == 2 * blocks
    session = directory.match(N, keys).session.rested()
    assert len(directory.match(N, keys, session).ids) == blocks
    directory.check()
    assert blocks > sys.getrecursionlimit()
    removed = directory.remove_subtree(0)
    assert len(removed) == 2 * blocks - 1
    assert len(directory) == 0
    directory.check()


def test_runs_are_bounded() -> None:
    directory = Directory(4, run_bytes=12)
    keys = path("abcdefgh")
    for depth in range(8):
        directory.insert(N, keys, depth, ids(depth))
    assert directory.node_count == 1 + 3
    assert directory.match(N, keys).ids.tolist() == list(range(8))
    assert directory.remove_leaves(ids(7, 6, 5, 4, 3, 2, 1)).all()
    directory.check()
    assert directory.match(N, keys).ids.tolist() == [0]


def test_no_object_per_node_for_the_garbage_collector() -> None:
    directory = Directory(4)
    gc.collect()
    before = len(gc.get_objects())
    for conversation in range(1000):
        keys = path("abc") + conversation.to_bytes(4, "little")
        directory.insert(N, keys, 0, np.arange(4, dtype=np.int32) + 4 * conversation)
    gc.collect()
    assert len(gc.get_objects()) - before < 10


def test_errors_are_forebays() -> None:
    with pytest.raises(ForebayError):
        Directory(4).match(N, b"x")
