"""What a cache shows of itself while it runs: looks that change nothing and cost little."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from forebay.core.arrays import Ids
from forebay.core.flights import Flights
from forebay.core.requests import Waiting
from forebay.core.slots import SlotState
from forebay.core.store import Store
from forebay.core.waiting import WaitingLine

# Blocks of a node that are looked at to say where it lies.
_SAMPLE = 16
_DEVICE, _BOTH, _LOADING, _HOST, _PLACES = range(5)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Slots of the pools. Idle ones hold blocks that nobody uses now; the rest of the device's
    that are not free are in use, `device_prefetched` of them for requests that still wait. The
    states say what is in the slots.
    """

    device_slots: int
    device_free: int
    device_idle: int
    device_prefetched: int
    host_slots: int
    host_free: int
    device_states: Mapping[SlotState, int]
    host_states: Mapping[SlotState, int]


@dataclass(frozen=True, slots=True)
class InLine:
    """A waiting request, as it was last matched: `found` of its blocks are cached somewhere.

    `covered` of those are leased on the device, in place or on their way; `flying` says that copies
    of them are under way.
    """

    id: int
    found: int
    covered: int
    flying: bool


@dataclass(frozen=True, slots=True)
class Tree:
    """The directory's tree, or the largest part of it: `n` nodes, parents before children.

    `parent` [n] is an index, -1 for the first node of a path; `blocks` [n] are a node's own, and
    `shares` [n, 4] of them lie on the device only, on the device and in host memory, on their way
    to the device, and in host memory only. `weight` [n] counts a node's own blocks and all below
    it; where `exact` is false, weights and shares are estimated from a sample. `total` counts the
    blocks of the whole.
    """

    parent: Ids
    blocks: Ids
    weight: Ids
    shares: NDArray[np.float64]
    total: int
    exact: bool


class CacheView:
    """Looks into one cache, for the thread that owns it."""

    def __init__(self, store: Store, line: WaitingLine, flights: Flights) -> None:
        self._store = store
        self._line = line
        self._flights = flights

    def occupancy(self) -> Occupancy:
        """What is in the pools now."""
        device, host = self._store.device, self._store.host.tier
        return Occupancy(
            device_slots=device.slots,
            device_free=device.free,
            device_idle=device.obtainable(protected=True) - device.free,
            device_prefetched=device.prefetch_leased,
            host_slots=host.count,
            host_free=host.free,
            device_states=device.counts(),
            host_states=host.counts(),
        )

    def line(self, most: int, among: Container[int] | None = None) -> list[InLine]:
        """The first `most` waiting requests, in order, of all or of those `among` the given."""
        line = (e for e in self._line if among is None or e.request.id in among)
        return [self._in_line(entry) for entry in islice(line, most)]

    def tree(self, namespaces: Sequence[bytes] | None, most_nodes: int) -> Tree:
        """The trees of `namespaces`, or of all, with at most `most_nodes` nodes."""
        store = self._store
        outline = store.directory.outline(
            namespaces, store.max_blocks, most_runs=most_nodes, most_samples=_SAMPLE
        )
        blocks, count = outline.samples, len(outline.parents)
        loading, resident = store.loading(blocks), store.resident(blocks)
        where = np.select(
            [loading, resident & store.host.valid(blocks), resident],
            [_LOADING, _BOTH, _DEVICE],
            _HOST,
        )
        node = np.repeat(np.arange(count), outline.counts)
        found = np.bincount(node * _PLACES + where, minlength=count * _PLACES)
        shares = found.reshape(count, _PLACES) / np.maximum(1, outline.counts)[:, None]
        return Tree(
            outline.parents, outline.blocks, outline.weights, shares, outline.total, outline.exact
        )

    def _in_line(self, entry: Waiting) -> InLine:
        return InLine(
            id=entry.request.id,
            found=len(entry.blocks),
            covered=entry.covered,
            flying=bool(self._flights.flying(entry.waits)),
        )
