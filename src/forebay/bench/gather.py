"""A kernel that copies scattered fragments out of pinned memory. Needs Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

_WORD_BYTES = 8
_MOST_WORDS = 4096
_WARPS = 32


@triton.jit
def _gather(sources, destinations, count, words: tl.constexpr, chunk: tl.constexpr):
    lanes = tl.arange(0, chunk)
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        source = tl.load(sources + i).to(tl.pointer_type(tl.int64))
        destination = tl.load(destinations + i).to(tl.pointer_type(tl.int64))
        for at in range(0, words, chunk):
            tl.store(destination + at + lanes, tl.load(source + at + lanes))


def gather(sources: torch.Tensor, destinations: torch.Tensor, size_bytes: int, blocks: int) -> None:
    """Copy `size_bytes` from each address in `sources` to that in `destinations` (int64, CUDA).

    Queued on the current stream as one kernel of `blocks` thread blocks. `size_bytes` is a power of
    two.
    """
    words = size_bytes // _WORD_BYTES
    chunk = min(words, _MOST_WORDS)
    launch: Any = _gather
    launch[(blocks,)](sources, destinations, len(sources), words, chunk, num_warps=_WARPS)
