"""The queue, and what each request in it finds in the cache: kept by events, not by scans.

A request matches when it arrives. It matches again only when a block was published right behind its
match, or when a block that some waiting request wants was removed; its counts are taken again only
when such a block moved between tiers.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from operator import attrgetter

import numpy as np

from forebay._native import count_true
from forebay.core.arrays import Ids
from forebay.core.device_pool import LeaseKind
from forebay.core.requests import Request, Ticket, Waiting
from forebay.core.store import Store
from forebay.errors import ProtocolError

_Place = tuple[bytes, int]
_order = attrgetter("order")


class WaitingLine:
    """Waiting requests in order; protects what they want; knows who computes what they lack.

    The last token of each is computed, and so is its block but with `last_too`: whoever starts it
    copies the others of that block. So are the last `dropped` blocks of its match, if there are
    any, with `last_too` or not: by them whoever starts it finds that those before are right.
    """

    def __init__(
        self, store: Store, block_tokens: int, *, last_too: bool = False, dropped: int = 0
    ) -> None:
        self.last_too = last_too and not dropped
        self.dropped = dropped
        self._computed_tokens = 0 if self.last_too else 1
        self._store = store
        self._block_tokens = block_tokens
        self._key_bytes = store.key_bytes
        self._line: list[Waiting] = []
        self._by_id: dict[int, Waiting] = {}
        self._ends: dict[_Place, set[int]] = {}
        self._computing: dict[tuple[bytes, int, bytes], Ticket] = {}
        self._computing_key: dict[int, tuple[bytes, int, bytes]] = {}
        self.reach: Callable[[Ids], tuple[int, Ids]] | None = None
        """Where blocks of a path are of no use alone: how many of its blocks are a match, and which
        others that needs. None: all are, and none."""

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._line)

    def __contains__(self, request: int) -> bool:
        return request in self._by_id

    def __getitem__(self, request: int) -> Waiting:
        entry = self._by_id.get(request)
        if entry is None:
            raise ProtocolError(f"request {request} does not wait: enqueue it, and admit it once")
        return entry

    def get(self, request: int) -> Waiting | None:
        """The waiting request of that id, if it waits."""
        return self._by_id.get(request)

    def head(self, count: int) -> list[Waiting]:
        """The first `count` in order."""
        return self._line[:count]

    def add(self, request: Request) -> Waiting:
        """Put a request in its place and match it: from now on what it wants is protected."""
        known = request.tokens - self._computed_tokens
        usable = 0 if request.no_cache else known // self._block_tokens
        entry = Waiting(request, usable, session=request.session)
        bisect.insort(self._line, entry, key=_order)
        self._by_id[request.id] = entry
        self.refresh(entry)
        return entry

    def remove(self, entry: Waiting) -> None:
        """Take a request out: nothing of its path is protected for it any more."""
        self._store.device.unprotect(entry.blocks)
        self._forget_end(entry)
        del self._by_id[entry.request.id]
        place = bisect.bisect_left(self._line, entry.order, key=_order)
        del self._line[place]

    def refresh(self, entry: Waiting) -> None:
        """Bring `entry` up to date: its match, its counts, what it protects and leases."""
        store = self._store
        if entry.extended or entry.lost_epoch != store.lost_epoch:
            self._match(entry)
        elif entry.moved_epoch == store.moved_epoch:
            return
        self.count(entry)

    def count(self, entry: Waiting) -> None:
        """Take the counts of what lies behind its covered blocks anew."""
        entry.moved_epoch = self._store.moved_epoch
        ahead = entry.blocks[entry.covered : entry.loadable]
        entry.here, leading, entry.kept = self._store.device.along(ahead)
        entry.to_load = len(ahead) - entry.here
        entry.behind = entry.here - leading

    def held(self, entry: Waiting) -> int:
        """Blocks that it covers, or that others keep on the device: they take no slot."""
        ahead = entry.blocks[entry.covered : entry.loadable]
        others = (self._store.device.leases(ahead) > 0) & self._store.resident(ahead)
        return entry.covered + int(np.count_nonzero(others))

    def uncover(self, entry: Waiting, keep: int) -> None:
        """End its lease on all covered blocks but the first `keep`."""
        if keep < entry.covered:
            self._store.release(entry.blocks[keep : entry.covered], LeaseKind.PREFETCH)
            _cut(entry, keep)
            entry.waits = self._store.loads_of(entry.blocks[:keep])
            self.count(entry)

    def published(self, namespace: bytes, parent: int) -> None:
        """Blocks were published under `parent` (-1: the root): who ended there matches again."""
        for request in self._ends.get((namespace, parent), ()):
            self._by_id[request].extended = True

    def reached(self, namespace: bytes, keys: bytes) -> None:
        """A match may reach up to the end of the path `keys` now, by `reach`: whose own begins with
        it matches again.
        """
        for entry in self._line:
            request = entry.request
            if request.namespace == namespace and request.keys.startswith(keys):
                entry.extended = True

    # -- who computes what ---------------------------------------------------------------------

    def computes(self, ticket: Ticket) -> None:
        """`ticket` computes the block behind its published ones, if its prompt has one there."""
        self.computes_no_more(ticket)
        start = ticket.published * self._key_bytes
        key = ticket.request.keys[start : start + self._key_bytes]
        if len(key) == self._key_bytes and not ticket.request.no_save:
            place = (ticket.request.namespace, ticket.parent, key)
            if self._computing.setdefault(place, ticket) is ticket:
                self._computing_key[ticket.request.id] = place

    def computes_no_more(self, ticket: Ticket) -> None:
        """`ticket` ended, or went on: whoever waits for it looks again."""
        place = self._computing_key.pop(ticket.request.id, None)
        if place is not None:
            del self._computing[place]

    def shared_with_running(self, entry: Waiting, tokens: int) -> bool:
        """Whether a running request computes more than so many `tokens` behind the match of
        `entry`.
        """
        first, size = entry.length, self._key_bytes
        last = first + tokens // self._block_tokens + 1
        if last > entry.usable or entry.end is None:
            return False
        keys = entry.request.keys[first * size : last * size]
        ticket = self._computing.get((*entry.end, keys[:size]))
        return ticket is not None and ticket.request.keys[first * size : last * size] == keys

    def _match(self, entry: Waiting) -> None:
        store = self._store
        request = entry.request
        wanted = request.keys[: entry.usable * self._key_bytes]
        match = store.match(request.namespace, wanted, entry.session)
        old, new = entry.blocks, match.ids
        if self.reach is not None:
            # Of blocks behind the match nothing is kept, and none protected: whoever makes an end
            # behind it computes them again, and then says so (`reached`).
            length, others = self.reach(new)
            new, entry.beside = np.concatenate([new[:length], others]), len(others)
        entry.extended, entry.lost_epoch = False, store.lost_epoch
        entry.session = match.session
        if len(old) != len(new) or not np.array_equal(old, new):
            self._rebase(entry, _common(old, new), new)
        elif entry.end is None:
            self._note_end(entry)

    def _rebase(self, entry: Waiting, common: int, new: Ids) -> None:
        """Its match is now `new`, of which the first `common` blocks are as before."""
        store = self._store
        if common < entry.covered:
            store.release(entry.blocks[common : entry.covered], LeaseKind.PREFETCH)
            _cut(entry, common)
        if len(entry.blocks):
            store.device.unprotect(entry.blocks)
        store.device.protect(new)
        entry.blocks = new
        entry.waits = store.loads_of(new[: entry.covered])
        self._note_end(entry)

    def _note_end(self, entry: Waiting) -> None:
        """What is published right behind its match is news to `entry`."""
        self._forget_end(entry)
        last = int(entry.blocks[entry.length - 1]) if entry.length else -1
        entry.end = (entry.request.namespace, last)
        self._ends.setdefault(entry.end, set()).add(entry.request.id)

    def _forget_end(self, entry: Waiting) -> None:
        if entry.end is None:
            return
        there = self._ends[entry.end]
        there.discard(entry.request.id)
        if not there:
            del self._ends[entry.end]


def _cut(entry: Waiting, keep: int) -> None:
    entry.covered = keep
    entry.origins = entry.origins[:keep]
    entry.loaded = count_true(entry.origins)


def _common(old: Ids, new: Ids) -> int:
    length = min(len(old), len(new))
    differ = np.flatnonzero(old[:length] != new[:length])
    return int(differ[0]) if len(differ) else length
