"""What vLLM's block pool hands out, as it tells whoever measures how long blocks stay in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forebay.vllm.adapter import Block, BlockPool


class HandedOut:
    """Takes note of every block that vLLM's pool hands out, and of resets of its cache.

    It is the pool's collector of residency metrics, which is told of both in all versions, and
    passes everything on to the one that was there. vLLM calls it for each block, so the calls are
    the cheapest there are.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._blocks: list[Block] = []
        self._reset = False
        note: Callable[[Block], None] = self._blocks.append
        self.on_block_evicted = note if inner is None else self._note_and_tell
        """Called for each block handed out, whatever was in it, before its hash is dropped."""
        self.on_block_allocated = _nothing if inner is None else inner.on_block_allocated
        self.on_block_accessed = _nothing if inner is None else inner.on_block_accessed

    @classmethod
    def watch(cls, pool: BlockPool) -> HandedOut:
        """Watch `pool` from now on."""
        watch = cls(pool.metrics_collector)
        pool.metrics_collector = watch
        return watch

    def take(self) -> tuple[list[Block], bool]:
        """The blocks handed out since the last time, in order, and whether the cache was reset."""
        taken = self._blocks.copy(), self._reset
        self._blocks.clear()
        self._reset = False
        return taken

    def reset(self) -> None:
        """The prefix cache was reset: nothing is found in it any more."""
        self._reset = True
        if self._inner is not None:
            self._inner.reset()

    def _note_and_tell(self, block: Block) -> None:
        self._blocks.append(block)
        self._inner.on_block_evicted(block)


_nothing: Callable[[Block], object] = callable
"""Of what is called with one object, and changes nothing, the quickest: `id` makes a number, and
since Python 3.12 tells every audit hook.
"""
