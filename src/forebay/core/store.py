"""Where every block is: the directory, the device tier and the host tier, kept in step.

A block lives from the moment a ticket computes into it until its last copy is gone and nobody holds
it. Three things keep a block: being *published*, a lease, or a copy that reads or writes it. When
the last of them ends, its slots and its id are free again (`_bury`), and at no other moment.

The store decides nothing: it is asked for room and either makes it or changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forebay._native import FlagColumn, NumberColumn, count_true
from forebay.core.arrays import EMPTY_IDS, Ids, Steps
from forebay.core.block_ids import BlockIds, ids_for
from forebay.core.device import OwnDevicePool
from forebay.core.device_pool import DevicePool, LeaseKind
from forebay.core.directory import Directory, Match, Session
from forebay.core.host import HostPool
from forebay.core.host_room import HostRoom
from forebay.core.slots import SlotState, in_state
from forebay.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What a mover is told of one transfer: slot pairs in copy order, and the steps to wait for."""

    blocks: Ids
    sources: Ids
    destinations: Ids
    after_steps: Steps


@dataclass(slots=True)
class StoreCounters:
    """Blocks, since the start."""

    allocated: int = 0
    evicted: int = 0
    dropped_dirty: int = 0
    given_up: int = 0
    """That lay in the host tier alone, and made room there."""
    quarantined: int = 0


