"""The toy machine over real memory and a real mover, in this process or in another.

A slot holds one 64-bit hash for each token. A step checks and writes when it is launched, as on a
CPU; copies run meanwhile, on the mover's own threads.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from fakes import LAYERS, LaunchedStep, RealClock

from forebay.transfer.arena import HostArena
from forebay.transfer.messages import Report, Transfer, TransferClass
from forebay.transfer.native import NativeMover
from forebay.transfer.pool import Pool
from forebay.transfer.process import ProcessMover

POISON = -1


class RealMachine:
    """Device and host memory under a `NativeMover` or a `ProcessMover`."""

    def __init__(
        self, kind: str, block_tokens: int, device_slots: int, host_slots: int, seed: int
    ) -> None:
        block = 8 * block_tokens
        self.block_tokens = block_tokens
        self.clock = RealClock()
        self.rng = random.Random(seed)
        self.late_reports = kind == "process"
        self._device_arena = HostArena(device_slots * block, shared=True)
        self._host_arena = HostArena(max(1, host_slots) * block, shared=True)
        self.device = self._device_arena.bytes.view(np.int64).reshape(device_slots, block_tokens)
        self.host = self._host_arena.bytes.view(np.int64).reshape(-1, block_tokens)
        self.device[:] = POISON
        self.host[:] = POISON
        device, host = Pool.of([self.device]), Pool.of([self.host])
        more: dict[str, Any] = {"window_bytes": 3 * block // 2, "link_bytes_per_s": 2e6}
        self.mover: NativeMover | ProcessMover
        if kind == "process":
            self.mover = ProcessMover(device, host, self._device_arena, self._host_arena, **more)
        else:
            self.mover = NativeMover(device, host, **more)
        self.steps: deque[LaunchedStep] = deque()
        self.flying: set[int] = set()
        self.blocks_read = 0

    def submit(self, transfers: Sequence[Transfer]) -> None:
        self.flying.update(transfer.id for transfer in transfers)
        self.mover.submit(transfers)

    def cancel(self, ids: Sequence[int]) -> None:
        self.mover.cancel(ids)

    def expedite(
        self, ids: Sequence[int], transfer_class: TransferClass, deadline_s: float
    ) -> None:
        self.mover.expedite(ids, transfer_class, deadline_s)

    def use_bands(self, ids: Sequence[int], ends: Sequence[int]) -> None:
        # Its blocks are smaller than the settings say, so that their copies end soon.
        self.mover.use_bands(ids, [end * 8 * self.block_tokens // ends[-1] for end in ends])

    def step_launched(self, step: int, stream: int = 0) -> None:
        launched = self.steps.popleft()
        assert launched.number == step
        for slots, start, hashes in launched.work:
            self._run(np.asarray(slots), start, np.asarray(hashes, np.int64))
        self.mover.step_launched(step, stream)

    def step_abandoned(self, step: int) -> None:
        self.mover.step_abandoned(step)

    def poll(self) -> Report:
        report = self.mover.poll()
        self.flying -= {completion.id for completion in report.completions}
        return report

    def wait(
        self,
        ids: Sequence[int],
        stream: int = 0,
        timeout_s: float = 30.0,
        *,
        band: int | None = None,
    ) -> None:
        self.mover.wait(ids, stream, timeout_s, band=band)

    def wait_news(self, timeout_s: float) -> bool:
        return self.mover.wait_news(timeout_s)

    def windows(self) -> Any:
        return self.mover.windows()

    @property
    def windows_dropped(self) -> int:
        return self.mover.windows_dropped

    def close(self, timeout_s: float) -> None:
        self.mover.close(timeout_s)

    def make_progress(self, rounds: int = 1) -> None:
        """Let real time pass for the mover's threads."""
        self.mover.wait_news(2e-4 * rounds)

    def run_step(self) -> bool:
        """Steps run at their launch: none is left."""
        return False

    def read_layer(self, slots: list[int], start: int, hashes: list[int], layer: int) -> None:
        """What a layer that starts before the others reads, at the time when it does."""
        positions = np.arange(start)
        mine = positions[positions % self.block_tokens * LAYERS // self.block_tokens == layer]
        read = self.device[np.asarray(slots)[mine // self.block_tokens], mine % self.block_tokens]
        assert (read == np.asarray(hashes, np.int64)[mine]).all(), f"layer {layer} read too soon"

    def _run(self, slots: np.ndarray, start: int, hashes: np.ndarray) -> None:
        positions = np.arange(len(hashes))
        where = slots[positions // self.block_tokens], positions % self.block_tokens
        read = self.device[where[0][:start], where[1][:start]]
        wrong = np.flatnonzero(read != hashes[:start])
        assert not len(wrong), f"token {wrong[0]}: read {read[wrong[0]]}, wrote {hashes[wrong[0]]}"
        self.blocks_read += start // self.block_tokens
        self.device[where[0][start:], where[1][start:]] = hashes[start:]
