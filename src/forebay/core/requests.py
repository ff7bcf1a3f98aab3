"""What a cache is asked for, and what it gives: requests, tickets, and why not yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from forebay.core.arrays import EMPTY_IDS, Ids
from forebay.core.directory import Session
from forebay.core.ledger import MissReason, Source


@dataclass(frozen=True, slots=True)
class Hint:
    """Word that a request which begins like this one comes at about `eta_s`.

    What it brings is kept for that request until `expires_s`. Both in the caller's clock.
    """

    eta_s: float
    expires_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request as the cache sees it.

    `keys` are the block keys of all whole blocks of its `tokens` known tokens, one after the other,
    `max_answer_tokens` what it may still add. Smaller `priority` goes first, then earlier arrival.
    `session` is that of the ticket of the conversation's last turn: its match goes on from there.
    With a `hint` it is only word of another request, and starts nothing: whoever waits comes first.
    """

    id: int
    namespace: bytes
    keys: bytes
    tokens: int
    max_answer_tokens: int
    arrival_s: float
    priority: int = 0
    no_cache: bool = False
    no_save: bool = False
    session: Session | None = None
    hint: Hint | None = None


class NotYet(StrEnum):
    """Why a request cannot start now. It takes no run slot and no token budget meanwhile."""

    LOADING = "loading"
    COMPUTING = "computing"  # another request computes the same prefix
    FULL = "full"  # the pool has no room that it may take
    NEVER = "never"  # slots were taken out of use, and the rest cannot hold it


class Growth(StrEnum):
    """Whether a running request got the slots it needs."""

    GROWN = "grown"
    LATER = "later"  # slots come free when copies in flight end
    FULL = "full"  # only giving up a running request makes room


@dataclass(slots=True)
class Ticket:
    """An admitted request: its block table, and what must be in place before its first step.

    `slots[i]` is the device slot of its tokens `i * block_tokens` onwards. `waits` are issued
    transfers that a stream waits for before the first step that reads them.
    """

    request: Request
    generation: int
    """Tells it from other tickets of the same request."""
    cached_tokens: int
    sources: dict[Source, int]
    misses: dict[MissReason, int]
    """Whole blocks of its prompt, by where they came from, and by why they are computed."""
    waits: set[int]
    prefetched_blocks: int = 0
    """Blocks that it read and that look-ahead had brought."""
    load_wait_s: float = 0.0
    """How long it waited for loads after its turn had come, up to here."""
    loaded: Ids = field(default_factory=lambda: EMPTY_IDS)
    """Those of its cached blocks that came from the host tier."""
    lost: bool = False
    """A block it reads never arrived: preempt it, so that it is computed."""
    orphaned: bool = False
    """What it builds on left the directory: its blocks are not published."""
    band_of_layer: tuple[int, ...] = ()
    """Where it starts by layer, until that step is launched: for each layer the band of its loads
    that the layer reads. They need not be issued before the step is; each layer waits for its own.
    """
    bands_waited: int = 0
    """Leading bands that its stream waits for."""
    launched_tokens: int = 0
    """Tokens that were cached, or that launched steps compute."""
    published: int = 0
    """Its blocks, from the first, that are published."""
    session: Session | None = None
    """Where the match of its path ended."""
    parent: int = -1
    """The canonical block under which its next block is published; -1 at the root."""
    _blocks: Ids = field(default_factory=lambda: EMPTY_IDS)
    _slots: Ids = field(default_factory=lambda: EMPTY_IDS)
    _count: int = 0

    @property
    def blocks(self) -> Ids:
        """Its blocks, root first: a view, valid until the ticket grows."""
        return self._blocks[: self._count]

    @property
    def slots(self) -> Ids:
        """The device slots of its blocks: a view, valid until the ticket grows."""
        return self._slots[: self._count]

    def extend(self, blocks: Ids, slots: Ids) -> None:
        """Append blocks and their slots to the table."""
        if not len(blocks):
            return
        end = self._count + len(blocks)
        if end > len(self._blocks):
            spare = np.zeros(max(end - len(self._blocks), len(self._blocks), 16), np.int32)
            self._blocks = np.concatenate([self._blocks, spare])
            self._slots = np.concatenate([self._slots, spare])
        self._blocks[self._count : end] = blocks
        self._slots[self._count : end] = slots
        self._count = end

    def replace(self, position: int, block: int, slot: int) -> None:
        """Point the table at another block with the same content."""
        self._blocks[position] = block
        self._slots[position] = slot


@dataclass(slots=True)
class Waiting:
    """A waiting request: what it matched, and how much of that is leased and on its way. Counts are
    blocks, times are the caller's clock, in seconds.
    """

    request: Request
    usable: int
    """Blocks that may count as cached."""
    blocks: Ids = field(default_factory=lambda: EMPTY_IDS)
    """Its match, root first; behind it what else that needs."""
    beside: int = 0
    """How many of `blocks` are no part of the path, but needed where its match ends."""
    end: tuple[bytes, int] | None = None
    """Namespace and last block of the path that it matched, -1 without any; None: not yet."""
    session: Session | None = None
    covered: int = 0
    """Those of its match, from the first, that are under its prefetch lease."""
    waits: set[int] = field(default_factory=set[int])
    """Transfers, some of them ended, that fill what it covers."""
    origins: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """For each covered block, whether it came from the host tier."""
    loaded: int = 0
    """How many of `origins` did."""
    limit: int | None = None
    """Blocks to load at most: what lies behind is recomputed, for `limit_reason`."""
    limit_reason: MissReason = MissReason.ABSENT
    had: int = 0
    """Blocks that it matched before a failed load took some of them out of the directory."""
    brought: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Serials of blocks that a load of its own, which lost others, has brought to the device."""
    turn_s: float | None = None
    """When its turn came: from then on look-ahead leaves it alone."""
    demanded_s: float | None = None
    """Since when it waits for nothing but loads."""
    refused: bool = False
    """Look-ahead found no room for it, and nothing counts that yet."""
    here: int = 0
    """Behind what it covers: those that have a device slot, filled or being filled."""
    kept: int = 0
    """Those of `here` that others leased when they were counted."""
    to_load: int = 0
    """Behind what it covers: those that only host memory has."""
    behind: int = 0
    """Those of `here` that mean nothing without what is to be loaded before them."""
    lost_epoch: int = -1
    moved_epoch: int = -1
    """The store's, when it last matched and when its counts were last taken."""
    extended: bool = True
    """Something was published right behind its match, or it never matched."""
    order: tuple[bool, int, float, int] = field(init=False)
    """The queue is sorted by this: hints behind all that wait."""

    def __post_init__(self) -> None:
        request = self.request
        self.order = (request.hint is not None, request.priority, request.arrival_s, request.id)

    @property
    def length(self) -> int:
        """Blocks of its path that it matched."""
        return len(self.blocks) - self.beside

    @property
    def loadable(self) -> int:
        """Blocks of its match that may be covered."""
        return len(self.blocks) if self.limit is None else min(self.limit, len(self.blocks))
