"""The last minute in tenths of a second: how busy the model and the link were, and with what.

A step or a copy is known when it has ended, so tenths that were told already may still change: each
carries the number of the change that touched it last, and a reader asks for those behind his own.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from forebay.timeline.recent import Part
from forebay.transfer.messages import Direction, TransferClass

TENTH_S = 0.1
TENTHS = 600

_Floats = NDArray[np.float64]


class LanesWire(msgspec.Struct, frozen=True):
    """Tenths `first`, `first + 1`, ...: percent of each that a kind of work took, and bytes/s."""

    first: int
    decode: list[int]
    prefill: list[int]
    wait: list[int]
    prefetch: list[int]
    demand: list[int]
    save: list[int]
    load_bytes_per_s: list[int]
    save_bytes_per_s: list[int]


_SHARES = ("decode", "prefill", "wait", "prefetch", "demand", "save")
_BYTES = ("load_bytes_per_s", "save_bytes_per_s")


class Lanes:
    """Sums by tenth of a second; `changes` numbers the calls of :meth:`add`."""

    def __init__(self) -> None:
        self.changes = 0
        self._sums = {name: np.zeros(TENTHS) for name in (*_SHARES, *_BYTES)}
        self._changed = np.zeros(TENTHS, np.int64)
        self._newest = -1

    def add(self, part: Part, now_s: float) -> None:
        """Take in what was recorded until `now_s`."""
        self.changes += 1
        self._advance(math.floor(now_s / TENTH_S))
        steps, copies, waits = part.steps, part.copies, part.waits
        prefill = steps["prefill_tokens"] > 0
        self._take("decode", steps[~prefill])
        self._take("prefill", steps[prefill])
        self._take("wait", waits)
        for name, of in (
            ("prefetch", TransferClass.PREFETCH),
            ("demand", TransferClass.DEMAND),
            ("save", TransferClass.SAVE),
        ):
            self._take(name, copies[copies["transfer_class"] == of])
        loads = copies["direction"] == Direction.LOAD
        self._take("load_bytes_per_s", copies[loads], carry_bytes=True)
        self._take("save_bytes_per_s", copies[~loads], carry_bytes=True)

    def since(self, change: int) -> LanesWire:
        """All tenths from the first one that changed after `change` to the newest."""
        order = np.arange(self._newest - TENTHS + 1, self._newest + 1)
        touched = np.flatnonzero(self._changed[order % TENTHS] > change)
        tenths = order[touched[0] :] if len(touched) else order[:0]
        at = tenths % TENTHS
        shares = {
            name: np.minimum(100, np.rint(self._sums[name][at] * (100 / TENTH_S))).astype(int)
            for name in _SHARES
        }
        rates = {name: np.rint(self._sums[name][at] / TENTH_S).astype(int) for name in _BYTES}
        first = int(tenths[0]) if len(tenths) else self._newest + 1
        return LanesWire(first, **{name: row.tolist() for name, row in (shares | rates).items()})

    def _advance(self, newest: int) -> None:
        """Forget what is older than a minute; `newest` is the tenth that is under way."""
        fresh = np.arange(max(self._newest + 1, newest - TENTHS + 1), newest + 1) % TENTHS
        for sums in self._sums.values():
            sums[fresh] = 0.0
        self._changed[fresh] = self.changes
        self._newest = max(self._newest, newest)

    def _take(self, name: str, rows: NDArray[np.void], *, carry_bytes: bool = False) -> None:
        oldest = self._newest - TENTHS + 1
        rows = rows[rows["end_s"] > oldest * TENTH_S]
        if not len(rows):
            return
        starts, ends = rows["start_s"] / TENTH_S, rows["end_s"] / TENTH_S
        ends = np.maximum(ends, starts + 1e-6)
        weights = rows["bytes"] / (ends - starts) if carry_bytes else np.full(len(rows), TENTH_S)
        first = max(oldest, math.floor(float(starts.min())))
        last = min(self._newest, math.floor(float(ends.max())))
        at = np.arange(last + 2 - first, dtype=np.float64)
        total = _ramp(at, starts - first, weights) - _ramp(at, ends - first, weights)
        tenths = np.arange(first, last + 1) % TENTHS
        self._sums[name][tenths] += np.diff(total)
        self._changed[tenths] = self.changes


def _ramp(at: _Floats, begins: _Floats, weights: _Floats) -> _Floats:
    """The sum of `weight * (at - begin)` over all that have begun, for each of `at`."""
    order = np.argsort(begins)
    begun = np.searchsorted(begins[order], at)
    slope = np.concatenate([[0.0], np.cumsum(weights[order])])[begun]
    offset = np.concatenate([[0.0], np.cumsum((weights * begins)[order])])[begun]
    return slope * at - offset
