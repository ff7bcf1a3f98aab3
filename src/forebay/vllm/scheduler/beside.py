"""Blocks beside the path: those of a model's other groups, and where prompts may be found to end.

Of these groups a hit needs the last blocks before its end, or all, and of a long prompt most of
their blocks are never asked for again. So they are known, and saved, only at *ends*: where the
prompt ends, where the request does, and how far its path was known when it began. There a second
request with the same beginning leaves the first, and the next one will where others did. A hit is
found at ends alone, and at one of which all is there.

Each of these blocks is a path of its own, in a namespace of its group: its hash says all that comes
before it, and it may be given up alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forebay._native import FlagColumn
from forebay.cache.parts import Parts
from forebay.cache.saves import Saves
from forebay.core.arrays import EMPTY_IDS, Ids
from forebay.core.device_pool import LeaseKind
from forebay.errors import ProtocolError
from forebay.vllm.adapter import BlockPool, cached_blocks, lora_of
from forebay.vllm.groups import Group, Groups
from forebay.vllm.scheduler.pool import VllmDevicePool
from forebay.vllm.scheduler.records import Record
from forebay.vllm.seen.events import HostEvents

_End = tuple[Ids, NDArray[np.int64]]
"""Blocks and their serials: the last one of the path, and behind it those beside the path."""


class Beside:
    """Knows the blocks of `groups` beside the path, in `pool`, and the ends of paths.

    An end is kept by the last block of its path; memory is bounded by the blocks that there are.
    """

    def __init__(
        self,
        groups: Groups,
        parts: Parts,
        pool: BlockPool,
        device: VllmDevicePool,
        saves: Saves,
        events: HostEvents | None,
    ) -> None:
        self._groups = groups
        self._settings = parts.settings
        self._store = parts.store
        self._line = parts.line
        self._pool = pool
        self._device = device
        self._saves = saves
        self._events = events
        self._is_end = FlagColumn(parts.store.max_blocks)
        self._ends: dict[int, _End] = {}
        parts.line.reach = self.reach

    def reach(self, path: Ids) -> tuple[int, Ids]:
        """How many blocks of `path` (root first) are a match, and which others that needs."""
        for place in np.flatnonzero(self._is_end.take(path))[::-1].tolist():
            others = self._others(int(path[place]))
            if others is not None:
                return place + 1, others
        return 0, EMPTY_IDS

    def began(self, record: Record, found: int) -> None:
        """A request is named for the first time since it started, and `found` blocks of its path
        were known before.
        """
        size, request = self._settings.block_tokens, record.request
        ends = {(request.num_prompt_tokens - 1) // size, found}
        record.ends = sorted(ends - {0}, reverse=True)

    def passed(self, namespace: bytes, record: Record, path: Ids) -> None:
        """All of `path` (root first), of the table of `record`, is computed, or is by the newest
        step: its ends up to there are known from now on.
        """
        while record.ends and record.ends[-1] <= len(path):
            end = record.ends.pop()
            self._make_end(namespace, record, path[:end])

    def ended(self, namespace: bytes, record: Record, path: Ids) -> None:
        """The request ends, and `path` is what it leaves."""
        if len(path):
            self._make_end(namespace, record, path)

    # -- inside ----------------------------------------------------------------------------------

    def _others(self, last: int) -> Ids | None:
        """The blocks that a hit needs beside the path which ends with block `last`, where all of
        them can be matched; else it is no end any more.
        """
        store, end = self._store, self._ends.get(last)
        if end is not None:
            blocks, serials = end
            there = (store.serials(blocks) == serials) & store.published(blocks)
            if there.all():
                return blocks[1:]
            del self._ends[last]
        self._is_end.put(np.array([last], np.int32), False)
        return None

    def _make_end(self, namespace: bytes, record: Record, path: Ids) -> None:
        """`path` ends where a hit may: note its last block, with the others that one needs there.
        Changes nothing where one of those is nowhere.
        """
        if len(path) * self._settings.block_tokens < self._settings.min_save_tokens:
            return
        others = self._others(int(path[-1]))
        if others is not None and self._store.resident(others).all():
            return
        found: list[tuple[Group, tuple[Ids, Ids]]] = []
        for group in self._groups.beside:
            there = self._find(namespace, group, record, len(path))
            if there is None:
                return
            found.append((group, there))
        parts, new = [path[-1:]], list[Ids]()
        for group, (ours, slots) in found:
            lacking = ours < 0
            parts.append(self._take_in(namespace, group, record, len(path), ours, slots))
            new.append(parts[-1][lacking])
        # Of all groups together: each save costs its own work.
        self._saves.again(np.concatenate(new))
        blocks = np.concatenate(parts)
        self._is_end.put(path[-1:], True)
        self._ends[int(path[-1])] = (blocks, self._store.serials(blocks))
        self._line.reached(namespace, record.keys()[: len(path) * self._store.key_bytes])

    def _find(
        self, namespace: bytes, group: Group, record: Record, end: int
    ) -> tuple[Ids, Ids] | None:
        """The blocks of `group` that a hit needs at `end`: ours, and the slots in which vLLM has
        them, -1 where there is none. None if one of them is nowhere.
        """
        first, store = group.first(end), self._store
        hashes = record.request.block_hashes
        keys = b"".join(hashes[first:end])
        ours = store.directory.match_each(_space(namespace, group), keys).copy()
        slots = np.full(len(ours), -1, np.int32)
        known = np.flatnonzero(ours >= 0)
        slots[known] = store.device.slot_of(ours[known])
        lacking = np.flatnonzero(slots < 0)
        theirs = cached_blocks(self._pool, _some(hashes, first, lacking), group.number)
        slots[lacking] = [-1 if each is None else each.block_id for each in theirs]
        return None if ((ours < 0) & (slots < 0)).any() else (ours, slots)

    def _take_in(
        self, namespace: bytes, group: Group, record: Record, end: int, ours: Ids, slots: Ids
    ) -> Ids:
        """Have all blocks of `group` that a hit needs at `end` in the store, as `_find` found them.
        Returns them.
        """
        first, hashes = group.first(end), record.request.block_hashes
        store, known = self._store, np.flatnonzero(ours >= 0)
        again = known[(store.device.slot_of(ours[known]) < 0) & (slots[known] >= 0)]
        if len(again):
            # Host memory alone had them, and vLLM computed them once more.
            self._device.offer(slots[again], _some(hashes, first, again), group.number)
            store.turned_up(ours[again])
            store.wrote(ours[again], store.newest_step)
        new = np.flatnonzero(ours < 0)
        if not len(new):
            return ours
        contents = _some(hashes, first, new)
        self._device.offer(slots[new], contents, group.number)
        blocks = store.compute(len(new), protected=False)
        if blocks is None:
            raise ProtocolError("vLLM's own blocks found no place in the books")
        store.wrote(blocks, store.newest_step)
        store.publish_each(_space(namespace, group), b"".join(contents), blocks)
        store.release(blocks, LeaseKind.HARD)
        self._tell(group, record, (first + new).tolist(), blocks)
        ours[new] = blocks
        return ours

    def _tell(self, group: Group, record: Record, places: list[int], blocks: Ids) -> None:
        """What is in `blocks`, which are at these places of the prompt."""
        if self._events is None:
            return
        size, request = self._settings.block_tokens, record.request
        for block, place in zip(blocks, places, strict=True):
            self._events.named_beside(
                int(block),
                request.block_hashes[place - 1] if place else None,
                request.all_token_ids[place * size : (place + 1) * size],
                lora_of(request),
                group.number,
            )


def _some(hashes: list[bytes], first: int, places: NDArray[np.intp]) -> list[bytes]:
    """The hashes of blocks at `places`, which count from place `first`."""
    counted: list[int] = places.tolist()
    return [hashes[first + place] for place in counted]


def _space(namespace: bytes, group: Group) -> bytes:
    """The namespace of a group's blocks, each of which is a path."""
    return namespace + b"/%d" % group.number
