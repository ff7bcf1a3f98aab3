"""A mover in another process, over pools in shared memory, whose reports come one poll late.

This is how movers live in an engine with worker processes. Every call is a request and its answer
with a bound; a child that dies, or does not answer, is killed, and its transfers end as FAILED.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import LinkTimeoutError, ProtocolError, SettingsError
from forebay.transfer.arena import HostArena
from forebay.transfer.messages import (
    WINDOW_DTYPE,
    Completion,
    Outcome,
    Report,
    Transfer,
    TransferClass,
)
from forebay.transfer.mover import DEFAULT_WAIT_S, TransferFailedError
from forebay.transfer.pool import Fragment, Pool

_SLICE_S = 0.02
"""Longest time one request may block the child: others wait for it."""
_START_S = 60.0
"""Bound of the child's start: an interpreter and its imports on a busy machine."""
_GONE = "the mover's process is gone: its transfers failed; open a new mover"


@dataclass(frozen=True, slots=True)
class PoolInChild:
    """A pool as the child rebuilds it over the arena it inherited."""

    fd: int
    arena_bytes: int
    offset: int
    slots: int
    fragments: tuple[Fragment, ...]


class _ChildGoneError(Exception):
    pass


class ProcessMover:
    """A `Mover` whose native core runs in a child process. Settings are those of `NativeMover`.

    Each pool must lie in its arena, which must be shared. `reply_timeout_s` bounds every answer.
    Only stream 0 is known: a driver's streams belong to the process that made them.
    """

    def __init__(
        self,
        device: Pool,
        host: Pool,
        device_arena: HostArena,
        host_arena: HostArena,
        *,
        reply_timeout_s: float = 10.0,
        **settings: Any,
    ) -> None:
        pools = (_in_child(device, device_arena), _in_child(host, host_arena))
        self.pools = (device, host)
        self._keep = (device_arena, host_arena)
        self._lock = threading.Lock()
        self._reply_timeout_s = reply_timeout_s
        self._blocks: dict[int, int] = {}
        self._held = Report((), (), 0)
        self._last = Report((), (), 0)
        self._told_step = 0
        self._alive = True
        self._closed = False
        self._windows_dropped = 0
        self._child, self._connection = _start(pools, reply_timeout_s)
        try:
            self._call("open", pools, settings, bound_s=_START_S)
        except _ChildGoneError:
            raise SettingsError("the mover's process did not start") from None
        except BaseException:
            self._end_child()
            raise

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """See `Mover.submit`. After the child's death every transfer ends as FAILED, untouched."""
        if self._closed:
            raise ProtocolError("the mover is closed: open a new one")
        transfers = list(transfers)
        with self._lock:
            if not self._alive:
                self._add_last(tuple(_lost(each.id, 0) for each in transfers))
                return
            self._blocks.update((each.id, len(each.sources)) for each in transfers)
        try:
            self._tell("submit", transfers)
        except BaseException:
            with self._lock:
                for each in transfers:
                    self._blocks.pop(each.id, None)
            raise

    def cancel(self, ids: Sequence[int]) -> None:
        """See `Mover.cancel`."""
        self._tell("cancel", list(ids))

    def expedite(
        self, ids: Sequence[int], transfer_class: TransferClass, deadline_s: float
    ) -> None:
        """See `Mover.expedite`."""
        self._tell("expedite", list(ids), transfer_class, deadline_s)

    def use_bands(self, ids: Sequence[int], ends: Sequence[int]) -> None:
        """See `Mover.use_bands`."""
        self._tell("use_bands", list(ids), list(ends))

    def step_launched(self, step: int, stream: int = 0) -> None:
        """See `Mover.step_launched`."""
        _refuse_stream(stream)
        self._tell("step_launched", step)

    def step_abandoned(self, step: int) -> None:
        """See `Mover.step_abandoned`."""
        self._tell("step_abandoned", step)

    def poll(self) -> Report:
        """What the poll before this one fetched. Once the child ended: all that is left."""
        try:
            fresh: Report = self._call("poll")
        except _ChildGoneError:
            with self._lock:
                report = _merged(self._held, self._last)
                self._held = self._last = Report((), (), report.completed_step)
        else:
            with self._lock:
                for each in fresh.completions:
                    self._blocks.pop(each.id, None)
                report, self._held = self._held, fresh
        self._told_step = report.completed_step
        return report

    def wait(
        self,
        ids: Sequence[int],
        stream: int = 0,
        timeout_s: float = DEFAULT_WAIT_S,
        *,
        band: int | None = None,
    ) -> None:
        """See `Mover.wait`. After the child's death nothing is known of any transfer: it raises
        `TransferFailedError`."""
        _refuse_stream(stream)
        until = time.monotonic() + timeout_s
        while True:
            left_s = until - time.monotonic()
            try:
                self._call("wait", list(ids), 0, max(0.0, min(left_s, _SLICE_S)), band)
                return
            except LinkTimeoutError:
                if left_s <= _SLICE_S:
                    raise LinkTimeoutError(f"no end of {list(ids)} within {timeout_s} s") from None
            except _ChildGoneError:
                raise TransferFailedError(_GONE) from None

    def wait_news(self, timeout_s: float) -> bool:
        """See `Mover.wait_news`."""
        until = time.monotonic() + timeout_s
        while not self._holds_news():
            left_s = until - time.monotonic()
            try:
                if self._call("wait_news", max(0.0, min(left_s, _SLICE_S))):
                    return True
            except _ChildGoneError:
                return True
            if left_s <= _SLICE_S:
                return False
        return True

    def windows(self) -> NDArray[Any]:
        """See `Mover.windows`."""
        try:
            records, self._windows_dropped = self._call("windows")
        except _ChildGoneError:
            return np.empty(0, dtype=WINDOW_DTYPE)
        return records

    @property
    def windows_dropped(self) -> int:
        """See `Mover.windows_dropped`."""
        return self._windows_dropped

    def hook(self, name: str, *arguments: object) -> object:
        """Call a test hook of the child's core."""
        return self._call("hook", name, *arguments)

    def close(self, timeout_s: float) -> None:
        """See `Mover.close`. A child that does not end in time is killed."""
        self._closed = True
        try:
            last: Report = self._call("close", timeout_s, bound_s=timeout_s)
        except _ChildGoneError:
            return
        with self._lock:
            for each in last.completions:
                self._blocks.pop(each.id, None)
            self._last = _merged(self._last, last)
            self._end_child()

    def _holds_news(self) -> bool:
        with self._lock:
            held = self._held
            told = held.issued or held.bands or held.completions
            return bool(told or held.completed_step > self._told_step)

    def _tell(self, method: str, *arguments: object) -> None:
        with contextlib.suppress(_ChildGoneError):
            self._call(method, *arguments)

    def _call(self, method: str, *arguments: object, bound_s: float | None = None) -> Any:
        """The child's answer. Raises what the child raised, `_ChildGoneError` once it is gone."""
        with self._lock:
            if not self._alive:
                raise _ChildGoneError
            try:
                self._connection.send((method, arguments))
                patience_s = self._reply_timeout_s if bound_s is None else bound_s + _SLICE_S
                if not self._connection.poll(patience_s):
                    raise TimeoutError
                answer: Any = self._connection.recv()
            except (EOFError, OSError, TimeoutError):
                self._end_child()
                raise _ChildGoneError from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _end_child(self) -> None:
        """The lock is held, or nobody else knows this object yet."""
        if not self._alive:
            return
        self._alive = False
        self._connection.close()
        try:
            self._child.wait(_SLICE_S * 5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._add_last(tuple(_lost(id_, blocks) for id_, blocks in self._blocks.items()))
        self._blocks.clear()

    def _add_last(self, completions: tuple[Completion, ...]) -> None:
        last = self._last
        self._last = replace(last, completions=last.completions + completions)


def _lost(id_: int, blocks_touched: int) -> Completion:
    now = time.monotonic()
    return Completion(id_, Outcome.FAILED, 0, blocks_touched, 0, now, now, _GONE)


def _merged(first: Report, second: Report) -> Report:
    return Report(
        first.issued + second.issued,
        first.completions + second.completions,
        max(first.completed_step, second.completed_step),
        first.bands + second.bands,
    )


def _refuse_stream(stream: int) -> None:
    if stream != 0:
        raise ProtocolError("a stream of this process means nothing in the mover's: use 0")


def _in_child(pool: Pool, arena: HostArena) -> PoolInChild:
    offset = pool.base_address - arena.address
    ends = [at + (pool.slots - 1) * stride + size for at, stride, size in pool.fragments]
    if offset < 0 or offset + max(ends) > arena.size_bytes:
        raise SettingsError("a pool of a mover in another process must lie in its shared arena")
    return PoolInChild(arena.fd, arena.size_bytes, offset, pool.slots, pool.fragments)


def _start(
    pools: tuple[PoolInChild, PoolInChild], reply_timeout_s: float
) -> tuple[subprocess.Popen[bytes], Connection]:
    mine, theirs = socket.socketpair()
    # Bounds what a stopped child could hold up within a message.
    bound = struct.pack("ll", max(1, int(reply_timeout_s)), 0)
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
    with theirs:
        child = subprocess.Popen(
            [sys.executable, "-m", "forebay.transfer.child", str(theirs.fileno())],
            pass_fds=[theirs.fileno(), *{pool.fd for pool in pools}],
            start_new_session=True,  # an interrupt from the terminal is the parent's to handle
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    return child, Connection(mine.detach())
