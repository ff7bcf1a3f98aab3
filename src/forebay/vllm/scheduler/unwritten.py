"""Blocks that vLLM named for a step that their request is not in: nobody writes them.

Where requests have priorities vLLM may preempt one that it had put into the very step. By then it
has named the blocks which that step was to fill, and whoever finds them reads what was there
before: so it is in every version that was tried, with a connector or without. Here they lose their
names, or host memory would have for long what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forebay.core.arrays import Ids
from forebay.vllm.adapter import BlockPool, Step, hash_of, named, uncache
from forebay.vllm.groups import Groups
from forebay.vllm.scheduler.pool import VllmDevicePool
from forebay.vllm.scheduler.records import Record


class Unwritten:
    """Looks for them in `pool`, of which `device` knows what is in some of its blocks."""

    def __init__(
        self, pool: BlockPool, device: VllmDevicePool, block_tokens: int, groups: Groups
    ) -> None:
        self._pool = pool
        self._device = device
        self._block_tokens = block_tokens
        self._groups = groups

    def scheduled(self, step: Step, handed_out: Ids, preempted: Sequence[Record]) -> None:
        """`step` is complete, since the last one these slots were `handed_out`, and these requests
        are in it no more. Let nobody find what they were to fill.
        """
        if not preempted:
            return
        handed = set(handed_out.tolist())
        slots = handed - step.given - self._device.known(handed_out)
        begun = {slot for record in preempted for slot in self._begun(record)} - handed
        begun |= self._begun_beside(preempted) - handed - step.given
        slots |= begun - self._device.known(np.array(list(begun), np.int32))
        uncache(self._pool, slots)

    def _begun(self, record: Record) -> list[int]:
        """The block of which earlier steps fill a part, if vLLM named it as whole; and those of
        drafts behind it, which may turn out right.
        """
        place, hashes = record.computed // self._block_tokens, record.request.block_hashes
        begun = zip(record.table[place:], hashes[place:], strict=False)
        return [slot for slot, name in begun if hash_of(self._pool.blocks[slot]) == name]

    def _begun_beside(self, preempted: Sequence[Record]) -> set[int]:
        """Those of other groups, of which no table is known: all blocks that have such a name. What
        somebody else has of it is lost too, be it right or not.
        """
        groups = [group.number for group in self._groups.beside]
        if not groups:
            return set()
        size = self._block_tokens
        contents = {
            content
            for record in preempted
            for content in record.request.block_hashes[record.computed // size :]
        }
        return named(self._pool, contents, groups) if contents else set()
