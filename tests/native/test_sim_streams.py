"""The sim backend's compute streams from Python: kernels run when their stream gets there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from forebay.errors import ProtocolError
from forebay.transfer.messages import Direction, Report, Transfer, TransferClass
from forebay.transfer.native import NativeMover
from forebay.transfer.pool import Pool

SLOTS = 6
BLOCK = 512


class Sim:
    def __init__(self) -> None:
        self.device = np.zeros((SLOTS, BLOCK), np.uint8)
        self.host = np.full((SLOTS, BLOCK), 200, np.uint8)
        self.mover = NativeMover(
            Pool.of([self.device]), Pool.of([self.host]),
            backend="sim", window_bytes=BLOCK, seed=4, longest_delay_s=1e-4,
        )  # fmt: skip
        self.core = self.mover.core
        self.stream = self.core.sim_stream()

    def submit(self, id_: int, direction: Direction, at: int, to: int, after: int) -> None:
        slots = [np.array([slot], np.int32) for slot in (at, to)]
        steps = np.array([after], np.int64)
        self.mover.submit([Transfer(id_, direction, TransferClass.DEMAND, 0.0, *slots, steps)])

    def next_report(self) -> Report:
        assert self.mover.wait_news(20.0)
        return self.mover.poll()


@pytest.fixture
def sim() -> Iterator[Sim]:
    made = Sim()
    yield made
    made.mover.close(5.0)


def slots(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_save_takes_what_its_step_writes(sim: Sim) -> None:
    sim.core.hold_stream(sim.stream)
    sim.core.sim_fill(sim.stream, slots(0, 1), 42)
    sim.mover.step_launched(1, sim.stream)
    sim.submit(1, Direction.SAVE, 1, 3, after=1)
    assert not sim.mover.wait_news(0.05)
    sim.core.release_stream(sim.stream)
    while not any(each.id == 1 for each in sim.next_report().completions):
        pass
    assert (sim.host[3] == 42).all()


def test_a_stream_that_waits_reads_what_was_loaded(sim: Sim) -> None:
    for lane in range(2):
        sim.core.hold_lane(Direction.LOAD, lane)
    sim.submit(1, Direction.LOAD, 2, 4, after=0)
    assert sim.next_report().issued == (1,)
    sim.mover.wait([1], sim.stream)
    loaded = sim.core.sim_checksum(sim.stream, slots(4))
    with pytest.raises(ProtocolError, match="in time"):
        sim.core.sim_result(loaded, 0.05)
    for lane in range(2):
        sim.core.release_lane(Direction.LOAD, lane)
    sim.core.sim_fill(sim.stream, slots(0), 200)
    filled = sim.core.sim_checksum(sim.stream, slots(0))
    assert sim.core.sim_result(loaded, 20.0) == sim.core.sim_result(filled, 20.0)


def test_hooks_refuse_what_is_not_there(sim: Sim) -> None:
    with pytest.raises(ProtocolError, match="slot"):
        sim.core.sim_fill(sim.stream, slots(SLOTS), 1)
    with pytest.raises(ProtocolError, match="stream"):
        sim.core.hold_stream(99)
    with pytest.raises(ProtocolError, match="lane"):
        sim.core.hold_lane(0, 5)
    with pytest.raises(ProtocolError, match="direction"):
        sim.core.fail_window(2, 0)
    with pytest.raises(ProtocolError, match="checksum"):
        sim.core.sim_result(99, 0.0)
    with pytest.raises(ProtocolError, match="stream"):
        sim.mover.step_launched(1, 99)
    sim.mover.step_launched(1, sim.stream)
    cpu = NativeMover(Pool.of([sim.device]), Pool.of([sim.host]))
    with pytest.raises(ProtocolError, match="sim backend"):
        cpu.core.sim_stream()
    cpu.close(1.0)
