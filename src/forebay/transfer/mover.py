"""The one face of everything that moves blocks.

A mover copies blocks between a host pool and a device pool, many at a time, and decides nothing but
the order in which windows go over the link. It may live in another process and report late; nothing
here assumes otherwise. Every call is safe from any thread and returns soon, the waits within their
bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forebay.errors import ForebayError
from forebay.transfer.messages import Report, Transfer, TransferClass

DEFAULT_WAIT_S = 30.0
"""Bound of a wait for issued transfers: two windows of the slowest link one would want."""


class TransferFailedError(ForebayError):
    """A wait for a transfer that failed: its blocks are not there. Treat them as a miss."""


class Mover(Protocol):
    """See the module's text. `stream` is a driver's handle; 0 is the calling thread."""

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """Take over transfers, all or none.

        Their slots belong to the mover until the completion says otherwise. A copy also waits, slot
        by slot, for earlier transfers that write what it reads or use what it writes.

        Raises `ProtocolError` for an id not larger than all before, a slot that does not exist,
        arrays of other types or of unequal length, too many transfers not polled, a closed mover.
        """
        ...

    def cancel(self, ids: Sequence[int]) -> None:
        """Stop handing over windows of these transfers.

        Only marks: a completion follows when nothing of the transfer is in flight. One that was
        already handed over whole ends as DONE. Unknown and ended ids are ignored.
        """
        ...

    def expedite(
        self, ids: Sequence[int], transfer_class: TransferClass, deadline_s: float
    ) -> None:
        """Raise the urgency of these transfers to this class and deadline; never lowers it.

        Holds from the next window on. Unknown and ended ids are ignored.
        """
        ...

    def use_bands(self, ids: Sequence[int], ends: Sequence[int]) -> None:
        """What is left of these loads goes band by band, so that the first layers arrive first.

        Band b of a block ends at its byte `ends[b]`; the last of them is the block's end. A load
        that goes so, or of which nothing is left, goes on as it does; unknown and ended ids are
        ignored. Raises `ProtocolError` for a save, and for ends that do not rise to the block's.
        """
        ...

    def step_launched(self, step: int, stream: int = 0) -> None:
        """Say that all work of `step` has been given to `stream`. With stream 0 it has run.

        Raises `ProtocolError` for a step that was launched or abandoned before, `DeviceError` where
        its end could never be seen: a device that broke, a stream that is being captured.
        """
        ...

    def step_abandoned(self, step: int) -> None:
        """Say that `step` will never be launched. It counts once all lower steps do."""
        ...

    def poll(self) -> Report:
        """Everything new since the last poll, without blocking."""
        ...

    def wait(
        self,
        ids: Sequence[int],
        stream: int = 0,
        timeout_s: float = DEFAULT_WAIT_S,
        *,
        band: int | None = None,
    ) -> None:
        """Make `stream` wait for these transfers, or for their bands up to `band`. With stream 0
        the caller blocks until they end.

        Raises `NotIssuedError` for one not issued as far yet (and for one that was cancelled
        before it was), `TransferFailedError` for one known to have failed, `LinkTimeoutError` after
        `timeout_s`. A transfer whose completion was polled as DONE is no wait.
        """
        ...

    def wait_news(self, timeout_s: float) -> bool:
        """Block until something new is there or on its way, for at most `timeout_s`.

        True means that polling, at most twice, returns it. Also true once closed.
        """
        ...

    def windows(self) -> NDArray[Any]:
        """Drain the windows that landed, oldest first, as `WINDOW_DTYPE`.

        At most the newest few thousand are kept; `windows_dropped` counts the others.
        """
        ...

    @property
    def windows_dropped(self) -> int:
        """Windows that nobody drained in time, as of the last `windows()`."""
        ...

    def close(self, timeout_s: float) -> None:
        """End every thread within `timeout_s`. Idempotent.

        Nothing more is handed over; what is in flight may land until then. Every transfer not ended
        gets its completion, which `poll` still returns. The pools may be freed afterwards.
        """
        ...


def id_array(ids: Sequence[int]) -> NDArray[np.int64]:
    """`ids` as the core takes them."""
    return np.ascontiguousarray(ids, dtype=np.int64)
