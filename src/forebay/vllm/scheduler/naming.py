"""Blocks that vLLM computed become known: each gets its place in the directory, and is saved."""

from __future__ import annotations

import numpy as np

from forebay.cache.parts import Parts
from forebay.cache.saves import Saves
from forebay.core.arrays import EMPTY_IDS, Ids
from forebay.core.device_pool import LeaseKind
from forebay.errors import ProtocolError
from forebay.vllm.adapter import BlockPool, hash_of, lora_of
from forebay.vllm.groups import Groups
from forebay.vllm.scheduler.beside import Beside
from forebay.vllm.scheduler.pool import VllmDevicePool
from forebay.vllm.scheduler.records import Record
from forebay.vllm.seen.events import HostEvents


class Naming:
    """Puts blocks of `pool` into `store`, of `block_tokens` tokens each.

    `events`, if anybody wants them, are told what is in each. `groups` are those of the model.
    """

    def __init__(
        self,
        parts: Parts,
        pool: BlockPool,
        device: VllmDevicePool,
        saves: Saves,
        events: HostEvents | None,
        groups: Groups,
    ) -> None:
        self._block_tokens = parts.settings.block_tokens
        self._switch = parts.switch
        self._store = parts.store
        self._line = parts.line
        self._pool = pool
        self._device = device
        self._saves = saves
        self._events = events
        self._beside: Beside | None = None
        if groups.beside:
            self._beside = Beside(groups, parts, pool, device, saves, events)
        # The slots of blocks that a request had found where they are known to be, in two forms.
        self._found: tuple[bytes, list[int]] = (b"", [])

    def name(self, namespace: bytes, record: Record, tokens: int) -> None:
        """The first `tokens` of a request are computed, or are by the newest step: its full blocks
        go to the directory, and are saved.
        """
        hashes = record.request.block_hashes
        whole = min(tokens // self._block_tokens, len(hashes), len(record.table))
        if whole <= record.named or not self._saves_of(record):
            return
        # vLLM names a block when it knows all its tokens, at times a step after it was filled.
        blocks = self._pool.blocks
        while whole > record.named and (
            hash_of(blocks[record.table[whole - 1]]) != hashes[whole - 1]
        ):
            whole -= 1
        keys = record.keys()
        match = self._store.match(namespace, keys, record.session)
        found, record.session = match.ids[:whole], match.session
        if self._beside is not None and not record.named:
            self._beside.began(record, len(match.ids))
        self._turn_up(record, found)
        if len(found) < whole:
            self._add(namespace, record, keys, found, whole)
        record.named = whole
        if self._beside is not None and record.ends and record.ends[-1] <= whole:
            self._beside.passed(namespace, record, self.path(namespace, record))

    def end(self, namespace: bytes, record: Record) -> None:
        """A request ends here, or is preempted: later ones may be found to begin like it."""
        if self._beside is not None and record.named and self._saves_of(record):
            self._beside.ended(namespace, record, self.path(namespace, record))

    def _saves_of(self, record: Record) -> bool:
        return not record.wishes.no_save and self._switch.policy.host_tier

    def left(self, namespace: bytes, record: Record) -> tuple[Ids, Ids]:
        """The blocks of a request that ended which a hit finds: those of its path, root first, and
        others that it needs.
        """
        path = self.path(namespace, record)
        if self._beside is None:
            return path, EMPTY_IDS
        length, others = self._beside.reach(path)
        return path[:length], others

    def path(self, namespace: bytes, record: Record) -> Ids:
        """The blocks of a request's table that are in the directory, root first."""
        return self._store.match(namespace, record.keys(), record.session).ids[: record.named]

    def _turn_up(self, record: Record, found: Ids) -> None:
        """Of blocks that only host memory had, `record` computed some again; of others that are on
        the device it may have computed a second copy.
        """
        first = min(record.named, len(found))
        found = found[first:]
        if not len(found):
            return
        computed = record.table[first : first + len(found)]
        slots = self._device.slot_of(found)
        # Of requests on one prefix this is the same.
        place = slots.tobytes()
        if place == self._found[0] and computed == self._found[1]:
            return
        if slots.tolist() == computed:
            self._found = place, computed
            return
        table = np.array(computed, np.int32)
        self._device.note_twins(found[(slots >= 0) & (slots != table)])
        again = np.flatnonzero(slots < 0)
        if len(again):
            hashes = record.request.block_hashes
            self._device.offer(table[again], [hashes[first + place] for place in again.tolist()])
            self._store.turned_up(found[again])
            self._store.wrote(found[again], self._store.newest_step)

    def _add(self, namespace: bytes, record: Record, keys: bytes, found: Ids, whole: int) -> None:
        """Blocks `len(found)` up to `whole` of its table are new."""
        store, first = self._store, len(found)
        parent = int(found[-1]) if first else -1
        slots = np.array(record.table[first:whole], np.int32)
        self._device.offer(slots, record.request.block_hashes[first:whole])
        blocks = store.compute(whole - first, protected=False)
        if blocks is None:
            raise ProtocolError("vLLM's own blocks found no place in the books")
        store.wrote(blocks, store.newest_step)
        store.publish(namespace, keys, first, blocks, record.session)
        store.release(blocks, LeaseKind.HARD)
        if self._events is not None:
            size = self._block_tokens
            run = record.request.all_token_ids[first * size : whole * size]
            self._events.named(blocks, parent, run, lora_of(record.request))
        self._saves.computed(blocks, found, blocks)
        self._line.published(namespace, parent)
