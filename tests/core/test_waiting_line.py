"""What requests in line match, and what they hear of later."""

from __future__ import annotations

import numpy as np
import pytest

from forebay.core.arrays import EMPTY_IDS, Ids
from forebay.core.device_pool import LeaseKind
from forebay.core.requests import Request, Ticket, Waiting
from forebay.core.store import Store
from forebay.core.waiting import WaitingLine

KEY_BYTES, BLOCK_TOKENS = 8, 4


class Line:
    """A line of requests over a store of 16 device slots, of which all blocks are unsaved."""

    def __init__(self) -> None:
        self.store = Store(KEY_BYTES, 16, 0)
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
