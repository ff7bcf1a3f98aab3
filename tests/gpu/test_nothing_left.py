"""Thousands of random calls leave nothing behind: no event, lease, slot, or byte of any memory."""

from __future__ import annotations

import random
import resource
import warnings
from collections import deque
from typing import Any

import numpy as np
import torch
from fakes import LAYERS, LaunchedStep, RealClock
from gpu_rig import PATIENCE_S, GpuRig
from invariants import check, nothing_left
from world import BLOCK_TOKENS, World

from forebay.config import BatchSettings, CacheSettings
from forebay.core.modes import Mode
from forebay.transfer.messages import Outcome, TransferClass
from forebay.transfer.native import NativeMover
from forebay.transfer.pinned import PinnedArena
from forebay.transfer.pool import Pool

CALLS = 10_000
TURNS = 4_000
BLOCK_BYTES = 8 * BLOCK_TOKENS
MIB = 1 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class Chaos:
    """Random calls of a mover, as an engine could make them in any order."""

    def __init__(self, rig: GpuRig, seed: int) -> None:
        self.rig = rig
        self.rng = random.Random(seed)
        self.stream = torch.cuda.Stream()
        self.live: list[int] = []
        self.step = 0

    def run(self, calls: int) -> None:
        kinds = [self._load, self._save, self._cancel, self._expedite, self._launch, self._wait]
        for _ in range(calls):
            self.rng.choices(kinds, [5, 5, 2, 2, 2, 2])[0]()
            self.rig.poll()
            self.live = [each for each in self.live if each not in self.rig.ended]
            if len(self.live) > 200:
                self.rig.end_of(self.live[0])
        for each in self.live:
            self.rig.end_of(each)
        self.live.clear()
        self.stream.synchronize()
        self.rig.until(lambda: self.rig.completed_step == self.step)

    def _slots(self) -> tuple[list[int], list[int]]:
        count = self.rng.randint(1, 8)
        return self.rng.sample(range(32), count), self.rng.sample(range(32), count)

    def _load(self) -> None:
        urgent = TransferClass(self.rng.randint(0, 1))
        self.live.append(self.rig.load(*self._slots(), after=self.step, transfer_class=urgent))

    def _save(self) -> None:
        self.live.append(self.rig.save(*self._slots(), after=self.step))

    def _cancel(self) -> None:
        if self.live:
            self.rig.mover.cancel([self.rng.choice(self.live)])

    def _expedite(self) -> None:
        if self.live:
            self.rig.mover.expedite([self.rng.choice(self.live)], TransferClass.DEMAND, 0.0)

    def _launch(self) -> None:
        self.step += 1
        if self.rng.random() < 0.1:
            self.rig.mover.step_abandoned(self.step)
            return
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(1000)
        self.rig.mover.step_launched(self.step, self.stream.cuda_stream)

    def _wait(self) -> None:
        issued = [each for each in self.live if each in self.rig.issued]
        self.rig.mover.wait(issued[:3], self.stream.cuda_stream)


