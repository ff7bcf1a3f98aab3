"""The half in vLLM's worker: the native mover over vLLM's KV tensors.

It carries out orders and decides nothing. Transfers come with a step, or at any time from a half in
the same thread. Each step: what must not read its slots any more is ended before it starts
(`begin`), what it is to find there has landed before its forward pass (`make_ready`), and once it
is launched (`launched`) what waits for it goes on.

On a GPU a step is launched long before it runs, and the next one too. What orders copies against
steps is the same: a step's number counts when the event recorded behind it on vLLM's stream has
come. No stream waits for a load: vLLM finds a block only when its load was seen to have ended, or
the launch of the step that may read it is held until it was.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import SettingsError
from forebay.transfer.host import HostMemory
from forebay.transfer.messages import Completion, Direction, Outcome, Report, Transfer
from forebay.transfer.native import NativeMover
from forebay.vllm.adapter import KVShape
from forebay.vllm.messages import BlockCopy, Expedite, News, Orders
from forebay.vllm.options import Options
from forebay.vllm.seen.measures import Values
from forebay.vllm.tensors import device_of, device_pool, parts_of, warn_of_tensors

_SETTLE_S = 30.0
"""Bound of the wait for a save that was cancelled: two windows of the slowest link."""
_IDLE_S = 0.001
"""How long a step without work waits for news, so that vLLM does not spin through such steps."""
_NEAR_S = 0.004
"""And how long for the end of the loads under way where that is near: vLLM sleeps for a ms behind
such a step, and a load that ends meanwhile is seen later."""
_AWAIT_S = 1.0
"""Bound of the wait for loads before a forward pass, which were about to land when it was ordered:
what takes longer is copied without the mover."""
_CLOSE_S = 10.0

_logger = logging.getLogger("forebay.vllm")


class WorkerHalf:
    """Moves between vLLM's `caches`, by layer or in one piece, and host memory of its own.

    `stream` is the stream that vLLM launches steps on, as a driver's handle, where it has a GPU;
    `drain` waits until whatever was handed to that GPU is over.
    Raises SettingsError for tensors in which a block's bytes cannot be told, and for host memory
    that cannot be had.
    """

    def __init__(
        self,
        shape: KVShape,
        options: Options,
        caches: Mapping[str, Any],
        stream: Callable[[], int] = lambda: 0,
        drain: Callable[[], None] = lambda: None,
    ) -> None:
        device = device_of(caches)
        if device.type == "cuda" and options.copy_bytes_per_s:
            raise SettingsError(
                "copy_bytes_per_s slows copies of the CPU only: leave it away on a GPU"
            )
        index = (device.index or 0) if device.type == "cuda" else None
        slots = options.host_slots(shape.whole_bytes)
        self._stream, self._drain = stream, drain
        self._parts = parts_of(shape, caches)
        if device.type == "cuda":
            warn_of_tensors(self._parts)
        self._host = HostMemory(slots, shape.block_bytes, index)
        try:
            self._mover = NativeMover(
                device_pool(shape, self._parts),
                self._host.pool,
                backend=device.type,
                window_bytes=options.window(shape.block_bytes, slots),
                link_bytes_per_s=options.copy_bytes_per_s,
                device_index=index or 0,
            )
        except BaseException:
            self._host.close()
            raise
        self._caches = caches
        self._block_bytes = shape.block_bytes
        self._step = 0
        self._idle = False
        self._launched = True
        self._told_slots = 0
        self._issued: list[int] = []
        self._completions: list[Completion] = []
        self._completed_step = 0
        # Un-ended transfers, and those that steps wait for.
        self._flying: dict[int, Transfer] = {}
        self._expected: set[int] = set()
        self._copies: Sequence[BlockCopy] = ()
        self._loads_per_s = 0.0
        self._torn: set[int] = set()
        self._settled_s = self._held_s = 0.0

    @property
    def step(self) -> int:
        """The number of the newest step that began."""
        return self._step

    @property
    def idle(self) -> bool:
        """Whether that step computes nothing."""
        return self._idle

    def begin(self, orders: Orders) -> None:
        """A step is about to start. Waits for saves that read slots which it may write."""
        self.launched()
        for step in range(self._step + 1, orders.step):
            self._mover.step_abandoned(step)
        self._step, self._launched, self._idle = orders.step, False, orders.idle
        if orders.settle:
            # Some ended since, and the scheduler has not heard of it yet.
            self._settle(self._flying.keys() & orders.settle)
        self._copies = orders.copies
        self.submit(orders.submit)
        self.cancel(orders.cancel)
        for each in orders.expedite:
            self.expedite(each)

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """Take over transfers, whatever step is under way."""
        if transfers:
            self._mover.submit(transfers)
            self._flying.update((each.id, each) for each in transfers)

    def cancel(self, ids: Sequence[int]) -> None:
        """Stop transfers."""
        if ids:
            self._mover.cancel(ids)

    def expedite(self, each: Expedite) -> None:
        """Raise the urgency of transfers."""
        self._mover.expedite(each.ids, each.transfer_class, each.deadline_s)

    def make_ready(self) -> None:
        """The forward pass of the step is about to be launched, if it has one: waits until all is
        there that it may read. What the mover did not bring by then is copied here.
        """
        if self._idle:
            return
        if self._expected:
            self._await_loads()
        for each in self._copies:
            for part in self._parts:
                # On vLLM's stream, between the steps that wrote the one and read the other.
                part[each.destination].copy_(part[each.source])
        self._copies = ()

    def expect(self, loads: Sequence[int]) -> bool:
        """See `Hands.expect`."""
        there = self._flying.keys() >= set(loads)
        if there:
            self._expected.update(loads)
        return there

    def launched(self) -> None:
        """All work of the step was given to vLLM's stream; on a CPU it has run."""
        if not self._launched:
            self._launched = True
            self._mover.step_launched(self._step, self._stream())

    def step_over(self) -> None:
        """The end of a step, but for its drafts: vLLM may launch those, which write KV, and say
        only then that all is launched. One without work is over, and waits a little for a copy to
        end, if none has.
        """
        if self._idle:
            self.launched()
        self._take()
        if self._idle:
            self._wait_for_an_end()

    def news(self) -> News | None:
        """What is new, if anything is."""
        self._take()
        slots = self._host.ready_slots()
        if not self._issued and not self._completions and slots == self._told_slots:
            return None
        report = Report(tuple(self._issued), tuple(self._completions), self._completed_step)
        self._issued, self._completions, self._told_slots = [], [], slots
        return News(report, slots)

    def counters(self) -> dict[str, Values]:
        """What only a worker can count, by the names of its metrics."""
        return {
            "forebay:settle_seconds": {"": self._settled_s},
            # The scheduler counts the other part of it.
            "forebay:stall_seconds": {"": self._held_s},
        }

    def close(self) -> None:
        """End the mover and give the host memory back."""
        self._mover.close(_CLOSE_S)
        self._host.close()

    def _wait_for_an_end(self) -> None:
        until_s = time.monotonic() + (_NEAR_S if self._near() else _IDLE_S)
        while self._flying and not self._completions:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            self._mover.wait_news(left_s)
            self._take()

    def _near(self) -> bool:
        """Whether all loads under way end soon, at the rate of the last one."""
        left = sum(map(self._load_bytes, self._flying.values()))
        return 0 < left <= self._loads_per_s * _NEAR_S

    def _take(self) -> None:
        report = self._mover.poll()
        self._issued += report.issued
        self._completed_step = report.completed_step
        not_brought: list[Transfer] = []
        for each in report.completions:
            transfer = self._flying.pop(each.id)
            loaded = self._load_bytes(transfer)
            if each.outcome is Outcome.DONE:
                self._expected.discard(each.id)
                if loaded:
                    took_s = each.finished_s - each.started_s
                    self._loads_per_s = loaded / took_s if took_s > 0 else 0.0
            elif each.id in self._expected:
                not_brought.append(transfer)
            self._completions.append(self._as_told(each))
        for transfer in not_brought:
            # What was begun of it may be under way, from host slots that are free from now on.
            self._drain()
            self._copy_here(transfer)

    def _as_told(self, completion: Completion) -> Completion:
        """A save that a step may have written under has saved nothing."""
        if completion.id not in self._torn:
            return completion
        self._torn.discard(completion.id)
        return replace(
            completion,
            outcome=Outcome.FAILED,
            blocks_done=0,
            error="its source was written before it ended",
        )

    def _await_loads(self) -> None:
        began_s = time.monotonic()
        until_s = began_s + _AWAIT_S
        while self._expected and (left_s := until_s - time.monotonic()) > 0:
            self._mover.wait_news(left_s)
            self._take()
        while self._expected:
            self._copy_here(self._flying[min(self._expected)])
        self._held_s += time.monotonic() - began_s

    def _copy_here(self, load: Transfer) -> None:
        """Copy what a load should have brought, without the mover.

        Of an un-ended one the mover's own copy brings the same later: nobody has either end of it
        until it is told to have ended.
        """
        _logger.warning(
            "a step reads %d blocks that load %d did not bring in time: they are copied without it",
            len(load.sources),
            load.id,
        )
        self._expected.discard(load.id)
        # A load waits for them; this would write under them.
        self._settle(self._saves_reading(load.destinations))
        host = self._host.pool
        pairs = zip(load.sources.tolist(), load.destinations.tolist(), strict=True)
        for source, destination in pairs:
            address = host.base_address + source * self._block_bytes
            for part in self._parts:
                # Through plain memory: what is pinned is so in ranges, which no copy may cross.
                piece = part[destination].cpu()
                size = piece.numel() * piece.element_size()
                ctypes.memmove(piece.data_ptr(), address, size)
                part[destination].copy_(piece)
                address += size

    def _saves_reading(self, slots: NDArray[np.int32]) -> set[int]:
        """The un-ended saves that read any of these device slots."""
        saves = (each for each in self._flying.values() if each.direction is Direction.SAVE)
        return {each.id for each in saves if np.isin(each.sources, slots).any()}

    def _load_bytes(self, transfer: Transfer) -> int:
        if transfer.direction is not Direction.LOAD:
            return 0
        return len(transfer.sources) * self._block_bytes

    def _settle(self, saves: set[int]) -> None:
        """End `saves`, or take care that nothing of them is used: those are waited for once."""
        saves = saves - self._torn
        self._mover.cancel(sorted(saves))
        began_s = time.monotonic()
        until_s = began_s + _SETTLE_S
        while saves & self._flying.keys() and time.monotonic() < until_s:
            self._mover.wait_news(0.1)
            self._take()
        self._torn |= saves & self._flying.keys()
        self._settled_s += time.monotonic() - began_s
