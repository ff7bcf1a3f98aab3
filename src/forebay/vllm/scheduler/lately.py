"""Conversations that ended lately: what they left on the device is likely to be asked for again.

An answer is often followed by the next turn within moments. Until then nobody waits for the
conversation's blocks, and look-ahead would give them up for somebody whose turn is far away, only
to load them again. So they are kept for a moment, as if they were waited for, and the last of all
that are: a load that is due takes them first. Where conversations do not come back so soon, nothing
is kept.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from forebay.core.arrays import EMPTY_IDS, Ids
from forebay.core.rates import Average
from forebay.vllm.scheduler.pool import VllmDevicePool

_MOMENT_S = 1.0
"""What comes back later was gone for good, as far as a pool of seconds is concerned."""
_LEAST_SHARE = 0.3
"""Of those that ended so many come back within a moment, or nothing is kept."""
_MOST = 256


@dataclass(slots=True)
class _Ended:
    blocks: Ids
    size: int
    last: int
    until_s: float
    kept: bool
    back: bool = False


class Lately:
    """Keeps in `device` what conversations left that ended a moment ago."""

    def __init__(self, device: VllmDevicePool) -> None:
        self._device = device
        self._ended: deque[_Ended] = deque()
        self._share_back = Average(1.0, weight=0.05, samples=1)

    def __len__(self) -> int:
        return len(self._ended)

    def ended(self, path: Ids, now_s: float, beside: Ids = EMPTY_IDS) -> None:
        """A request ended whose blocks (root first) are `path`; hits need those `beside` it too."""
        if not len(path):
            return
        while len(self._ended) >= _MOST:
            self._let_go(self._ended.popleft())
        kept = self._share_back.value >= _LEAST_SHARE
        blocks = np.concatenate([path, beside]) if len(beside) else path
        if kept:
            self._device.keep(blocks)
        ended = _Ended(blocks, len(path), int(path[-1]), now_s + _MOMENT_S, kept)
        self._ended.append(ended)

    def came(self, path: Ids) -> None:
        """A request came that finds `path` (root first)."""
        for each in self._ended:
            size = each.size
            if not each.back and size <= len(path) and path.item(size - 1) == each.last:
                each.back = True

    def expire(self, now_s: float) -> None:
        """What ended longer ago is not kept any more."""
        while self._ended and self._ended[0].until_s <= now_s:
            self._let_go(self._ended.popleft())

    def drop_all(self) -> None:
        """Nothing is kept."""
        while self._ended:
            self._let_go(self._ended.popleft())

    def _let_go(self, ended: _Ended) -> None:
        self._share_back.add(float(ended.back))
        if ended.kept:
            self._device.keep_no_more(ended.blocks)
