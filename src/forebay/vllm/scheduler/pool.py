"""vLLM's block pool as a `DevicePool`: vLLM owns the slots, this knows what is in some of them.

A slot is a block id of vLLM's. vLLM evicts as it sees fit, and tells afterwards; so nothing here
holds a block back from it but a load on its way into one. What a load brought is cached in vLLM's
own prefix cache and free again, at the tail of its queue: a *prefetch lease* on it is soft towards
vLLM. Towards our own loads it is as hard as anywhere: they take no leased block, and before each
step leased blocks next in the queue are put to its tail.

A block that is being saved is not held either. When vLLM hands its slot out the block stays in the
books until its save has ended, and whoever owns the books has that save ended before the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from forebay._native import FlagColumn, FreeQueue, NumberColumn, SlotBooks
from forebay.core.arrays import EMPTY_IDS, Ids, Steps
from forebay.core.device_pool import LeaseKind
from forebay.core.slots import SlotState, in_state
from forebay.errors import ProtocolError
from forebay.vllm.adapter import (
    Block,
    BlockPool,
    VllmRequest,
    uncache,
)
from forebay.vllm.groups import ONE_GROUP, Groups
from forebay.vllm.handed_out import HandedOut
from forebay.vllm.scheduler.contents import Contents

_LOOKED = 2
"""Where a load may take what is wanted, so many times its blocks are looked at for what is not."""


class VllmDevicePool:
    """A `DevicePool` over `pool`. Our blocks are ids below `max_blocks`.

    `kept_free` blocks are left to vLLM: its own watermark. `frees_idle` says that vLLM frees
    a block only when no step under way may touch it: then a load into it waits for none. Of
    the blocks in use by vLLM only those count as ours that were offered (:meth:`offer`) or loaded.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_blocks: int,
        *,
        block_tokens: int,
        kept_free: int,
        frees_idle: bool,
        groups: Groups = ONE_GROUP,
    ) -> None:
        self._pool = pool
        self._kept_free = kept_free
        self._frees_idle = frees_idle
        self._watch = HandedOut.watch(pool)
        self._queue = FreeQueue(pool.free_block_queue, pool.blocks)
        self._books = SlotBooks(max_blocks, pool.num_gpu_blocks)
        self._stamp = NumberColumn(max_blocks)
        self._contents = Contents(pool, max_blocks, block_tokens, len(groups), groups.path)
        self._twins = FlagColumn(max_blocks)
        self.groups = len(groups)
        """From so many groups of layers vLLM asks for blocks."""
        self._path = groups.path
        self._offered: tuple[Ids, Sequence[bytes], int] = (EMPTY_IDS, (), groups.path)
        # The loads that vLLM finds already, by their first block.
        self._found_ahead: set[int] = set()
        self.resets = 0
        """How often vLLM's cache was reset, as far as is known."""
        self._lost: Ids = EMPTY_IDS
        self._handed: list[Ids] = []
        self.load_stamp = 0
        """The newest step that may touch a block which vLLM has free: the one before the step that
        it is scheduling, or schedules next."""

    # -- with vLLM's pool ------------------------------------------------------------------------

    def offer(self, slots: Ids, contents: Sequence[bytes], group: int | None = None) -> None:
        """The next `allocate` but one for a load is for these slots, which vLLM filled, in the
        group of this number, or in that of the path.
        """
        self._offered = (slots, contents, self._path if group is None else group)

    def note_twins(self, blocks: Ids) -> None:
        """vLLM has the content of `blocks` in other slots too, or had it."""
        self._twins.put(blocks, True)

    def disown_loads(self) -> None:
        """What is being loaded is not to be found by anybody."""
        self._contents.disown_loads()

    def disown(self, lora: str) -> None:
        """What was or is being loaded for the LoRA of this name is not to be found by anybody."""
        brought = self._contents.disown_lora(lora)
        self._found_ahead.difference_update(brought)
        blocks = np.array(brought, np.int32)
        blocks = blocks[self.slot_of(blocks) >= 0]
        uncache(self._pool, self.slot_of(blocks).tolist())
        # Those on their way are given back when they land.
        loading = in_state(self._books.state(blocks), SlotState.LOADING)
        self._lost = _both(self._lost, blocks[~loading])

    def loads_for(self, request: VllmRequest, blocks: Ids) -> None:
        """One load brings `blocks`, of the prompt of `request`: so vLLM will find them."""
        self._contents.loads_for(request, blocks)

    def find_ahead(self, blocks: Ids) -> bool:
        """vLLM finds what a load brings, all of it, before it has: no step may be launched then
        until it has. Returns False where nobody can say of which prompt it is.
        """
        if not self._name(blocks):
            return False
        self._found_ahead.add(int(blocks[0]))
        return True

    def catch_up(self) -> Ids:
        """Take note of what vLLM did with its pool.

        Returns the blocks that lost their slot by it, in the order in which vLLM gave them up.
        Where vLLM has the same content in another slot, the block is there now.
        """
        handed, reset = self._watch.take()
        self.resets += reset
        lost = self._lost
        if handed:
            slots = self._queue.ids(handed)
            self._handed.append(slots)
            lost = _both(lost, self._books.blocks_in(slots))
        if reset:
            # In the order in which vLLM would have given them up: what is below another first.
            in_order = self._books.blocks_in(self._queue.first(self._pool.num_gpu_blocks))
            lost = _both(_both(lost, in_order), self._books.all_blocks())
        if not len(lost):
            return EMPTY_IDS
        saving = in_state(self._books.state(lost), SlotState.SAVING)
        if not np.count_nonzero(saving):
            self._lost = EMPTY_IDS
            return self._vacate(lost)
        self._lost = lost[saving]
        return self._vacate(lost[~saving])

    def take_handed_out(self) -> Ids:
        """Slots that were handed out since the last time, to vLLM's requests or to loads."""
        handed, self._handed = self._handed, []
        return handed[0] if len(handed) == 1 else np.concatenate([EMPTY_IDS, *handed])

    def known(self, slots: Ids) -> set[int]:
        """Those of `slots` that have a block of ours. Not one that vLLM took while its block is
        being saved: it may have made something else of that.
        """
        blocks = self._books.blocks_in(slots)
        taken = np.isin(blocks, self._lost)
        return set(self.slot_of(blocks[~taken]).tolist())

    def guard(self, count: int) -> None:
        """Of the next `count` that vLLM would hand out, take back what is leased, and, where there
        is enough else, what is wanted.
        """
        if self._books.leased_here or self._books.wanted_here:
            self._queue.guard(self._books, count)

    def keep(self, blocks: Ids) -> None:
        """`blocks` are likely to be asked for soon: they are given up after what nobody wants."""
        self._books.want(blocks, False)

    def keep_no_more(self, blocks: Ids) -> None:
        """They are like any others."""
        self._books.unwant(blocks, False)

    def given_up(self, blocks: Ids) -> bool:
        """Whether vLLM took the slot of any of `blocks`, which is in the books while a save of it
        goes on: something else is to be there, or is already.
        """
        return len(self._lost) > 0 and bool(np.isin(self._lost, blocks).any())

    def content_of(self, block: int) -> bytes:
        """vLLM's hash of what is in `block`, which has a copy in some tier."""
        return self._contents.hash_of(block)

    # -- room ------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        return self._pool.num_gpu_blocks - 1

    @property
    def free(self) -> int:
        # Not those that vLLM has free with content in them.
        return max(0, min(self._pool.get_num_free_blocks(), self.slots - self._books.known))

    @property
    def dirty(self) -> int:
        return self._books.in_state(SlotState.DIRTY)

    @property
    def quarantined(self) -> int:
        return self._books.in_state(SlotState.QUARANTINED)

    def obtainable(self, *, protected: bool) -> int:
        # Leased or wanted blocks that vLLM has in use are not free to begin with: that this counts
        # them too errs towards loading later.
        spared = self._books.leased_here + (0 if protected else self._books.wanted_here)
        return max(0, self._pool.get_num_free_blocks() - self._kept_free - spared)

    def fits(self, path: Ids) -> bool:
        """Whether blocks of `path` that nobody uses have room, were all leases given back."""
        here = self._vllm_blocks(path[self._books.slot_of(path) >= 0])
        unused = len(path) - sum(block.ref_cnt > 0 for block in here)
        return unused <= self._pool.get_num_free_blocks() - self._kept_free

    def allocate(self, blocks: Ids, state: SlotState, *, protected: bool) -> Ids | None:
        if state is SlotState.LOADING:
            return self._allocate_for_load(blocks, protected)
        slots, contents, group = self._offered
        self._offered = (EMPTY_IDS, (), self._path)
        if len(slots) != len(blocks):
            raise ProtocolError(f"{len(blocks)} blocks need slots, {len(slots)} are offered")
        ousted = self._books.blocks_in(slots)
        if len(ousted):
            ousted = ousted[~self._books.busy(ousted)]
            self._books.leave(ousted)
        self._contents.note(blocks, contents, group)
        self._books.settle_in(blocks, slots, state)
        return ousted

    def forget(self, blocks: Ids) -> None:
        loading = blocks[in_state(self._books.state(blocks), SlotState.LOADING)]
        given_back = self._vllm_blocks(loading)
        self._disown(loading)
        self._books.leave(blocks)
        if len(self._lost):
            # One that vLLM took while it was saved: its id may be another block's soon.
            self._lost = self._lost[~np.isin(self._lost, blocks)]
        self._pool.free_blocks(reversed(given_back))

    def quarantine(self, blocks: Ids) -> None:
        # vLLM's reference on them stays: the pool never hands them out again. Where a step waited
        # for them it finds them, and what the copy may yet write is what they have.
        self._disown(blocks)
        self._books.leave(blocks)
        self._books.quarantine(len(blocks))

    # -- where blocks are, and in what state -----------------------------------------------------

    def slot_of(self, blocks: Ids) -> Ids:
        return self._books.slot_of(blocks)

    def along(self, path: Ids) -> tuple[int, int, int]:
        return self._books.along(path)

    def absent(self, path: Ids) -> Ids:
        return self._books.absent(path)

    def state(self, blocks: Ids) -> NDArray[np.int8]:
        return self._books.state(blocks)

    def counts(self) -> dict[SlotState, int]:
        counts = {state: self._books.in_state(state) for state in SlotState}
        counts[SlotState.FREE] = self.slots - sum(counts.values())
        return counts

    def busy(self, blocks: Ids) -> NDArray[np.bool_]:
        return self._books.busy(blocks)

    def move(self, blocks: Ids, state: SlotState) -> None:
        loaded = self._books.move(blocks, state)
        if len(loaded):
            self._land(loaded)

    # -- steps -----------------------------------------------------------------------------------

    def wrote(self, blocks: Ids, step: int) -> None:
        self._stamp.raise_to(blocks, step)

    def stamps(self, blocks: Ids) -> Steps:
        return self._stamp.take(blocks)

    def advance(self, completed_step: int) -> None:
        """The worker's mover knows which steps have ended."""

    # -- who keeps them --------------------------------------------------------------------------

    def touch(self, blocks: Ids, kind: LeaseKind) -> None:
        self._books.lease(blocks, kind is LeaseKind.PREFETCH)

    def promote(self, blocks: Ids) -> None:
        self._books.promote(blocks)

    def release(self, blocks: Ids, kind: LeaseKind, step: int) -> Ids:
        return self._books.release(blocks, kind is LeaseKind.PREFETCH)

    def leases(self, blocks: Ids) -> NDArray[np.int32]:
        return self._books.leases(blocks)

    @property
    def prefetch_leased(self) -> int:
        return self._books.prefetch_leased

    def publish(self, blocks: Ids) -> None:
        """vLLM's queue has them already."""

    def protect(self, blocks: Ids) -> None:
        self._books.want(blocks, True)

    def unprotect(self, blocks: Ids) -> None:
        self._books.unwant(blocks, True)

    def wanted(self, blocks: Ids) -> NDArray[np.bool_]:
        return self._books.asked(blocks)

    def next_victims(self, count: int) -> Ids:
        blocks = self._books.blocks_in(self._queue.first(count))
        return blocks[~self._books.busy(blocks)]

    # -- inside ----------------------------------------------------------------------------------

    def _allocate_for_load(self, blocks: Ids, protected: bool) -> Ids | None:
        count = len(blocks)
        if count > self.obtainable(protected=protected):
            return None
        most = self._pool.get_num_free_blocks()
        found = 0
        if protected:
            found = self._queue.make_way(self._books, count, min(most, _LOOKED * count))
        if found < count:
            found = self._queue.spare(self._books, count, most, wanted_too=not protected)
        if found < count:
            return None
        slots = self._queue.ids(self._pool.get_new_blocks(count))
        lost = self.catch_up()
        self._books.settle_in(blocks, slots, SlotState.LOADING)
        self._stamp.put(blocks, 0 if self._frees_idle else self.load_stamp)
        return lost

    def _land(self, blocks: Ids) -> None:
        """A load brought `blocks` (in the order of their prompt): vLLM may find them now."""
        if int(blocks[0]) in self._found_ahead:
            self._found_ahead.discard(int(blocks[0]))
        elif not self._name(blocks):
            # They are given back unnamed.
            self._lost = _both(self._lost, blocks)
        self._pool.free_blocks(reversed(self._vllm_blocks(blocks)))

    def _name(self, blocks: Ids) -> bool:
        """Let vLLM find `blocks`, if somebody can say of which prompt they are."""
        return self._contents.name(blocks, self._vllm_blocks(blocks))

    def _disown(self, blocks: Ids) -> None:
        self._contents.disown(blocks)
        self._found_ahead.difference_update(blocks.tolist())

    def _vllm_blocks(self, blocks: Ids) -> list[Block]:
        return self._queue.with_ids(self._books.slot_of(blocks))

    def _vacate(self, blocks: Ids) -> Ids:
        """`blocks` are not where they were. Returns those that are nowhere."""
        twins = self._twins.take(blocks)
        if not np.count_nonzero(twins):
            self._books.leave(blocks)
            return blocks
        places: list[int] = np.flatnonzero(twins).tolist()
        elsewhere = [
            place
            for place, twin in zip(places, self._contents.twins(blocks[places]), strict=True)
            if twin is not None and self._books.relocate(int(blocks[place]), twin.block_id)
        ]
        found = blocks[elsewhere]
        # vLLM names a block before the step that fills it, at the latest the next one.
        self._stamp.raise_to(found, self.load_stamp + 1)
        lost = np.delete(blocks, elsewhere) if elsewhere else blocks
        self._books.leave(lost)
        self._twins.put(lost, False)
        return lost


def _both(some: Ids, others: Ids) -> Ids:
    """`some` and those of `others`, each once, that are none of them."""
    return np.concatenate([some, others[~np.isin(others, some)]]) if len(some) else others
