"""What is in each block, as vLLM names it: by a hash of all tokens up to there, and its group.

What a load brings is found by vLLM when it has been named. A hash does not say where its block
stands; a request does, whose prompt has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from forebay.core.arrays import Ids
from forebay.vllm.adapter import (
    Block,
    BlockPool,
    VllmRequest,
    cache_run,
    cached_blocks,
    lora_name,
)


class Contents:
    """Names of blocks, which are ids below `max_blocks`, in `pool`. Of a model of one group all are
    of that: `path` is its number, or that of the group whose blocks are the path, of `groups`.
    """

    def __init__(
        self, pool: BlockPool, max_blocks: int, block_tokens: int, groups: int, path: int
    ) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._path = path
        self._hash: dict[int, bytes] = {}
        self._group: NDArray[np.int16] | None = None
        if groups > 1:
            self._group = np.full(max_blocks, path, np.int16)
        # Whose prompt a load is for, by its first block.
        self._loaded_for: dict[int, VllmRequest] = {}
        # What loads brought for LoRAs, by block, and perhaps what is there instead by now.
        self._brought_for: dict[int, str] = {}

    def hash_of(self, block: int) -> bytes:
        """vLLM's hash of what is in `block`, which has a copy in some tier."""
        return self._hash[block]

    def note(self, blocks: Ids, hashes: Sequence[bytes], group: int) -> None:
        """This is in `blocks`, of the group of this number."""
        self._hash.update(zip(blocks.tolist(), hashes, strict=True))
        if self._group is not None:
            self._group[blocks] = group

    def twins(self, blocks: Ids) -> list[Block | None]:
        """For each of `blocks` one of vLLM's that holds the same."""
        found: list[Block | None] = []
        for group, first, last in self._by_group(blocks):
            hashes = map(self._hash.__getitem__, blocks[first:last].tolist())
            found += cached_blocks(self._pool, hashes, group)
        return found

    # -- what loads bring ------------------------------------------------------------------------

    def loads_for(self, request: VllmRequest, blocks: Ids) -> None:
        """One load brings `blocks`, of the prompt of `request`: so vLLM will find them."""
        self._loaded_for[int(blocks[0])] = request

    def name(self, blocks: Ids, slots: Sequence[Block]) -> bool:
        """Let vLLM find what a load of `blocks` brings to `slots`, if somebody can say of which
        prompt they are.
        """
        request = self._loaded_for.pop(int(blocks[0]), None)
        runs = None if request is None else self._runs(request.block_hashes, blocks)
        if request is None or runs is None:
            return False
        lora = lora_name(request)
        if lora is not None:
            self._brought_for.update(dict.fromkeys(blocks.tolist(), lora))
        for group, place, first, last in runs:
            cache_run(self._pool, request, place, slots[first:last], self._block_tokens, group)
        return True

    def disown_loads(self) -> None:
        """What is being loaded is not to be found by anybody."""
        self._loaded_for.clear()

    def disown(self, blocks: Ids) -> None:
        """Nor is what is being loaded to `blocks`."""
        for block in blocks.tolist():
            self._loaded_for.pop(block, None)

    def disown_lora(self, lora: str) -> list[int]:
        """Nor what is being loaded for the LoRA of this name. Returns the blocks that loads brought
        for it.
        """
        kept = {at: each for at, each in self._loaded_for.items() if lora_name(each) != lora}
        self._loaded_for = kept
        brought = [block for block, name in self._brought_for.items() if name == lora]
        for block in brought:
            del self._brought_for[block]
        return brought

    def _runs(self, hashes: list[bytes], blocks: Ids) -> list[tuple[int, int, int, int]] | None:
        """The runs of `blocks` that follow one another in the prompt of these `hashes`: their
        group, the place of the first there, and where the run begins and ends in `blocks`.
        """
        contents = list(map(self._hash.__getitem__, blocks.tolist()))
        runs: list[tuple[int, int, int, int]] = []
        for group, at, last in self._by_group(blocks):
            first, place = at, 0
            while first < last:
                try:
                    place = hashes.index(contents[first], place)
                except ValueError:
                    return None
                length = _alike(hashes[place : place + last - first], contents[first:last])
                runs.append((group, place, first, first + length))
                place, first = place + length, first + length
        return runs

    def _by_group(self, blocks: Ids) -> list[tuple[int, int, int]]:
        """The runs of `blocks` that are of one group, and where each begins and ends."""
        if self._group is None:
            return [(self._path, 0, len(blocks))]
        groups = self._group[blocks]
        ends = [*(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(blocks)]
        starts = [0, *ends[:-1]]
        return [(int(groups[first]), first, last) for first, last in zip(starts, ends, strict=True)]


def _alike(some: Sequence[bytes], others: Sequence[bytes]) -> int:
    """How many of both, from the first, are the same."""
    if some == others:
        return len(some)
    pairs = enumerate(zip(some, others, strict=False))
    differ = (place for place, (one, other) in pairs if one != other)
    return next(differ, min(len(some), len(others)))
