"""The process behind `ProcessMover`: answers its requests until the connection ends."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from forebay.transfer.arena import HostArena
from forebay.transfer.messages import Report
from forebay.transfer.native import NativeMover
from forebay.transfer.pool import Pool
from forebay.transfer.process import PoolInChild

_LAST_CLOSE_S = 1.0
"""For windows in flight when the parent is gone."""


class _Child:
    def __init__(self) -> None:
        self.mover: NativeMover | None = None
        self._arenas: dict[int, HostArena] = {}

    def answer(self, method: str, arguments: tuple[Any, ...]) -> object:
        if method == "open":
            return self._open(*arguments)
        mover = self.mover
        if mover is None:
            raise RuntimeError("the first request must be to open the mover")
        if method == "hook":
            return getattr(mover.core, arguments[0])(*arguments[1:])
        if method == "wait":
            ids, stream, timeout_s, band = arguments
            return mover.wait(ids, stream, timeout_s, band=band)
        if method == "windows":
            return mover.windows(), mover.windows_dropped
        if method == "close":
            return self._close(mover, *arguments)
        return getattr(mover, method)(*arguments)

    def _open(self, pools: tuple[PoolInChild, PoolInChild], settings: Mapping[str, Any]) -> None:
        device, host = (self._attach(pool) for pool in pools)
        self.mover = NativeMover(device, host, **settings)

    def _attach(self, pool: PoolInChild) -> Pool:
        arena = self._arenas.get(pool.fd)
        if arena is None:
            arena = self._arenas[pool.fd] = HostArena.attach(pool.fd, pool.arena_bytes)
        return Pool(arena.address + pool.offset, pool.slots, pool.fragments, owner=arena)

    def _close(self, mover: NativeMover, timeout_s: float) -> Report:
        mover.close(timeout_s)
        return mover.poll()


def main(fd: int) -> None:
    """Serve the connection on `fd`."""
    child = _Child()
    connection = Connection(fd)
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, arguments = connection.recv()
            try:
                answer = child.answer(method, arguments)
            except Exception as error:  # every error is the parent's to see
                answer = error
            connection.send(answer)
    if child.mover is not None:
        child.mover.close(_LAST_CLOSE_S)


if __name__ == "__main__":
    main(int(sys.argv[1]))
