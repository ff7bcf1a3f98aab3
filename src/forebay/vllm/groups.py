"""The KV-cache groups of a model: layers that share a block table, and what a hit needs of each.

vLLM gives layers of one kind a block table of their own, and blocks of all groups come from one
pool: a block has the same bytes whichever group has it. All layers of one group keep all KV: its
blocks are the path that is matched. Of each other group a hit needs, where it ends, all blocks up
to there, or, where its layers look back through a window, the last ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Group:
    """One beside the path: vLLM's number of it, and its last blocks that a hit needs (0: all), of
    layers that look back through so many tokens.
    """

    number: int
    window: int = 0
    window_tokens: int = 0

    def first(self, end: int) -> int:
        """The first place of which a hit needs a block that ends before place `end`."""
        return max(0, end - self.window) if self.window else 0


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of a model: vLLM's number of the one whose blocks are the path, and the others."""

    path: int = 0
    beside: tuple[Group, ...] = ()

    def __len__(self) -> int:
        return 1 + len(self.beside)

    def blocks_beside(self, end: int) -> int:
        """Blocks that a hit of `end` blocks needs beside its path."""
        return sum(end - group.first(end) for group in self.beside)


ONE_GROUP = Groups()
"""Those of most models."""


def read_groups(kv_cache_config: Any) -> Groups:
    """The groups in vLLM's `KVCacheConfig`, of kinds that :func:`reasons_of` finds nothing with."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    path = next((n for n, spec in enumerate(specs) if not _window(spec)), 0)
    others = ((number, spec) for number, spec in enumerate(specs) if number != path)
    beside = (Group(number, _window_blocks(spec), _window(spec)) for number, spec in others)
    return Groups(path, tuple(beside))


def reasons_of(kv_cache_config: Any) -> list[tuple[bool, str]]:
    """Why a model of several groups is not supported: each reason, and whether it holds."""
    groups = kv_cache_config.kv_cache_groups
    specs = [group.kv_cache_spec for group in groups]
    kinds = sorted({type(spec).__name__ for spec in specs} - {_FULL, _WINDOW})
    count = f"{len(groups)} KV-cache groups"
    sizes = set[tuple[int, int]]()
    if not kinds:
        sizes = {(int(spec.block_size), int(spec.page_size_bytes)) for spec in specs}
    return [
        (bool(kinds), f"{count}, some of the kind {', '.join(kinds)}"),
        (_FULL not in {type(spec).__name__ for spec in specs}, f"{count} without full attention"),
        (len(sizes) > 1, f"{count} with blocks of different sizes"),
        (
            any(type(spec).__name__ == _FULL and _window(spec) for spec in specs),
            f"{count}, one of them of full attention over a window",
        ),
        (
            any(getattr(group, "is_eagle_group", False) for group in groups)
            or any(getattr(spec, "extra_retained_tokens", 0) for spec in specs),
            f"{count} with draft layers",
        ),
        (
            any(getattr(spec, "prefix_replay_tokens", 0) for spec in specs),
            f"{count}, one of which computes the end of a hit again",
        ),
    ]


_FULL, _WINDOW = "FullAttentionSpec", "SlidingWindowSpec"


def _window(spec: Any) -> int:
    """The tokens that layers look back through; 0 for all."""
    return int(
        getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0
    )


def _window_blocks(spec: Any) -> int:
    """Blocks before a token that it may read: of the window all but its own, and at least one, of
    which vLLM asks that somebody has it.
    """
    window = _window(spec)
    return max(1, -(-(window - 1) // int(spec.block_size))) if window else 0
