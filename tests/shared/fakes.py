"""A machine made of lists: a mover, a compute stream and memory whose contents can be checked.

A slot holds, per token position, the hash of all tokens up to there, or POISON. A step reads every
position before the ones it writes and checks them when it *runs*, which is later than its launch:
whatever was overwritten, moved or mixed up in between shows. The first half of each block's
positions stands for one layer, the second for another: a step that starts by layer reads them in
this order.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.transfer.messages import (
    Completion,
    Direction,
    Outcome,
    Report,
    Transfer,
    TransferClass,
)
from forebay.transfer.mover import TransferFailedError

POISON = -1
LAYERS = 2


@dataclass
class FakeClock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FlyingCopy:
    transfer: Transfer
    transfer_class: TransferClass
    deadline_s: float
    # What is copied, in this order: (block, layer), or (block, None) for all of a block.
    parts: list[tuple[int, int | None]]
    handed: int = 0
    landed: int = 0
    cancelled: bool = False
    fault: bool = False
    issued_told: bool = False
    started_s: float = 0.0
    torn: bool = False
    bands_told: int = 0

    def through(self, band: int | None) -> int:
        """How many parts there are up to the last of `band`."""
        if band is None:
            return len(self.parts)
        wanted = (at for at, part in enumerate(self.parts) if part[1] is None or part[1] <= band)
        return max(wanted, default=-1) + 1

    @property
    def blocks_done(self) -> int:
        """Leading blocks of which every part has landed."""
        missing = (block for block, _ in self.parts[self.landed :])
        return min(missing, default=len(self.transfer.sources))


@dataclass
class LaunchedStep:
    number: int
    waits: list[int]
    # (slots, start, hashes of every token up to the end)
    work: list[tuple[list[int], int, list[int]]]
    by_layer: bool = False


@dataclass
class Machine:
    """Device and host memory, a mover and one compute stream, all moved on by the test."""

    block_tokens: int
    device_slots: int
    host_slots: int
    clock: FakeClock
    rng: random.Random
    late_reports: bool = False
    device: list[list[int]] = field(init=False)
    host: list[list[int]] = field(init=False)
    flying: dict[int, FlyingCopy] = field(default_factory=dict)
    steps: deque[LaunchedStep] = field(default_factory=deque)
    abandoned: set[int] = field(default_factory=set)
    completed_step: int = 0
    blocks_read: int = 0
    moved: int = 0

    def __post_init__(self) -> None:
        self.device = [self._poison() for _ in range(self.device_slots)]
        self.host = [self._poison() for _ in range(self.host_slots)]
        self._issued: list[int] = []
        self._completions: list[Completion] = []
        self._bands: list[tuple[int, int]] = []
        self._held_back = Report((), (), 0)
        self._done: set[int] = set()

    # -- the Mover protocol ----------------------------------------------------------------------

    def submit(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            assert len(set(transfer.destinations.tolist())) == len(transfer.destinations)
            assert transfer.id not in self.flying
            self._check_no_overlap(transfer)
            self.flying[transfer.id] = FlyingCopy(
                transfer,
                transfer.transfer_class,
                transfer.deadline_s,
                [(block, None) for block in range(len(transfer.sources))],
            )

    def cancel(self, ids: Sequence[int]) -> None:
        for one in ids:
            copy = self.flying.get(one)
            if copy is not None:
                copy.cancelled = True
                self._settle(copy)

    def expedite(
        self, ids: Sequence[int], transfer_class: TransferClass, deadline_s: float
    ) -> None:
        for one in ids:
            copy = self.flying.get(one)
            if copy is not None:
                copy.transfer_class = min(copy.transfer_class, transfer_class)

    def use_bands(self, ids: Sequence[int], ends: Sequence[int]) -> None:
        assert len(ends) == LAYERS
        for one in ids:
            copy = self.flying.get(one)
            if copy is not None and copy.handed < len(copy.parts):
                assert all(layer is None for _, layer in copy.parts), "bands within bands"
                rest = [block for block, _ in copy.parts[copy.handed :]]
                copy.parts[copy.handed :] = [(b, layer) for layer in range(LAYERS) for b in rest]

    def step_launched(self, step: int, stream: int = 0) -> None:
        assert any(launched.number == step for launched in self.steps)
        self._complete_steps()

    def step_abandoned(self, step: int) -> None:
        self.abandoned.add(step)
        self._complete_steps()

    def poll(self) -> Report:
        fresh = Report(
            tuple(self._issued), tuple(self._completions), self.completed_step, tuple(self._bands)
        )
        self._issued, self._completions, self._bands = [], [], []
        if not self.late_reports:
            return fresh
        late, self._held_back = self._held_back, fresh
        return late

    def wait(
        self,
        ids: Sequence[int],
        stream: int = 0,
        timeout_s: float = 30.0,
        *,
        band: int | None = None,
    ) -> None:
        for one in ids:
            copy = self.flying.get(one)
            if copy is None:
                continue
            assert copy.handed >= copy.through(band), "wait on un-issued"
            if copy.fault:
                self._fail(copy)
                raise TransferFailedError("injected")

    def wait_news(self, timeout_s: float) -> bool:
        self.clock.now_s += timeout_s
        if self.rng.random() < 0.5:
            self.run_step()
        self.make_progress(4)
        return True

    def close(self, timeout_s: float) -> None:
        for copy in list(self.flying.values()):
            copy.cancelled = True
            self._land_all(copy)

    # -- the machine runs --------------------------------------------------------------------------

    def make_progress(self, rounds: int = 1) -> None:
        """The link hands over and lands a few blocks of transfers in any order."""
        for _ in range(rounds):
            if not self.flying:
                return
            copy = self.rng.choice(list(self.flying.values()))
            if copy.fault and copy.landed and not self._waited_for(copy):
                self._fail(copy)
                continue
            self._hand_over(copy, self.rng.randint(1, 4))
            if self.rng.random() < 0.7:
                self._land(copy, self.rng.randint(1, 4))

    def run_step(self) -> bool:
        """Run the oldest launched step: its waits first, then its checks and writes."""
        if not self.steps:
            return False
        step = self.steps.popleft()
        for layer in range(LAYERS):
            for copy in filter(None, map(self.flying.get, step.waits)):
                due = copy.through(layer if step.by_layer else None)
                self._land(copy, min(due, copy.handed) - copy.landed)
            for slots, start, hashes in step.work:
                self._read(slots, start, hashes, layer)
        for slots, start, hashes in step.work:
            self._write(slots, start, hashes)
        self._done.add(step.number)
        self._complete_steps()
        return True

    def fail_something(self) -> None:
        """One transfer in flight will fail half way."""
        able = [copy for copy in self.flying.values() if not self._waited_for(copy)]
        if able:
            self.rng.choice(able).fault = True

    def _complete_steps(self) -> None:
        while self.completed_step + 1 in self._done or self.completed_step + 1 in self.abandoned:
            self.completed_step += 1

    def read_layer(self, slots: list[int], start: int, hashes: list[int], layer: int) -> None:
        """A layer that starts before the others: it reads when the step runs."""

    def _read(self, slots: list[int], start: int, hashes: list[int], layer: int) -> None:
        for position in range(start):
            slot, offset = slots[position // self.block_tokens], position % self.block_tokens
            if self._layer_of(offset) != layer:
                continue
            found = self.device[slot][offset]
            assert found == hashes[position], (
                f"token {position} in slot {slot}: read {found}, written {hashes[position]}"
            )
        self.blocks_read += start // self.block_tokens if layer == 0 else 0

    def _layer_of(self, offset: int) -> int:
        return offset * LAYERS // self.block_tokens

    def _write(self, slots: list[int], start: int, hashes: list[int]) -> None:
        for position in range(start, len(hashes)):
            slot, offset = slots[position // self.block_tokens], position % self.block_tokens
            self.device[slot][offset] = hashes[position]

    def _waited_for(self, copy: FlyingCopy) -> bool:
        return any(copy.transfer.id in step.waits for step in self.steps)

    def _hand_over(self, copy: FlyingCopy, blocks: int) -> None:
        transfer = copy.transfer
        while blocks and copy.handed < len(copy.parts) and not copy.cancelled:
            if transfer.after_steps[copy.parts[copy.handed][0]] > self.completed_step:
                break
            if copy.handed == 0:
                copy.started_s = self.clock.now_s
            copy.handed += 1
            blocks -= 1
        self._tell_issued(copy)

    def _tell_issued(self, copy: FlyingCopy) -> None:
        if copy.handed == len(copy.parts) and not copy.issued_told:
            copy.issued_told = True
            self._issued.append(copy.transfer.id)
        bands = sum(copy.through(layer) <= copy.handed for layer in range(LAYERS))
        if copy.parts[-1][1] is not None and bands > copy.bands_told:
            copy.bands_told = bands
            self._bands.append((copy.transfer.id, bands))

    def _land(self, copy: FlyingCopy, blocks: int) -> None:
        transfer = copy.transfer
        loads = transfer.direction is Direction.LOAD
        for _ in range(min(blocks, copy.handed - copy.landed)):
            at, layer = copy.parts[copy.landed]
            source, target = int(transfer.sources[at]), int(transfer.destinations[at])
            read, written = (self.host, self.device) if loads else (self.device, self.host)
            for offset in range(self.block_tokens):
                if layer is None or self._layer_of(offset) == layer:
                    written[target][offset] = read[source][offset]
            copy.landed += 1
            self.moved += 1
        self._settle(copy)

    def _land_all(self, copy: FlyingCopy) -> None:
        self._land(copy, copy.handed - copy.landed)

    def _settle(self, copy: FlyingCopy) -> None:
        if copy.transfer.id not in self.flying or copy.landed < copy.handed:
            return
        if copy.landed == len(copy.parts):
            self._complete(copy, Outcome.DONE)
        elif copy.cancelled:
            self._complete(copy, Outcome.CANCELLED)

    def _fail(self, copy: FlyingCopy) -> None:
        transfer = copy.transfer
        if transfer.direction is Direction.LOAD:
            for at, _ in copy.parts[copy.landed : copy.handed]:
                self.device[int(transfer.destinations[at])] = self._poison()
        self._complete(copy, Outcome.FAILED)

    def _complete(self, copy: FlyingCopy, outcome: Outcome) -> None:
        transfer, done = copy.transfer, copy.blocks_done
        torn = [block for block, _ in copy.parts[copy.landed : copy.handed]]
        del self.flying[transfer.id]
        self._completions.append(
            Completion(
                id=transfer.id,
                outcome=outcome,
                blocks_done=done,
                blocks_touched=max(torn, default=done - 1) + 1,
                torn_from=min(torn, default=done),
                bytes=done * 1024,
                started_s=copy.started_s,
                finished_s=self.clock.now_s,
                error="injected" if outcome is Outcome.FAILED else "",
            )
        )

    def _check_no_overlap(self, transfer: Transfer) -> None:
        """Nobody copies into a slot that another copy still reads or writes."""
        mine = set(transfer.destinations.tolist())
        for other in self.flying.values():
            theirs = other.transfer
            if theirs.direction is transfer.direction:
                assert not mine & set(theirs.destinations.tolist()), "two copies into one slot"
            else:
                assert not mine & set(theirs.sources.tolist()), "a copy into a slot being read"
                assert not set(transfer.sources.tolist()) & set(theirs.destinations.tolist()), (
                    "a copy out of a slot being written"
                )

    def _poison(self) -> list[int]:
        return [POISON] * self.block_tokens


class RealClock:
    """Real time, which a test may wish to move on and cannot."""

    @property
    def now_s(self) -> float:
        return time.monotonic()

    @now_s.setter
    def now_s(self, value: float) -> None:
        return

    def __call__(self) -> float:
        return time.monotonic()
