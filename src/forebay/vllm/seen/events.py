"""KV events: which blocks host memory has, for routers that send requests where their KV is.

vLLM's own events say the same of its block pool, also of blocks that were loaded into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.core.arrays import Ids


@dataclass(frozen=True, slots=True)
class Stored:
    """Host memory has a run of blocks, `parent` the hash of the one before; root first. They are
    of the LoRA of that number and name, if of any.
    """

    hashes: list[bytes]
    parent: bytes | None
    tokens: list[int]
    lora: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """And does not have these any more."""

    hashes: list[bytes]


class HostEvents:
    """Collects events until `take`. A `HostWatch` of the host tier.

    The same content may be in two blocks there: in one that is not matched any more and that a copy
    still reads, and in one that was computed anew. It is gone with the last of them.

    Blocks are ids below `max_blocks` of `block_tokens` tokens, `hash_of` is vLLM's hash of one.
    """

    def __init__(self, max_blocks: int, block_tokens: int, hash_of: Callable[[int], bytes]) -> None:
        self._hash_of = hash_of
        self._parent: Ids = np.full(max_blocks, -1, np.int32)
        self._tokens: NDArray[np.int32] = np.zeros((max_blocks, block_tokens), np.int32)
        # Of all that follow one root it is the same.
        self._lora: dict[int, tuple[int, str]] = {}
        self._events: list[Stored | Removed] = []
        # How many blocks there have each content.
        self._there: dict[bytes, int] = {}

    def named(
        self,
        blocks: Ids,
        parent: int,
        tokens: Sequence[int],
        lora: tuple[int, str] | None = None,
    ) -> None:
        """`blocks` follow one another, the first one `parent` (-1: none), and hold `tokens`; of the
        LoRA of that number and name.
        """
        for block in blocks.tolist():
            if lora is None:
                self._lora.pop(block, None)
            else:
                self._lora[block] = lora
        self._parent[blocks[:1]] = parent
        self._parent[blocks[1:]] = blocks[:-1]
        self._tokens[blocks] = np.array(tokens, np.int32).reshape(len(blocks), -1)

    def saved(self, blocks: Ids) -> None:
        """`blocks` (root first) are in host memory from now on."""
        for run in self._runs(blocks):
            before = int(self._parent[run[0]])
            hashes = [self._hash_of(block) for block in run.tolist()]
            for each in hashes:
                self._there[each] = self._there.get(each, 0) + 1
            self._events.append(
                Stored(
                    hashes,
                    None if before < 0 else self._hash_of(before),
                    self._tokens[run].ravel().tolist(),
                    self._lora.get(int(run[0])),
                )
            )

    def dropped(self, blocks: Ids) -> None:
        """`blocks`, saved before, are not in host memory from now on."""
        gone = [each for each in map(self._hash_of, blocks.tolist()) if self._is_gone(each)]
        if gone:
            self._events.append(Removed(gone))

    @property
    def waiting(self) -> bool:
        """Whether there are events to be taken."""
        return bool(self._events)

    def take(self) -> list[Stored | Removed]:
        """The events since the last time, in order."""
        events, self._events = self._events, []
        return events

    def _runs(self, blocks: Ids) -> Iterator[Ids]:
        """Parts of `blocks` in which each is the parent of the next."""
        breaks = np.flatnonzero(self._parent[blocks[1:]] != blocks[:-1]) + 1
        return (run for run in np.split(blocks, breaks) if len(run))

    def _is_gone(self, content: bytes) -> bool:
        """One block with this content is not there any more. Whether it was the last."""
        left = self._there[content] - 1
        if left:
            self._there[content] = left
        else:
            del self._there[content]
        return not left
