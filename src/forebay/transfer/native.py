"""The mover of this process: the native core with its arbiter threads.

Nothing is done per block in Python: `submit` hands numpy arrays over as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay import _native
from forebay.errors import LinkTimeoutError, NotIssuedError
from forebay.transfer.messages import (
    WINDOW_DTYPE,
    Completion,
    Outcome,
    Report,
    Transfer,
    TransferClass,
)
from forebay.transfer.mover import DEFAULT_WAIT_S, TransferFailedError, id_array
from forebay.transfer.pinned import PinnedArena
from forebay.transfer.pool import Pool

DEFAULT_WINDOW_BYTES = 8 << 20
"""Two lanes of 8 MiB windows carry 98 % of a PCIe 5 link while a foreign copy waits 0.17 ms."""

DEFAULT_SPIN_S = 20e-6
"""A small part of a window's time: long enough that the next window is rarely late."""

_READY, _NOT_ISSUED, _FAILED, _TIMEOUT = range(4)
_OUTCOMES = tuple(Outcome)


class NativeMover:
    """A `Mover` over a device pool and a host pool of this process.

    `backend` is "cpu" (copies by the lanes' own threads), "cuda" (a GPU's copy engines) or "sim"
    (streams with a driver's rules and seeded delays, for tests). `link_bytes_per_s` slows each
    direction of "cpu" to a link's rate; 0 does not. `window_bytes` trades rate against how long an
    urgent copy waits.
    A window that does not end within `window_timeout_s` counts as lost and fails its transfer.

    On "cuda", device `device_index`, both pools lie where that device reaches them (the host pool
    pinned). A thread that waits asks the driver for `spin_s` without pause before it sleeps
    between questions. `timing` takes the times of :meth:`windows` on the device, at a cost per
    window; `piece_by_piece` is how drivers before CUDA 12.8 copy.
    Raises `SettingsError` for pools that do not fit each other and settings out of range.
    """

    def __init__(
        self,
        device: Pool,
        host: Pool,
        *,
        backend: str = "cpu",
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        lanes: int = 2,
        link_bytes_per_s: float = 0.0,
        window_timeout_s: float = 60.0,
        most_transfers: int = 1 << 16,
        window_records: int = 1 << 14,
        seed: int = 0,
        longest_delay_s: float = 0.0,
        device_index: int = 0,
        spin_s: float = DEFAULT_SPIN_S,
        timing: bool = False,
        piece_by_piece: bool = False,
    ) -> None:
        self._pools = (device, host)
        self._core = _native.Core(
            backend,
            _layout(device),
            _layout(host),
            window_bytes=window_bytes,
            lanes=lanes,
            link_bytes_per_s=link_bytes_per_s,
            window_timeout_s=window_timeout_s,
            most_transfers=most_transfers,
            window_records=window_records,
            seed=seed,
            longest_delay_s=longest_delay_s,
            device_index=device_index,
            spin_s=spin_s,
            timing=timing,
            piece_by_piece=piece_by_piece,
        )
        self._windows_dropped = 0
        self._pinned = PinnedArena.lend(host.base_address, self)

    @property
    def pools(self) -> tuple[Pool, Pool]:
        """The device pool and the host pool."""
        return self._pools

    @property
    def core(self) -> _native.Core:
        """The native object, for its test hooks."""
        return self._core

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """See `Mover.submit`."""
        self._core.submit(transfers)

    def cancel(self, ids: Sequence[int]) -> None:
        """See `Mover.cancel`."""
        self._core.cancel(id_array(ids))

    def expedite(
        self, ids: Sequence[int], transfer_class: TransferClass, deadline_s: float
    ) -> None:
        """See `Mover.expedite`."""
        self._core.expedite(id_array(ids), transfer_class, deadline_s)

    def use_bands(self, ids: Sequence[int], ends: Sequence[int]) -> None:
        """See `Mover.use_bands`."""
        self._core.use_bands(id_array(ids), [int(end) for end in ends])

    def step_launched(self, step: int, stream: int = 0) -> None:
        """See `Mover.step_launched`."""
        self._core.step_launched(step, stream)

    def step_abandoned(self, step: int) -> None:
        """See `Mover.step_abandoned`."""
        self._core.step_abandoned(step)

    def poll(self) -> Report:
        """See `Mover.poll`."""
        issued, bands, completions, completed_step = self._core.poll()
        return Report(
            issued,
            tuple(Completion(each[0], _OUTCOMES[each[1]], *each[2:]) for each in completions),
            completed_step,
            bands,
        )

    def wait(
        self,
        ids: Sequence[int],
        stream: int = 0,
        timeout_s: float = DEFAULT_WAIT_S,
        *,
        band: int | None = None,
    ) -> None:
        """See `Mover.wait`."""
        through = -1 if band is None else band
        verdict, culprit = self._core.wait(id_array(ids), stream, timeout_s, through)
        if verdict == _READY:
            return
        if verdict == _NOT_ISSUED:
            raise NotIssuedError(
                f"transfer {culprit} is not issued: wait for it only after poll() reported it"
            )
        if verdict == _FAILED:
            raise TransferFailedError(f"transfer {culprit} failed: recompute its blocks")
        raise LinkTimeoutError(f"transfer {culprit} did not end within {timeout_s} s")

    def wait_news(self, timeout_s: float) -> bool:
        """See `Mover.wait_news`."""
        return self._core.wait_news(timeout_s)

    def windows(self) -> NDArray[Any]:
        """See `Mover.windows`."""
        records, self._windows_dropped = self._core.windows()
        return np.frombuffer(records, dtype=WINDOW_DTYPE)

    def when(self, driver_event: int) -> float | None:
        """When an event of the driver, made with timing, completed: `time.monotonic`, as the times
        of `windows` are. None if it has not, or without `timing`."""
        return self._core.when(driver_event)

    @property
    def windows_dropped(self) -> int:
        """See `Mover.windows_dropped`."""
        return self._windows_dropped

    def close(self, timeout_s: float) -> None:
        """See `Mover.close`."""
        self._core.close(timeout_s)
        if self._pinned is not None:
            self._pinned.take_back(self)


def _layout(pool: Pool) -> _native.PoolLayout:
    fragments = list(pool.fragments)
    return _native.PoolLayout(pool.base_address, pool.slots, fragments, pool.seam_bytes)