@dataclass(slots=True)
class Store:
    """`device_slots` + `host_slots` block-sized slots under one directory of `key_bytes` keys."""

    key_bytes: int
    device_slots: int
    host_slots: int
    pool: DevicePool | None = None
    """Whose device slots they are; None: our own."""
    host_ready: Callable[[], int] | None = None
    """How many host slots, from the first, can be used by now; None: all of them."""
    directory: Directory = field(init=False)
    device: DevicePool = field(init=False)
    host: HostPool = field(init=False)
    counters: StoreCounters = field(default_factory=StoreCounters)
    newest_step: int = 0
    """The newest step that was scheduled: what a release stamps."""
    lost_epoch: int = 0
    """Grows when a block that a waiting request wants is removed from the directory."""
    moved_epoch: int = 0
    """Grows when a block that a waiting request wants loses or gains its device slot."""
    lost_slot: Callable[[Ids], None] = lambda blocks: None
    """Is told of blocks that lost the device slot which they filled; an id may be reused then."""
    _load_of: NumberColumn = field(init=False)
    _published: FlagColumn = field(init=False)
    _withheld: FlagColumn = field(init=False)
    _ids: BlockIds = field(init=False)
    _host_room: HostRoom = field(init=False)
    _copies: dict[int, Ids] = field(default_factory=dict[int, Ids])

    def __post_init__(self) -> None:
        most = self.max_blocks
        self.directory = Directory(self.key_bytes)
        self.device = self.pool or OwnDevicePool(self.device_slots, most)
        self.host = HostPool(self.host_slots, most)
        self._load_of = NumberColumn(most)
        self._published = FlagColumn(most)
        self._withheld = FlagColumn(most)
        self._ids = BlockIds(most)
        self._host_room = HostRoom(self.host, self.device, self.directory, self._give_up)
        self._open_host()

    @property
    def max_blocks(self) -> int:
        """Block ids are below this."""
        return ids_for(self.device_slots, self.host_slots)

    def advance(self, completed_step: int) -> None:
        """Every step up to `completed_step` has ended; host memory may have been readied."""
        self.device.advance(completed_step)
        self._open_host()

    def _open_host(self) -> None:
        tier = self.host.tier
        if tier.opened < tier.count:
            tier.open(tier.count if self.host_ready is None else self.host_ready())

    # -- looking -------------------------------------------------------------------------------

    def match(self, namespace: bytes, keys: bytes, session: Session | None = None) -> Match:
        """The published blocks of the longest prefix of `keys`. Pure."""
        return self.directory.match(namespace, keys, session)

    def resident(self, blocks: Ids) -> NDArray[np.bool_]:
        """Whether each block has a device slot, filled or being filled."""
        return self.device.slot_of(blocks) >= 0

    def loads_of(self, blocks: Ids) -> set[int]:
        """The transfers, un-ended, that fill any of `blocks` (of a path: they fill runs of it)."""
        return {transfer for transfer, _ in self._load_of.runs(blocks)}

    def loading(self, blocks: Ids) -> NDArray[np.bool_]:
        """Whether an un-ended transfer fills each block."""
        return self._load_of.marked(blocks)

    def serials(self, blocks: Ids) -> NDArray[np.int64]:
        """A number for each block that no other block, before or after, has."""
        return self._ids.serials(blocks)

    def published(self, blocks: Ids) -> NDArray[np.bool_]:
        """Whether each block can be matched."""
        return self._published.take(blocks)

    def dirty(self, blocks: Ids) -> NDArray[np.bool_]:
        """Whether each block is published, on the device alone, to be saved, and not under way."""
        dirty = in_state(self.device.state(blocks), SlotState.DIRTY)
        if np.count_nonzero(dirty):
            dirty &= self._published.take(blocks) & ~self._withheld.take(blocks)
        return dirty

    def withheld(self, blocks: Ids) -> NDArray[np.bool_]:
        """Whether each block is kept from being saved."""
        return self._withheld.take(blocks)

    def withhold(self, blocks: Ids) -> None:
        """Do not save `blocks`, until they are offered."""
        self._withheld.put(blocks, True)

    def offer(self, blocks: Ids) -> None:
        """`blocks` may be saved."""
        self._withheld.put(blocks, False)

    # -- leases --------------------------------------------------------------------------------

    def touch(self, blocks: Ids, kind: LeaseKind) -> None:
        """Lease `blocks` (a path from its root, or what continues one) in the device tier."""
        self.device.touch(blocks, kind)

    def release(self, blocks: Ids, kind: LeaseKind) -> None:
        """End one lease of `kind` on `blocks` (root first). Idle private blocks are freed."""
        idle = self.device.release(blocks, kind, self.newest_step)
        self._settle(idle)

    def promote(self, blocks: Ids) -> None:
        """A prefetch lease on each of `blocks` becomes a hard one."""
        self.device.promote(blocks)

    # -- computing -----------------------------------------------------------------------------

    def compute(self, count: int, *, protected: bool) -> Ids | None:
        """`count` new private blocks with a device slot, hard-leased; or None, nothing changed."""
        blocks = self._ids.take(count)
        self._withheld.put(blocks, False)
        evicted = self.device.allocate(blocks, SlotState.DIRTY, protected=protected)
        if evicted is None:
            self._ids.give_back(blocks)
            return None
        self.counters.allocated += count
        self.left_device(evicted)
        self.device.touch(blocks, LeaseKind.HARD)
        return blocks

    def publish(
        self, namespace: bytes, keys: bytes, first: int, blocks: Ids, session: Session | None = None
    ) -> Ids:
        """Publish private `blocks`, just written, as blocks `first`... of the path `keys`.

        Returns the canonical block per place: another one where the same content was published
        meanwhile; the given block then stays private to its ticket.
        """
        canonical = self.directory.insert(namespace, keys, first, blocks, session)
        self._published.put(blocks[canonical == blocks], True)
        return canonical

    def publish_each(self, namespace: bytes, keys: bytes, blocks: Ids) -> Ids:
        """The same, where each of `keys` is a path of its own."""
        canonical = self.directory.insert_each(namespace, keys, blocks)
        self._published.put(blocks[canonical == blocks], True)
        return canonical

    def wrote(self, blocks: Ids, step: int) -> None:
        """`step` writes `blocks`: copies out of them, and into their slots, come after it."""
        self.device.wrote(blocks, step)

    def turned_up(self, blocks: Ids) -> None:
        """Blocks of host memory alone are on the device too, in slots that the pool knows of."""
        evicted = self.device.allocate(blocks, SlotState.CLEAN, protected=True)
        self.left_device(EMPTY_IDS if evicted is None else evicted)
        self.host.hold(blocks)
        self.host.unhold(blocks, on_device=True)
        self._note_moved(blocks)

    def unpublish(self, block: int) -> None:
        """`block` is lost or was never right: it and all that builds on it are not matched again.

        Does nothing where that is so already: what it builds on may have been lost before.
        """
        if not self._published.of(block):
            return
        self._remove(self.directory.remove_subtree(block))

    def unpublish_all(self) -> None:
        """No block is matched again: none of them may be right any more."""
        for block in self._published.numbers().tolist():
            self.unpublish(block)

    # -- loads ---------------------------------------------------------------------------------

    def start_load(self, transfer: int, blocks: Ids, *, protected: bool) -> CopyPlan | None:
        """Device slots for host blocks `blocks` (root first) and the copies that fill them.

        The caller holds, or takes before anything else happens, a lease on them. None when there is
        no room; nothing has changed then.
        """
        if self.host.count_valid(blocks) < len(blocks) or self.device.along(blocks)[0]:
            raise ProtocolError("a load takes blocks that are in host memory and not on the device")
        self.host.hold(blocks)
        evicted = self.device.allocate(blocks, SlotState.LOADING, protected=protected)
        if evicted is None:
            self.host.unhold(blocks, on_device=False)
            return None
        self.counters.allocated += len(blocks)
        self.left_device(evicted)
        self._load_of.put(blocks, transfer)
        self._copies[transfer] = blocks
        self._note_moved(blocks)
        slots = self.host.slot_of(blocks), self.device.slot_of(blocks)
        return CopyPlan(blocks, *slots, self.device.stamps(blocks))

    def end_load(self, transfer: int, done: int, torn: range) -> Ids:
        """The load ended; its first `done` blocks are in place, those at `torn`, behind them, may
        be torn.

        Returns the blocks that did not arrive: they are in host memory still, and leases on them
        mean nothing until they are loaded again.
        """
        blocks = self._copies.pop(transfer)
        self._load_of.put(blocks, 0)
        arrived, missing = blocks[:done], blocks[done:]
        if done:
            self.device.move(arrived, SlotState.CLEAN)
            self.host.unhold(arrived, on_device=True)
            self._settle(arrived[self.device.leases(arrived) == 0])
        if len(missing):
            self._never_came(missing, blocks[torn.start : torn.stop])
        return missing

    def _never_came(self, missing: Ids, torn: Ids) -> None:
        """Of a load that ended blocks are `missing`. The copy of `torn` ones may go on yet, out of
        slots that stay theirs and into slots that nobody gets.
        """
        self.device.quarantine(torn)
        self.counters.quarantined += len(torn)
        # Those at `torn` stay held: what such a copy writes late is then the same as before.
        untouched = missing[~np.isin(missing, torn)]
        self.device.forget(untouched)
        self.host.unhold(untouched, on_device=False)
        self._note_moved(missing)
        self._bury(missing)

    # -- saves ---------------------------------------------------------------------------------

    def start_save(
        self, transfer: int, blocks: Ids, *, ahead: int = 0, displacing: bool = False
    ) -> CopyPlan | None:
        """Host slots for the first of the DIRTY `blocks` (ancestors first), and their copies.

        Where they are in the next `ahead` device slots to be given out, host copies of other blocks
        on the device make room, then the least recently used host blocks; these do first, and in
        any case, where `displacing`. Else only FREE slots are taken. None if none was got.
        """
        tier, count = self.host.tier, len(blocks)
        if displacing and tier.free < count:
            self._host_room.of_sole(count)
        if ahead and tier.free < count:
            self._host_room.of_copies(count, self.device.next_victims(ahead))
            self._host_room.of_sole(count)
        blocks = blocks[: tier.free]
        if not len(blocks):
            return None
        self.host.take(blocks)
        self.device.move(blocks, SlotState.SAVING)
        self._copies[transfer] = blocks
        slots = self.device.slot_of(blocks), self.host.slot_of(blocks)
        return CopyPlan(blocks, *slots, self.device.stamps(blocks))

    def end_save(self, transfer: int, done: int, touched: int) -> None:
        """The save ended; its first `done` blocks are saved, host slots up to `touched` may be
        torn.
        """
        blocks = self._copies.pop(transfer)
        saved, failed = blocks[:done], blocks[done:]
        self.device.move(saved, SlotState.CLEAN)
        self.host.saved(saved)
        if len(failed):
            self.device.move(failed, SlotState.DIRTY)
            self.host.quarantine(blocks[done:touched])
            self.counters.quarantined += max(0, touched - done)
            self.host.forget(blocks[max(done, touched) :])
        self._bury(blocks)

    def next_to_clean(self, count: int) -> Ids:
        """The DIRTY ones among the next `count` victims of the device tier, ancestors first."""
        victims = self.device.next_victims(count)[::-1]
        return victims[self.dirty(victims)]

    # -- leaving -------------------------------------------------------------------------------

    def left_device(self, blocks: Ids) -> None:
        """`blocks`, which nobody leases, lost their device slot, in this order. Those without a
        host copy are lost altogether.

        Where others allocate from the pool too, a parent may come before its children.
        """
        if not len(blocks):
            return
        leaf_first = self._ids.leaf_first(blocks)
        self.counters.evicted += len(leaf_first)
        self.lost_slot(leaf_first)
        self._note_moved(leaf_first)
        valid = self.host.valid(leaf_first)
        kept = int(np.count_nonzero(valid))
        if kept:
            self.host.left_device(leaf_first[valid])
        if kept < len(leaf_first):
            lost = leaf_first[~valid] if kept else leaf_first
            self._lose(lost[self._published.take(lost)])

    def _lose(self, leaf_first: Ids) -> None:
        """Published blocks whose last copy is gone leave the directory with all below them."""
        self.counters.dropped_dirty += len(leaf_first)
        leaves = self.directory.remove_leaves(leaf_first)
        gone = leaf_first[leaves]
        self._unlist(gone)
        # They were idle, or the device would have kept them, and have no host slot: nothing holds.
        self._ids.give_back(gone)
        for block in leaf_first[~leaves].tolist():
            self.unpublish(block)

    def _give_up(self, blocks: Ids) -> None:
        """`blocks`, in host memory alone where no copy reads them, left the directory to make room
        there.
        """
        self.counters.given_up += len(blocks)
        self._unlist(blocks)
        # Of one whose load was lost a running request may have a lease still.
        leased = self.device.leases(blocks) > 0
        gone = blocks[~leased] if count_true(leased) else blocks
        self.host.forget(gone)
        self._ids.give_back(gone)

    def _remove(self, blocks: Ids) -> None:
        """`blocks` left the directory: free what nobody holds, the rest when it is let go."""
        self._unlist(blocks)
        self._bury(blocks)

    def _unlist(self, blocks: Ids) -> None:
        if count_true(self.device.wanted(blocks)):
            self.lost_epoch += 1
        self._published.put(blocks, False)

    def _settle(self, idle: Ids) -> None:
        """Blocks that lost their last lease: published ones may be given up, private ones go."""
        if not len(idle):
            return
        published = self._published.take(idle)
        standing = idle if count_true(published) == len(idle) else idle[published]
        all_here = self.device.along(standing)[0] == len(standing)
        self.device.publish(standing if all_here else standing[self.resident(standing)])
        if len(standing) < len(idle):
            self._bury(idle[~published])

    def _bury(self, blocks: Ids) -> None:
        """Free the slots and ids of those `blocks` that are unpublished, unleased and not
        copied.
        """
        blocks = blocks[~self._published.take(blocks)]
        if not len(blocks):
            return
        saving = in_state(self.host.tier.state(self.host.slot_of(blocks)), SlotState.SAVING)
        held = (self.device.leases(blocks) > 0) | self.device.busy(blocks)
        held |= self.host.held(blocks) | saving | (self.serials(blocks) == 0)
        gone = blocks[~held]
        here = gone[self.resident(gone)]
        if len(here):
            self.lost_slot(here)
            self.device.forget(here)
        self.host.forget(gone[self.host.slot_of(gone) >= 0])
        self._ids.give_back(gone)

    def _note_moved(self, blocks: Ids) -> None:
        if count_true(self.device.wanted(blocks)):
            self.moved_epoch += 1
