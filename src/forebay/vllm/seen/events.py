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
    group: int = 0
    """vLLM's number of the group of layers whose KV it is."""


@dataclass(frozen=True, slots=True)
class Removed:
    """And does not have these any more."""

    hashes: list[bytes]
    group: int = 0


class HostEvents:
    """Collects events until `take`. A `HostWatch` of the host tier.

    The same content may be in two blocks there: in one that is not matched any more and that a copy
    still reads, and in one that was computed anew. It is gone with the last of them.

    Blocks are ids below `max_blocks` of `block_tokens` tokens, `hash_of` is vLLM's hash of one, and
    `path` the number of the group whose blocks are the path.
    """

    def __init__(
        self, max_blocks: int, block_tokens: int, hash_of: Callable[[int], bytes], path: int = 0
    ) -> None:
        self._hash_of = hash_of
        self._path = path
        # Of blocks of other groups: which, and the hash of the one before it.
        self._beside: dict[int, tuple[int, bytes | None]] = {}
        self._parent: Ids = np.full(max_blocks, -1, np.int32)
        self._tokens: NDArray[np.int32] = np.zeros((max_blocks, block_tokens), np.int32)
        # Of all that follow one root it is the same.
        self._lora: dict[int, tuple[int, str]] = {}
        self._events: list[Stored | Removed] = []
        # How many blocks there have each content, of each group.
        self._there: dict[tuple[int, bytes], int] = {}

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
            self._beside.pop(block, None)
            if lora is None:
                self._lora.pop(block, None)
            else:
                self._lora[block] = lora
        self._parent[blocks[:1]] = parent
        self._parent[blocks[1:]] = blocks[:-1]
        self._tokens[blocks] = np.array(tokens, np.int32).reshape(len(blocks), -1)

    def named_beside(
        self,
        block: int,
        parent: bytes | None,
        tokens: Sequence[int],
        lora: tuple[int, str] | None,
        group: int,
    ) -> None:
        """`block`, of another group than the path, follows one of this hash (None: none) there."""
        self.named(np.array([block], np.int32), -1, tokens, lora)
        self._beside[block] = group, parent

    def saved(self, blocks: Ids) -> None:
        """`blocks` (root first) are in host memory from now on."""
        for run in self._runs(blocks):
            group, parent = self._stands(int(run[0]))
            hashes = [self._hash_of(block) for block in run.tolist()]
            for each in hashes:
                self._there[group, each] = self._there.get((group, each), 0) + 1
            tokens = self._tokens[run].ravel().tolist()
            self._events.append(Stored(hashes, parent, tokens, self._lora.get(int(run[0])), group))

    def dropped(self, blocks: Ids) -> None:
        """`blocks`, saved before, are not in host memory from now on."""
        gone: dict[int, list[bytes]] = {}
        for block in blocks.tolist():
            (group, _), content = self._stands(block), self._hash_of(block)
            if self._is_gone(group, content):
                gone.setdefault(group, []).append(content)
        self._events += [Removed(hashes, group) for group, hashes in gone.items()]

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

    def _stands(self, block: int) -> tuple[int, bytes | None]:
        """The group of `block`, and the hash of the one before it."""
        beside = self._beside.get(block)
        if beside is not None:
            return beside
        before = int(self._parent[block])
        return self._path, None if before < 0 else self._hash_of(before)

    def _is_gone(self, group: int, content: bytes) -> bool:
        """One block with this content is not there any more. Whether it was the last."""
        left = self._there[group, content] - 1
        if left:
            self._there[group, content] = left
        else:
            del self._there[group, content]
        return not left
