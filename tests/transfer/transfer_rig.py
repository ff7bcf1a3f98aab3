"""A mover over small pools, in this process or in another one, with shorthand for tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.transfer.arena import HostArena
from forebay.transfer.messages import Completion, Direction, Transfer, TransferClass
from forebay.transfer.native import NativeMover
from forebay.transfer.pool import Pool
from forebay.transfer.process import ProcessMover

LAYERS = 3
PART = 1013
"""Bytes of one layer's K or V of a block; odd, so that windows cut everywhere."""
BLOCK = 2 * LAYERS * PART
PATIENCE_S = 20.0


class Rig:
    """`slots` blocks a side: [layer, K/V, slot, ...] on the device, contiguous on the host."""

    def __init__(self, kind: str, slots: int = 24, **settings: Any) -> None:
        settings.setdefault("window_bytes", 5003)
        self.slots = slots
        self.device_arena = HostArena(slots * BLOCK, shared=True)
        self.host_arena = HostArena(slots * BLOCK, shared=True)
        self.device = self.device_arena.bytes.reshape(LAYERS, 2, slots, PART)
        self.host = self.host_arena.blocks(slots, BLOCK)
        rng = np.random.default_rng(5)
        self.device[:] = rng.integers(0, 256, self.device.shape, dtype=np.uint8)
        self.host[:] = rng.integers(0, 256, self.host.shape, dtype=np.uint8)
        device = Pool.of([self.device[at, kv] for at in range(LAYERS) for kv in range(2)])
        host = Pool.of([self.host])
        self.mover: NativeMover | ProcessMover
        if kind == "process":
            self.mover = ProcessMover(device, host, self.device_arena, self.host_arena, **settings)
            self.hook: Callable[..., Any] = self.mover.hook
        else:
            native = NativeMover(device, host, **settings)
            self.mover = native
            self.hook = lambda name, *arguments: getattr(native.core, name)(*arguments)
        self.issued: list[int] = []
        self.bands: dict[int, int] = {}
        self.completions: dict[int, Completion] = {}
        self.completed_step = 0
        self._next_id = 1

    def device_block(self, slot: int) -> NDArray[np.uint8]:
        """A copy of the block's bytes in the host's order."""
        return self.device[:, :, slot].reshape(-1).copy()

    def transfer(
        self,
        direction: Direction,
        sources: list[int],
        destinations: list[int],
        *,
        after: list[int] | None = None,
        transfer_class: TransferClass = TransferClass.DEMAND,
        deadline_s: float = 0.0,
    ) -> Transfer:
        id_ = self._next_id
        self._next_id += 1
        return Transfer(
            id_,
            direction,
            transfer_class,
            deadline_s,
            np.array(sources, np.int32),
            np.array(destinations, np.int32),
            np.array(after or [0] * len(sources), np.int64),
        )

    def load(self, sources: list[int], destinations: list[int], **more: Any) -> int:
        transfer = self.transfer(Direction.LOAD, sources, destinations, **more)
        self.mover.submit([transfer])
        return transfer.id

    def save(self, sources: list[int], destinations: list[int], **more: Any) -> int:
        more.setdefault("transfer_class", TransferClass.SAVE)
        transfer = self.transfer(Direction.SAVE, sources, destinations, **more)
        self.mover.submit([transfer])
        return transfer.id

    def hold(self, direction: Direction, lanes: int = 2) -> None:
        for lane in range(lanes):
            self.hook("hold_lane", direction, lane)

    def release(self, direction: Direction, lanes: int = 2) -> None:
        for lane in range(lanes):
            self.hook("release_lane", direction, lane)

    def poll(self) -> None:
        report = self.mover.poll()
        self.issued += report.issued
        self.bands |= dict(report.bands)
        for each in report.completions:
            assert each.id not in self.completions, "one completion for each transfer"
            self.completions[each.id] = each
        assert report.completed_step >= self.completed_step
        self.completed_step = report.completed_step

    def until(self, condition: Callable[[], bool], within_s: float = PATIENCE_S) -> bool:
        end_s = time.monotonic() + within_s
        while True:
            self.poll()
            if condition():
                return True
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            self.mover.wait_news(left_s)

    def ended(self, id_: int, within_s: float = PATIENCE_S) -> bool:
        return self.until(lambda: id_ in self.completions, within_s)

    def is_issued(self, id_: int, within_s: float = PATIENCE_S) -> bool:
        return self.until(lambda: id_ in self.issued, within_s)

    def random_moves(
        self,
        rng: np.random.Generator,
        count: int,
        begun: Callable[[int, bool], None] = lambda _id, _load: None,
    ) -> None:
        """So many loads and saves of random blocks leave what one after the other would.

        `begun` is told each as soon as it is submitted, and whether it is a load.
        """
        device = [self.device_block(slot) for slot in range(self.slots)]
        host = [self.host[slot].copy() for slot in range(self.slots)]
        ids: list[int] = []
        for _ in range(count):
            blocks = int(rng.integers(1, 7))
            sources = rng.integers(0, self.slots, blocks).tolist()
            destinations = rng.integers(0, self.slots, blocks).tolist()
            load = bool(rng.integers(0, 3))
            move = self.load if load else self.save
            kind = TransferClass(int(rng.integers(0, 3)))
            ids.append(move(sources, destinations, transfer_class=kind))
            begun(ids[-1], load)
            pools = (host, device) if load else (device, host)
            for at, to in zip(sources, destinations, strict=True):
                pools[1][to] = pools[0][at]
        assert all(self.ended(id_) for id_ in ids)
        for slot in range(self.slots):
            np.testing.assert_array_equal(self.device_block(slot), device[slot])
            np.testing.assert_array_equal(self.host[slot], host[slot])

    def order(self) -> list[int]:
        """Transfers in the order of their windows' start."""
        windows = np.sort(self.mover.windows(), order="start_s")
        ids = [int(each) for each in windows["transfer"]]
        return ids[:1] + [after for before, after in pairwise(ids) if after != before]

    def close(self) -> None:
        self.mover.close(5.0)
        del self.device, self.host
        self.device_arena.close()
        self.host_arena.close()


MakeRig = Callable[..., Rig]
