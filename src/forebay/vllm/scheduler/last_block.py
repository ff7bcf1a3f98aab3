"""The last block of a prompt that is found whole: copied, so that one token of it is computed.

vLLM computes the last token of every prompt, and shares whole blocks alone: where it finds all of a
prompt it computes the last block again, all its tokens. Told that a connector brings all of them
but one, it takes a block of its own for them. The copy from the block that has them is made on
vLLM's stream, before the step. The block that it is made from is held until that step is over:
nothing else, no load above all, may fill it meanwhile.
"""

from __future__ import annotations

from forebay.cache.parts import Parts
from forebay.core.requests import Waiting
from forebay.vllm.adapter import Block, BlockPool
from forebay.vllm.messages import BlockCopy
from forebay.vllm.scheduler.pool import VllmDevicePool
from forebay.vllm.scheduler.records import Record


class LastBlocks:
    """Copies within vLLM's `pool` of the blocks that the store has there. `device` is that pool, as
    the store knows it.
    """

    def __init__(self, parts: Parts, pool: BlockPool, device: VllmDevicePool) -> None:
        self._block_tokens = parts.settings.block_tokens
        self._line = parts.line
        self._store = parts.store
        self._switch = parts.switch
        self._flights = parts.flights
        self._pool = pool
        self._device = device
        self._copies: list[BlockCopy] = []
        self._sources: list[Block] = []
        # What is held for each step, in order.
        self._held: dict[int, list[Block]] = {}

    def tokens(self, record: Record, entry: Waiting) -> int:
        """How many tokens of the last block of a request need not be computed, where vLLM found
        all before it: none, or all but one. Takes no block.
        """
        size, count = self._block_tokens, record.request.num_tokens
        record.copied_from, record.copied_tokens = -1, 0
        # A model of several groups takes a block for each, and none is copied.
        keeps_out = record.wishes.no_cache or not self._switch.policy.host_tier
        if (
            keeps_out
            or not self._line.last_too
            or count % size
            or record.local_tokens != count - size
        ):
            return 0
        store, last = self._store, entry.blocks[count // size - 1 :]
        if not len(last) or not store.resident(last)[0]:
            return 0
        if self._flights.lacks_any(store.loads_of(last)):
            return 0
        if self._device.given_up(last[:1]):
            return 0
        # A copy comes too early for what the step fills that is being scheduled.
        if store.device.stamps(last)[0] > store.newest_step:
            return 0
        record.copied_from, record.copied_tokens = int(store.device.slot_of(last)[0]), size - 1
        return size - 1

    def admitted(self, record: Record, block: int) -> None:
        """vLLM starts the request with `block` for its last one."""
        # vLLM may have taken the very block: then all of it is there.
        if record.copied_from != block:
            self._hold(self._pool.blocks[record.copied_from])
            self._copies.append(BlockCopy(record.copied_from, block))

    def _hold(self, source: Block) -> None:
        self._pool.touch([source])
        self._sources.append(source)

    def take(self, step: int) -> tuple[BlockCopy, ...]:
        """The copies to make before the step of this number."""
        copies, self._copies = tuple(self._copies), []
        if copies:
            self._held[step], self._sources = self._sources, []
        return copies

    def step_ended(self, step: int) -> None:
        """The output of this step came: it is over, and so are those before it."""
        for over in [each for each in self._held if each <= step]:
            self._pool.free_blocks(self._held.pop(over))
