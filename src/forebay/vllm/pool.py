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

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from forebay._native import BlockCounts
from forebay.core.arrays import EMPTY_IDS, Ids, Steps
from forebay.core.device_pool import LeaseKind
from forebay.core.slots import SlotState
from forebay.errors import ProtocolError
from forebay.vllm.adapter import (
    Block,
    BlockPool,
    HandedOut,
    VllmRequest,
    cache_run,
    cached_block,
    next_free,
    to_tail,
)

# How many steps a look at the head of vLLM's queue is to last.
_GUARDED_STEPS = 4


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
    ) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._kept_free = kept_free
        self._frees_idle = frees_idle
        self._watch = HandedOut.watch(pool)
        self._slot: Ids = np.full(max_blocks, -1, np.int32)
        self._block_in: Ids = np.full(pool.num_gpu_blocks, -1, np.int32)
        self._state: NDArray[np.int8] = np.zeros(max_blocks, np.int8)
        self._stamp: Steps = np.zeros(max_blocks, np.int64)
        self._content: dict[int, bytes] = {}
        self._leases = BlockCounts(max_blocks, "a lease")
        self._prefetch = BlockCounts(max_blocks, "a prefetch lease")
        self._wanted = BlockCounts(max_blocks, "protection")
        self._leased_here = 0
        self._wanted_here = 0
        # So many at the head of vLLM's free queue are known to be under no lease.
        self._unleased_head = 0
        self._in_state = np.zeros(len(SlotState), np.int64)
        self._offered: tuple[Ids, Sequence[bytes]] = (EMPTY_IDS, ())
        self._loaded_for: dict[int, VllmRequest] = {}
        self._lost: list[int] = []
        self._handed: list[int] = []
        self.load_stamp = 0
        """The newest step that may touch a block which vLLM has free: the one before the step that
        it is scheduling, or schedules next."""

    # -- with vLLM's pool ------------------------------------------------------------------------

    def offer(self, slots: Ids, contents: Sequence[bytes]) -> None:
        """The next `allocate` but one for a load is for these slots, which vLLM filled."""
        self._offered = (slots, contents)

    def disown_loads(self) -> None:
        """What is being loaded is not to be found by anybody."""
        self._loaded_for.clear()

    def loads_for(self, request: VllmRequest, blocks: Ids) -> None:
        """`blocks`, being loaded, are of the prompt of `request`: so vLLM will find them."""
        for block in blocks.tolist():
            self._loaded_for[block] = request

    def catch_up(self) -> Ids:
        """Take note of what vLLM did with its pool.

        Returns the blocks that lost their slot by it, in the order in which vLLM gave them up.
        Where vLLM has the same content in another slot, the block is there now.
        """
        ids, accessed, reset = self._watch.take()
        self._handed += ids
        self._unleased_head -= len(ids) + accessed
        if reset:
            self._lost += self._block_in[self._block_in >= 0].tolist()
        self._lost += self._blocks_in(np.array(ids, np.int32)).tolist()
        if not self._lost:
            return EMPTY_IDS
        lost = np.array(list(dict.fromkeys(self._lost)), np.int32)
        saving = self._state[lost] == SlotState.SAVING
        self._lost = lost[saving].tolist()
        return self._vacate(lost[~saving])

    def take_handed_out(self) -> list[int]:
        """Slots that were handed out since the last time, to vLLM's requests or to loads."""
        handed, self._handed = self._handed, []
        return handed

    def guard(self, count: int) -> None:
        """Put leased blocks among the next `count` that vLLM would hand out to the tail."""
        if self._leased_here and self._unleased_head < count:
            found = next_free(self._pool, _GUARDED_STEPS * count)
            leased = self._spared(_ids(found), protected=True)
            self._to_tail(found, leased)
            self._unleased_head = len(found) - int(np.count_nonzero(leased))

    def content_of(self, block: int) -> bytes:
        """vLLM's hash of what is in `block`, which has a copy in some tier."""
        return self._content[block]

    # -- room ------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        return self._pool.num_gpu_blocks - 1

    @property
    def free(self) -> int:
        # Not those that vLLM has free with content in them.
        known = int(self._in_state.sum())
        return max(0, min(self._pool.get_num_free_blocks(), self.slots - known))

    @property
    def quarantined(self) -> int:
        return int(self._in_state[SlotState.QUARANTINED])

    def obtainable(self, *, protected: bool) -> int:
        # Leased or wanted blocks that vLLM has in use are not free to begin with: that this counts
        # them too errs towards loading later.
        spared = self._leased_here + (0 if protected else self._wanted_here)
        return max(0, self._pool.get_num_free_blocks() - self._kept_free - spared)

    def fits(self, path: Ids) -> bool:
        """Whether blocks of `path` that nobody uses have room, were all leases given back."""
        here = self._vllm_blocks(path[self._slot.take(path) >= 0])
        unused = len(path) - sum(block.ref_cnt > 0 for block in here)
        return unused <= self._pool.get_num_free_blocks() - self._kept_free

    def allocate(self, blocks: Ids, state: SlotState, *, protected: bool) -> Ids | None:
        if state is SlotState.LOADING:
            return self._allocate_for_load(blocks, protected)
        slots, contents = self._offered
        self._offered = (EMPTY_IDS, ())
        if len(slots) != len(blocks):
            raise ProtocolError(
                f"{len(blocks)} blocks need as many slots, {len(slots)} are offered"
            )
        ousted = self._blocks_in(slots)
        ousted = ousted[~self.busy(ousted)]
        self._leave(ousted)
        self._content.update(zip(blocks.tolist(), contents, strict=True))
        self._settle_in(blocks, slots, state)
        return ousted

    def forget(self, blocks: Ids) -> None:
        loading = blocks[self._state[blocks] == SlotState.LOADING]
        given_back = self._vllm_blocks(loading)
        self._leave(blocks)
        self._pool.free_blocks(reversed(given_back))

    def quarantine(self, blocks: Ids) -> None:
        # vLLM's reference on them stays: the pool never hands them out again.
        self._leave(blocks)
        self._in_state[SlotState.QUARANTINED] += len(blocks)

    # -- where blocks are, and in what state -----------------------------------------------------

    def slot_of(self, blocks: Ids) -> Ids:
        return self._slot.take(blocks)

    def state(self, blocks: Ids) -> NDArray[np.int8]:
        return self._state.take(blocks)

    def counts(self) -> dict[SlotState, int]:
        counts = {state: int(self._in_state[state]) for state in SlotState}
        counts[SlotState.FREE] = self.slots - sum(counts.values())
        return counts

    def busy(self, blocks: Ids) -> NDArray[np.bool_]:
        state = self._state.take(blocks)
        return (state == SlotState.LOADING) | (state == SlotState.SAVING)

    def move(self, blocks: Ids, state: SlotState) -> None:
        loaded = self._state[blocks] == SlotState.LOADING
        with self._changing(blocks):
            self._set_state(blocks, state)
        if loaded.any():
            self._land(blocks[loaded])

    # -- steps -----------------------------------------------------------------------------------

    def wrote(self, blocks: Ids, step: int) -> None:
        self._stamp[blocks] = np.maximum(self._stamp[blocks], step)

    def stamps(self, blocks: Ids) -> Steps:
        return self._stamp.take(blocks)

    def advance(self, completed_step: int) -> None:
        """The worker's mover knows which steps have ended."""

    # -- who keeps them --------------------------------------------------------------------------

    def touch(self, blocks: Ids, kind: LeaseKind) -> None:
        before = self._leased_here
        with self._changing(blocks):
            self._leases.add(blocks)
            if kind is LeaseKind.PREFETCH:
                self._prefetch.add(blocks)
        if self._leased_here > before:
            self._unleased_head = 0

    def promote(self, blocks: Ids) -> None:
        self._prefetch.take_away(blocks)

    def release(self, blocks: Ids, kind: LeaseKind, step: int) -> Ids:
        with self._changing(blocks):
            if kind is LeaseKind.PREFETCH:
                self._prefetch.take_away(blocks)
            return self._leases.take_away(blocks)

    def leases(self, blocks: Ids) -> NDArray[np.int32]:
        return self._leases.of(blocks)

    @property
    def prefetch_leased(self) -> int:
        return self._prefetch.held

    def publish(self, blocks: Ids) -> None:
        """vLLM's queue has them already."""

    def protect(self, blocks: Ids) -> None:
        with self._changing(blocks):
            self._wanted.add(blocks)

    def unprotect(self, blocks: Ids) -> None:
        with self._changing(blocks):
            self._wanted.take_away(blocks)

    def wanted(self, blocks: Ids) -> NDArray[np.bool_]:
        return self._wanted.any(blocks)

    def next_victims(self, count: int) -> Ids:
        blocks = self._blocks_in(_ids(next_free(self._pool, count)))
        return blocks[~self.busy(blocks)]

    # -- inside ----------------------------------------------------------------------------------

    def _allocate_for_load(self, blocks: Ids, protected: bool) -> Ids | None:
        count = len(blocks)
        if count > self.obtainable(protected=protected) or not self._make_way(count, protected):
            return None
        slots = _ids(self._pool.get_new_blocks(count))
        lost = self.catch_up()
        self._settle_in(blocks, slots, SlotState.LOADING)
        self._stamp.put(blocks, 0 if self._frees_idle else self.load_stamp)
        return lost

    def _make_way(self, count: int, protected: bool) -> bool:
        """See to it that the next `count` of vLLM's free queue may be taken."""
        most = count + self._leased_here + (0 if protected else self._wanted_here)
        # What is to be spared stands at the tail, as a rule, and there may be much of it.
        look = count
        while True:
            found = next_free(self._pool, min(look, most))
            spared = self._spared(_ids(found), protected)
            if len(found) - int(np.count_nonzero(spared)) >= count:
                break
            if look >= most:
                return False
            look *= 2
        reach = int(np.searchsorted(np.cumsum(~spared), count)) + 1
        self._to_tail(found[:reach], spared[:reach])
        return True

    def _spared(self, slots: Ids, protected: bool) -> NDArray[np.bool_]:
        """Which of these free slots a load does not take."""
        blocks = self._block_in.take(slots)
        known = np.maximum(blocks, 0)
        kept = self._leases.any(known)
        if not protected:
            kept = kept | self._wanted.any(known)
        return kept & (blocks >= 0)

    def _to_tail(self, found: Sequence[Block], which: NDArray[np.bool_]) -> None:
        moved = [found[place] for place in np.flatnonzero(which).tolist()]
        if moved:
            to_tail(self._pool, moved)

    def _land(self, blocks: Ids) -> None:
        """Loads brought `blocks` (in the order of their prompt): vLLM may find them from now on."""
        slots = self._vllm_blocks(blocks)
        request = self._loaded_for.get(int(blocks[0]))
        places = self._places(request, blocks)
        for block in blocks.tolist():
            self._loaded_for.pop(block, None)
        if request is None or places is None:
            # Nobody can say of which prompt they are: they are given back unnamed.
            self._lost += blocks.tolist()
        else:
            for first, last in _runs(places):
                run = slots[first:last]
                cache_run(self._pool, request, places[first], run, self._block_tokens)
        self._pool.free_blocks(reversed(slots))

    def _places(self, request: VllmRequest | None, blocks: Ids) -> list[int] | None:
        """Where in the prompt of `request` each of `blocks` is."""
        if request is None:
            return None
        places: list[int] = []
        hashes, place = request.block_hashes, 0
        for block in blocks.tolist():
            try:
                place = hashes.index(self._content[block], place)
            except ValueError:
                return None
            places.append(place)
        return places

    def _vllm_blocks(self, blocks: Ids) -> list[Block]:
        slots: list[int] = self._slot.take(blocks).tolist()
        return [self._pool.blocks[slot] for slot in slots]

    def _blocks_in(self, slots: Ids) -> Ids:
        blocks = self._block_in.take(slots)
        return blocks[blocks >= 0]

    def _vacate(self, blocks: Ids) -> Ids:
        """`blocks` are not where they were. Returns those that are nowhere."""
        gone = [block for block in blocks.tolist() if not self._found_elsewhere(block)]
        lost = np.array(gone, np.int32)
        self._leave(lost)
        return lost

    def _found_elsewhere(self, block: int) -> bool:
        """Whether vLLM has the content of `block` in a slot of no other block; it is there now."""
        twin = cached_block(self._pool, self._content[block])
        if twin is None or self._block_in[twin.block_id] not in (-1, block):
            return False
        if self._block_in[self._slot[block]] == block:
            self._block_in[self._slot[block]] = -1
        self._slot[block] = twin.block_id
        self._block_in[twin.block_id] = block
        # vLLM names a block before the step that fills it, at the latest the next one.
        self._stamp[block] = max(int(self._stamp[block]), self.load_stamp + 1)
        return True

    def _settle_in(self, blocks: Ids, slots: Ids, state: SlotState) -> None:
        with self._changing(blocks):
            self._slot.put(blocks, slots)
            self._block_in.put(slots, blocks)
            self._set_state(blocks, state)

    def _leave(self, blocks: Ids) -> None:
        with self._changing(blocks):
            slots = self._slot[blocks]
            mine = self._block_in[slots] == blocks
            self._block_in.put(slots[mine], -1)
            self._slot.put(blocks, -1)
            self._set_state(blocks, SlotState.FREE)
        for block in blocks.tolist():
            self._loaded_for.pop(block, None)

    def _set_state(self, blocks: Ids, state: SlotState) -> None:
        np.subtract.at(self._in_state, self._state[blocks], 1)
        self._state.put(blocks, state)
        self._in_state[state] += len(blocks)
        self._in_state[SlotState.FREE] = 0

    @contextmanager
    def _changing(self, blocks: Ids) -> Generator[None]:
        """Keep the counts of leased and of wanted blocks right while `blocks` change."""
        self._count(blocks, -1)
        yield
        self._count(blocks, 1)

    def _count(self, blocks: Ids, sign: int) -> None:
        here = (self._slot.take(blocks) >= 0) & ~self.busy(blocks)
        leased = self._leases.any(blocks) & here
        self._leased_here += sign * int(np.count_nonzero(leased))
        wanted = self._wanted.any(blocks) & here & ~leased
        self._wanted_here += sign * int(np.count_nonzero(wanted))


def _ids(blocks: Sequence[Block]) -> Ids:
    return np.fromiter((block.block_id for block in blocks), np.int32, len(blocks))


def _runs(places: Sequence[int]) -> Generator[tuple[int, int]]:
    """Where runs of adjacent `places` begin and end."""
    first = 0
    for last in range(1, len(places) + 1):
        if last == len(places) or places[last] != places[last - 1] + 1:
            yield first, last
            first = last
