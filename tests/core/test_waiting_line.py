"""What requests in line match, and what they hear of later."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forebay.core.arrays import EMPTY_IDS, Ids
from forebay.core.device_pool import LeaseKind
from forebay.core.requests import Hint, Request, Ticket, Waiting
from forebay.core.store import Store
from forebay.core.waiting import WaitingLine

KEY_BYTES, BLOCK_TOKENS = 8, 4


class Line:
    """A line of requests over a store of 16 slots in each tier."""

    def __init__(self) -> None:
        self.store = Store(KEY_BYTES, 16, 16)
        self.line = WaitingLine(self.store, BLOCK_TOKENS)
        self._requests = 0

    def publish(self, namespace: bytes, path: str) -> Ids:
        """Compute what of `path`, a letter a block, is not published. Returns all of it."""
        keys = keys_of(path)
        found = self.store.match(namespace, keys).ids
        blocks = self.store.compute(len(path) - len(found), protected=False)
        assert blocks is not None
        self.store.publish(namespace, keys, len(found), blocks)
        self.store.release(blocks, LeaseKind.HARD)
        self.line.published(namespace, int(found[-1]) if len(found) else -1)
        return np.concatenate([found, blocks])

    def move_to_host(self, path: Ids) -> None:
        """Save all of `path`, and give up its device slots."""
        plan = self.store.start_save(1, path)
        assert plan is not None
        self.store.end_save(1, len(path), len(path))
        self.store.device.forget(path[::-1].copy())
        self.store.left_device(path[::-1].copy())

    def cover(self, entry: Waiting, blocks: int) -> None:
        """`entry` leases so many of its blocks, which are on the device."""
        self.store.touch(entry.blocks[:blocks], LeaseKind.PREFETCH)
        entry.covered, entry.origins = blocks, np.zeros(blocks, np.bool_)
        self.line.count(entry)

    def request(self, namespace: bytes, path: str, **more: bool) -> Request:
        """A request for `path` and one token more."""
        self._requests += 1
        return Request(
            id=self._requests,
            namespace=namespace,
            keys=keys_of(path),
            tokens=len(path) * BLOCK_TOKENS + 1,
            max_answer_tokens=1,
            arrival_s=float(self._requests),
            **more,
        )

    def wait(self, path: str, namespace: bytes = b"n", **more: bool) -> Waiting:
        return self.line.add(self.request(namespace, path, **more))

    def run(self, path: str, blocks: Ids, **more: bool) -> Ticket:
        """A request for `path` runs, of which `blocks` are published, and computes the next."""
        ticket = Ticket(self.request(b"n", path, **more), 1, 0, {}, {}, set())
        ticket.published = len(blocks)
        ticket.parent = int(blocks[-1]) if len(blocks) else -1
        self.line.computes(ticket)
        return ticket

    def shared(self, entry: Waiting) -> int:
        """Tokens behind the match of `entry` that a running request computes."""
        tokens = 0
        while self.line.shared_with_running(entry, tokens):
            tokens += 1
        return tokens

    def matched(self, entry: Waiting) -> int:
        """Blocks of its path that `entry` matches by now."""
        self.line.refresh(entry)
        return entry.length


def keys_of(path: str) -> bytes:
    return b"".join(letter.encode() * KEY_BYTES for letter in path)


@pytest.fixture
def rig() -> Line:
    return Line()


@pytest.mark.parametrize("found", ["", "ab"])
def test_who_waits_hears_of_what_is_published_right_behind_its_match(rig: Line, found: str):
    if found:
        rig.publish(b"n", found)
    entry = rig.wait("abcd")
    rig.publish(b"n", "x")
    rig.publish(b"other", "abcd")
    assert rig.matched(entry) == len(found)
    rig.publish(b"n", "abcd")
    assert rig.matched(entry) == 4
    assert rig.line._ends == {(b"n", int(entry.blocks[-1])): {entry.request.id}}
    rig.line.remove(entry)
    assert not rig.line._ends


def test_who_waits_for_blocks_that_go_is_told_when_they_come_again(rig: Line):
    blocks = rig.publish(b"n", "abcd")
    entry = rig.wait("abcd")
    rig.store.unpublish(int(blocks[2]))
    assert rig.matched(entry) == 2
    assert (rig.store.device.wanted(blocks)).tolist() == [True, True, False, False]
    rig.publish(b"n", "abc")
    assert rig.matched(entry) == 3


@pytest.mark.parametrize("namespace", [b"n", b"other"])
@pytest.mark.parametrize("found", ["", "ab"])
def test_what_a_running_request_computes_is_waited_for_in_its_namespace_alone(
    rig: Line, namespace: bytes, found: str
):
    for space in (b"n", b"other"):
        rig.publish(space, found)
    ticket = rig.run("abcdx", rig.publish(b"n", found))
    entry = rig.wait("abcdef", namespace)
    shared = (4 - len(found)) * BLOCK_TOKENS if namespace == b"n" else 0
    assert rig.shared(entry) == shared
    rig.line.computes_no_more(ticket)
    assert rig.shared(entry) == 0


def test_of_two_that_compute_the_same_the_first_is_waited_for(rig: Line):
    """The other one ends, and is not."""
    first, second = (rig.run(path, EMPTY_IDS) for path in ("abx", "aby"))
    entry = rig.wait("abyz")
    assert rig.shared(entry) == 2 * BLOCK_TOKENS
    rig.line.computes_no_more(second)
    assert rig.shared(entry) == 2 * BLOCK_TOKENS
    rig.line.computes_no_more(first)
    assert rig.shared(entry) == 0


def test_what_is_not_saved_or_not_to_be_read_is_not_waited_for(rig: Line):
    rig.run("ab", EMPTY_IDS, no_save=True)
    assert rig.shared(rig.wait("abc")) == 0
    rig.run("xy", EMPTY_IDS)
    assert rig.shared(rig.wait("xyz")) == 2 * BLOCK_TOKENS
    assert rig.shared(rig.wait("xyz", no_cache=True)) == 0


def test_who_is_not_to_read_the_cache_matches_nothing(rig: Line):
    path = rig.publish(b"n", "ab")
    entry = rig.wait("abc", no_cache=True)
    rig.publish(b"n", "abc")
    assert rig.matched(entry) == 0
    assert not rig.store.device.wanted(path).any()


def test_the_last_token_is_computed_whatever_is_cached(rig: Line):
    rig.publish(b"n", "abc")
    whole = rig.request(b"n", "abc")
    assert rig.line.add(replace(whole, tokens=3 * BLOCK_TOKENS)).length == 2
    assert rig.line.add(replace(whole, id=9)).length == 3
    copies_the_last = WaitingLine(rig.store, BLOCK_TOKENS, last_too=True)
    assert copies_the_last.add(replace(whole, tokens=3 * BLOCK_TOKENS)).length == 3


def test_counts_follow_what_moves_between_tiers(rig: Line):
    path = rig.publish(b"n", "abcd")
    entry = rig.wait("abcd")
    assert (entry.here, entry.to_load, entry.behind, entry.kept) == (4, 0, 0, 0)
    rig.move_to_host(path)
    rig.line.refresh(entry)
    assert (entry.here, entry.to_load, entry.behind, entry.kept) == (0, 4, 0, 0)
    loads = rig.store.start_load(2, path[1:2], protected=False)
    assert loads is not None
    rig.line.refresh(entry)
    assert (entry.here, entry.to_load, entry.behind) == (1, 3, 1)


def test_a_lease_ends_with_the_block_that_it_is_on(rig: Line):
    """And those on all that builds on it."""
    path = rig.publish(b"n", "abcd")
    entry = rig.wait("abcd")
    rig.cover(entry, 3)
    rig.store.unpublish(int(path[1]))
    assert rig.matched(entry) == 1
    assert (entry.covered, len(entry.origins)) == (1, 1)
    assert rig.store.device.leases(path).tolist() == [1, 0, 0, 0]
    assert rig.store.device.prefetch_leased == 1
    rig.line.uncover(entry, 0)
    assert not rig.store.device.leases(path).any()
    assert (entry.covered, entry.here) == (0, 1)


def test_what_others_keep_takes_no_slot(rig: Line):
    path = rig.publish(b"n", "abcdef")
    entry = rig.wait("abcdef")
    rig.cover(entry, 1)
    assert rig.line.held(entry) == 1
    rig.store.touch(path[:3], LeaseKind.HARD)
    assert rig.line.held(entry) == 3
    rig.line.count(entry)
    assert (entry.here, entry.kept) == (5, 2)


def test_the_line_is_in_order_and_hints_stand_behind_all_that_wait(rig: Line):
    hint = replace(rig.request(b"n", "a"), hint=Hint(0.0, 1.0), priority=-5, arrival_s=0.0)
    rig.line.add(hint)
    late, early, first = (rig.request(b"n", "a") for _ in range(3))
    for each in (replace(late, arrival_s=9.0), early, replace(first, priority=-1, arrival_s=9.0)):
        rig.line.add(each)
    assert [entry.request.id for entry in rig.line] == [first.id, early.id, late.id, hint.id]
    rig.line.remove(rig.line[early.id])
    assert [entry.request.id for entry in rig.line] == [first.id, late.id, hint.id]


class Reach:
    """A match ends where it was said, and needs `others` there."""

    def __init__(self, rig: Line, others: Ids = EMPTY_IDS) -> None:
        self.ends: set[int] = set()
        self.others = others
        rig.line.reach = self

    def __call__(self, path: Ids) -> tuple[int, Ids]:
        for place in reversed(range(len(path))):
            if int(path[place]) in self.ends:
                return place + 1, self.others
        return 0, EMPTY_IDS


def test_blocks_beside_the_path_are_none_that_a_running_request_computes(rig: Line):
    reach = Reach(rig, rig.publish(b"n/1", "wxy"))
    path = rig.publish(b"n", "ab")
    reach.ends.add(int(path[-1]))
    rig.run("abcde", path)
    entry = rig.wait("abcdefgh")
    assert (entry.length, entry.beside) == (2, 3)
    assert rig.shared(entry) == 3 * BLOCK_TOKENS


@pytest.mark.parametrize("behind", ["kept", "computed again"])
def test_who_waits_hears_of_an_end_behind_its_match(rig: Line, behind: str):
    """Also where what lay there when it came was given up since: nobody kept that for it."""
    reach = Reach(rig)
    path = rig.publish(b"n", "abcd")
    reach.ends.add(int(path[1]))
    entry, apart, elsewhere = rig.wait("abcdef"), rig.wait("abcx"), rig.wait("abcdef", b"other")
    assert (entry.length, apart.length, elsewhere.length) == (2, 2, 0)
    assert rig.store.device.wanted(path).tolist() == [True, True, False, False]
    if behind == "computed again":
        rig.store.unpublish(int(path[2]))
        path = rig.publish(b"n", "abcd")
    reach.ends.add(int(path[3]))
    rig.line.reached(b"n", keys_of("abcd"))
    # What is published again behind their match is news by itself.
    assert [each.extended for each in (apart, elsewhere)] == [behind != "kept", False]
    assert [rig.matched(each) for each in (entry, apart, elsewhere)] == [4, 2, 0]


def test_blocks_beside_the_path_are_kept_for_who_waits(rig: Line):
    others = rig.publish(b"n/1", "wxy")
    reach = Reach(rig, others)
    reach.ends.add(int(rig.publish(b"n", "ab")[-1]))
    entry = rig.wait("abc")
    assert rig.store.device.wanted(others).all()
    rig.line.remove(entry)
    assert not rig.store.device.wanted(others).any()