def test_a_mover_after_ten_thousand_calls():
    rig = GpuRig(slots=32, parts=4, fragment=16384)
    chaos = Chaos(rig, 1)
    chaos.run(CALLS // 10)
    free, resident = torch.cuda.mem_get_info()[0], resident_bytes()
    chaos.run(CALLS)
    assert {each.outcome for each in rig.ended.values()} == {Outcome.DONE, Outcome.CANCELLED}
    assert len(rig.ended) == rig.next_id - 1
    assert rig.mover.core.live_transfers == 0
    assert rig.mover.core.events_in_use == 0
    assert rig.mover.core.events < CALLS // 10, "events were made instead of recorded again"
    assert resident_bytes() - resident < 32 * MIB, "what the test keeps takes some five"
    assert free - torch.cuda.mem_get_info()[0] < 4 * MIB
    assert rig.poisoned()
    rig.close()


def test_movers_give_all_they_took_back():
    GpuRig(slots=8).close()
    torch.cuda.empty_cache()
    free, resident = torch.cuda.mem_get_info()[0], resident_bytes()
    for seed in range(20):
        rig = GpuRig(slots=32, parts=4, fragment=65536)
        Chaos(rig, seed).run(50)
        rig.close()
        del rig
    torch.cuda.empty_cache()
    assert free - torch.cuda.mem_get_info()[0] < 4 * MIB
    assert resident_bytes() - resident < 64 * MIB, "20 pools of 8 MiB were pinned"


class CudaMachine:
    """The toy machine's memory on the GPU: what a step reads is checked there, token by token."""

    def __init__(self, device_slots: int, host_slots: int, seed: int) -> None:
        self.clock = RealClock()
        self.rng = random.Random(seed)
        self.late_reports = False
        block = BLOCK_BYTES
        self.device = torch.full((device_slots, BLOCK_TOKENS), -1, device="cuda")
        self.arena = PinnedArena(host_slots * block, block, threads=1)
        assert self.arena.wait_ready(host_slots * block, PATIENCE_S)
        self.mover = NativeMover(
            Pool.of([self.device]),
            Pool.of([self.arena.blocks(host_slots, block)]),
            backend="cuda",
            window_bytes=3 * block // 2,
        )
        self.steps: deque[LaunchedStep] = deque()
        self.flying: set[int] = set()
        self.blocks_read = 0
        self._wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mover, name)

    @property
    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream

    def submit(self, transfers) -> None:
        self.flying.update(transfer.id for transfer in transfers)
        self.mover.submit(transfers)

    def poll(self):
        report = self.mover.poll()
        self.flying -= {completion.id for completion in report.completions}
        return report

    def wait(self, ids, stream: int = 0, timeout_s: float = 30.0, *, band=None) -> None:
        self.mover.wait(ids, self.stream, timeout_s, band=band)

    def read_layer(self, slots, start: int, hashes, layer: int) -> None:
        half = BLOCK_TOKENS // LAYERS
        rows = torch.from_numpy(np.asarray(slots[: start // BLOCK_TOKENS], np.int64)).cuda()
        values = torch.tensor(hashes, dtype=torch.int64).view(-1, BLOCK_TOKENS).cuda()
        read = self.device[rows, half * layer : half * (layer + 1)]
        self._wrong += (read != values[:, half * layer : half * (layer + 1)]).sum()

    def step_launched(self, step: int, stream: int = 0) -> None:
        launched = self.steps.popleft()
        assert launched.number == step
        for slots, start, hashes in launched.work:
            self._run(np.asarray(slots), start, np.asarray(hashes, np.int64))
        self.mover.step_launched(step, self.stream)

    def make_progress(self, rounds: int = 1) -> None:
        self.mover.wait_news(2e-4 * rounds)

    def run_step(self) -> bool:
        return False

    def wrong_tokens(self) -> int:
        return int(self._wrong)

    def _run(self, slots: np.ndarray, start: int, hashes: np.ndarray) -> None:
        positions = np.arange(len(hashes))
        rows = torch.from_numpy(slots[positions // BLOCK_TOKENS].astype(np.int64)).cuda()
        places = torch.from_numpy(positions % BLOCK_TOKENS).cuda()
        values = torch.from_numpy(hashes).cuda()
        self._wrong += (self.device[rows[:start], places[:start]] != values[:start]).sum()
        self.blocks_read += start // BLOCK_TOKENS
        self.device[rows[start:], places[start:]] = values[start:]


def test_a_cache_after_thousands_of_turns():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sizes = CacheSettings(
            block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES, device_slots=20, host_slots=60,
            window_bytes=BLOCK_BYTES, min_load_tokens=0, min_shared_tokens=8, mode=Mode.LOOK_AHEAD,
        )  # fmt: skip
    machine = CudaMachine(20, 60, 4)
    world = World(sizes, BatchSettings(step_tokens=32, max_running=2), seed=4, machine=machine)
    for turn in range(TURNS):
        if len(world.batcher.sequences) < 8 and world.rng.random() < 0.5:
            world.arrive()
        if world.rng.random() < 0.03:
            world.abort_one()
        world.tick(abandon=world.rng.random() < 0.03)
        if turn % 100 == 0:
            check(world.cache)
            world.history = world.history[-20:]
    world.drain()
    check(world.cache)
    nothing_left(world.cache)
    torch.cuda.synchronize()
    machine.make_progress()
    assert machine.wrong_tokens() == 0
    assert machine.blocks_read > 1000
    assert world.cache.stats().loaded_bytes > 0
    assert world.cache.stats().quarantined_blocks == 0
    assert machine.core.events_in_use == 0
    assert machine.core.live_transfers == 0
    world.cache.close()
    machine.arena.close()
