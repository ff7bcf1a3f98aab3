"""A mover over a small pool of device memory and a pinned one, with shorthand for tests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from forebay.transfer.messages import Completion, Direction, Transfer, TransferClass
from forebay.transfer.native import NativeMover
from forebay.transfer.pinned import PinnedArena
from forebay.transfer.pool import Pool

POISON = 0xA5
PATIENCE_S = 30.0


class GpuRig:
    """`slots` blocks of `parts` fragments of `fragment` bytes a side.

    Device memory is [part, slot, fragment] with `gap` bytes of poison behind each fragment.
    """

    def __init__(
        self,
        slots: int = 16,
        parts: int = 4,
        fragment: int = 4096,
        gap: int = 512,
        slice_bytes: int = 1 << 30,
        **settings: Any,
    ) -> None:
        self.slots, self.parts, self.fragment = slots, parts, fragment
        self.block = parts * fragment
        memory = torch.full((parts, slots, fragment + gap), POISON, dtype=torch.uint8)
        self.memory = memory.cuda()
        self.device = self.memory[:, :, :fragment]
        self.arena = PinnedArena(slots * self.block, self.block, slice_bytes=slice_bytes, threads=2)
        assert self.arena.wait_ready(slots * self.block, PATIENCE_S)
        self.host = self.arena.blocks(slots, self.block)
        self.rng = np.random.default_rng(slots)
        self.host[:] = self.rng.integers(0, 256, self.host.shape, dtype=np.uint8)
        settings.setdefault("window_bytes", 3 * fragment + 100)
        self.mover = NativeMover(
            Pool.of([self.device[part] for part in range(parts)]),
            Pool.of([self.host], seam_bytes=self.arena.seam_bytes),
            backend="cuda",
            **settings,
        )
        self._begin()

    @classmethod
    def over(cls, mover: NativeMover) -> GpuRig:
        """The shorthand alone, for a mover over pools of the caller's."""
        rig = cls.__new__(cls)
        rig.mover = mover
        rig._begin()
        return rig

    def _begin(self) -> None:
        self.issued: set[int] = set()
        self.ended: dict[int, Completion] = {}
        self.completed_step = 0
        self.next_id = 1

    def fill_device(self) -> None:
        self.device.copy_(torch.randint(0, 256, self.device.shape, dtype=torch.uint8).cuda())
        torch.cuda.synchronize()

    def device_blocks(self) -> np.ndarray:
        """A copy, [slot, bytes in the host's order]."""
        torch.cuda.synchronize()
        return self.device.cpu().permute(1, 0, 2).reshape(self.slots, self.block).numpy()

    def poisoned(self) -> bool:
        """Whether the bytes between fragments are as they were."""
        torch.cuda.synchronize()
        return bool((self.memory[:, :, self.fragment :] == POISON).all())

    def submit(
        self,
        direction: Direction,
        sources: Sequence[int],
        destinations: Sequence[int],
        *,
        after: int = 0,
        transfer_class: TransferClass = TransferClass.DEMAND,
        deadline_s: float = 0.0,
    ) -> int:
        transfer = Transfer(
            self.next_id,
            direction,
            transfer_class,
            deadline_s,
            np.asarray(sources, np.int32),
            np.asarray(destinations, np.int32),
            np.full(len(sources), after, np.int64),
        )
        self.next_id += 1
        self.mover.submit([transfer])
        return transfer.id

    def load(self, sources: Sequence[int], destinations: Sequence[int], **more: Any) -> int:
        return self.submit(Direction.LOAD, sources, destinations, **more)

    def save(self, sources: Sequence[int], destinations: Sequence[int], **more: Any) -> int:
        return self.submit(Direction.SAVE, sources, destinations, **more)

    def poll(self) -> None:
        report = self.mover.poll()
        self.issued |= set(report.issued)
        self.ended |= {each.id: each for each in report.completions}
        self.completed_step = report.completed_step

    def until(self, holds) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < end_s, "it did not come to hold in time"
            self.mover.wait_news(0.05)
            self.poll()

    def end_of(self, id_: int) -> Completion:
        self.until(lambda: id_ in self.ended)
        return self.ended[id_]

    def close(self) -> None:
        self.mover.close(10.0)
        self.poll()
        torch.cuda.synchronize()
        self.arena.close()
