"""Cases over the fake driver, each in a process of its own: `python driver_cases.py NAME`."""

from __future__ import annotations

import ctypes
import os
import sys
import time

import numpy as np

from forebay.errors import DeviceError, ProtocolError, SettingsError
from forebay.transfer.messages import Direction, Outcome, Transfer, TransferClass
from forebay.transfer.mover import TransferFailedError
from forebay.transfer.native import NativeMover
from forebay.transfer.pinned import PinnedArena, cuda_devices
from forebay.transfer.pool import Pool

BLOCK, SLOTS = 4096, 64
KINDS = ("events", "streams", "registrations", "allocations", "contexts")


def live() -> dict[str, int]:
    """What was made of the driver's things and not given back."""
    driver = ctypes.CDLL("libcuda.so.1")
    return {kind: driver.fake_cuda_live(kind.encode()) for kind in KINDS}


def page_aligned(size: int) -> np.ndarray:
    memory = np.empty(size + 4096, np.uint8)
    return memory[-memory.ctypes.data % 4096 :][:size]


class Link:
    """A mover between two pools of this process; what the driver calls device memory is too."""

    def __init__(self, **settings) -> None:
        self.device = np.zeros((SLOTS, BLOCK), np.uint8)
        self.arena = PinnedArena(SLOTS * BLOCK, BLOCK, threads=1)
        self.host = self.arena.blocks(SLOTS, BLOCK)
        self.host[:] = np.random.default_rng(1).integers(0, 256, self.host.shape, np.uint8)
        self.mover = NativeMover(
            Pool.of([self.device]), Pool.of([self.host]), backend="cuda", **settings
        )
        self.ended = {}
        self.next_id = 1

    def load(self, slots) -> int:
        slots = np.asarray(slots, np.int32)
        transfer = Transfer(
            self.next_id, Direction.LOAD, TransferClass.DEMAND, 0.0, slots, slots,
            np.zeros(len(slots), np.int64),
        )  # fmt: skip
        self.next_id += 1
        self.mover.submit([transfer])
        return transfer.id

    def end_of(self, *ids: int):
        end_s = time.monotonic() + 20
        while not set(ids) <= set(self.ended):
            assert time.monotonic() < end_s
            self.mover.wait_news(0.1)
            self.ended |= {each.id: each for each in self.mover.poll().completions}
        return [self.ended[each] for each in ids]

    def close(self) -> None:
        self.mover.close(5.0)
        self.arena.close()


def said(kind: type[Exception], call, *arguments, **more) -> str:
    """What the error said. Raises AssertionError where there was none."""
    try:
        call(*arguments, **more)
    except kind as error:
        return str(error)
    raise AssertionError("it was not refused")


def a_driver_that_cannot_be_used() -> None:
    print(said(SettingsError, cuda_devices))


def a_fork() -> None:
    print(said(DeviceError, cuda_devices))


def no_device() -> None:
    print(said(SettingsError, PinnedArena, 4096, 4096))


def copies_and_gives_everything_back() -> None:
    link = Link(window_bytes=3 * BLOCK)
    (end,) = link.end_of(link.load(range(SLOTS)))
    assert end.outcome is Outcome.DONE
    assert (link.device == link.host).all()
    assert live()["streams"] == 4
    link.close()
    del link.mover, link.arena
    print(live())


def memory_under_a_mover() -> None:
    link = Link(window_bytes=BLOCK)
    print(said(ProtocolError, link.arena.close))
    link.end_of(link.load(range(SLOTS)))
    other = NativeMover(Pool.of([link.device]), Pool.of([link.host[8:]]), backend="cuda")
    del other  # never closed, and gone
    link.close()
    assert link.arena._bytes is None


def layers_apart_cross_as_rows() -> None:
    layers, fragment, slots = 64, 64, 32
    device = np.zeros((layers, slots, fragment), np.uint8)
    arena = PinnedArena(slots * BLOCK, BLOCK, threads=1)
    host = arena.blocks(slots, BLOCK)
    host[:] = np.random.default_rng(1).integers(0, 256, host.shape, np.uint8)
    wanted = host.copy()
    # A window may cut a block anywhere.
    mover = NativeMover(
        Pool.of(list(device)), Pool.of([host]), backend="cuda", window_bytes=3 * BLOCK + 100
    )
    places = np.random.default_rng(2).permutation(slots).astype(np.int32)
    steps = np.zeros(slots, np.int64)
    every = np.arange(slots, dtype=np.int32)
    mover.submit([Transfer(1, Direction.LOAD, TransferClass.DEMAND, 0.0, every, places, steps)])
    mover.wait_news(20.0)
    while not any(each.id == 1 for each in mover.poll().completions):
        mover.wait_news(20.0)
    assert (device[:, places].transpose(1, 0, 2).reshape(slots, BLOCK) == wanted).all()
    host[:] = 0
    mover.submit([Transfer(2, Direction.SAVE, TransferClass.SAVE, 0.0, places, every, steps)])
    while not any(each.id == 2 for each in mover.poll().completions):
        mover.wait_news(20.0)
    assert (host == wanted).all()
    mover.close(5.0)
    arena.close()
    counted = ctypes.CDLL("libcuda.so.1").fake_cuda_live
    print(counted(b"row copies"), counted(b"slice copies"))


def a_fault_ends_everything_as_failed() -> None:
    link = Link(window_bytes=BLOCK, piece_by_piece=True)
    ids = [link.load(range(8 * i, 8 * i + 8)) for i in range(8)]
    ends = link.end_of(*ids)
    failed = [end for end in ends if end.outcome is Outcome.FAILED]
    assert len(failed) >= 6
    assert all("ILLEGAL_ADDRESS" in end.error for end in failed)
    for end in ends:
        done = link.device[8 * (end.id - 1) :][: end.blocks_done]
        assert (done == link.host[8 * (end.id - 1) :][: end.blocks_done]).all()
    # Whoever asks later is told so as well, at once; a step launched now never completes.
    said(DeviceError, link.mover.step_launched, 1, 0)
    (late,) = link.end_of(link.load([0]))
    assert late.outcome is Outcome.FAILED
    refused = said(TransferFailedError, link.mover.wait, [late.id], 0, 1.0)
    began_s = time.monotonic()
    link.close()
    del link.mover, link.arena
    print(refused, live(), time.monotonic() - began_s < 10)


def a_step_that_is_captured() -> None:
    link = Link()
    os.environ["FAKE_CUDA_CAPTURED"] = "1"
    print(said(DeviceError, link.mover.step_launched, 1, 0))
    os.environ["FAKE_CUDA_CAPTURED"] = "0"
    link.mover.step_launched(1, 0)
    assert link.mover.poll().completed_step == 1
    assert link.mover.core.events_in_use == 0
    link.close()


def memory_that_may_not_be_registered() -> None:
    arena = PinnedArena(SLOTS * BLOCK, BLOCK)
    assert arena.ready_bytes == SLOTS * BLOCK
    arena.bytes[:] = 7
    assert arena.seam_bytes == 0
    how = arena.how
    arena.close()
    del arena
    print(how, live())


def memory_that_cannot_be_pinned_at_all() -> None:
    print(said(DeviceError, PinnedArena, SLOTS * BLOCK, BLOCK), live())


def registering_that_stops_half_way() -> None:
    arena = PinnedArena(SLOTS * BLOCK, BLOCK, slice_bytes=8 * BLOCK)
    assert not arena.wait_ready(SLOTS * BLOCK, 20.0)
    print(arena.ready_bytes // BLOCK, arena.how, arena.error)
    arena.close()


def memory_of_the_caller() -> None:
    memory = page_aligned(SLOTS * BLOCK)
    memory[:] = 5
    arena = PinnedArena.register(memory, BLOCK, slice_bytes=8 * BLOCK)
    assert arena.wait_ready(SLOTS * BLOCK, 20.0)
    assert arena.how == "registered"
    assert live()["registrations"] == 8
    assert arena.address == memory.ctypes.data
    assert arena.seam_bytes == 8 * BLOCK
    with PinnedArena.register(page_aligned(SLOTS * BLOCK + 100), BLOCK) as whole:
        assert whole.seam_bytes == 0
        Pool.of([whole.blocks(SLOTS, BLOCK)], seam_bytes=whole.seam_bytes)
    assert arena.blocks(SLOTS, BLOCK).shape == (SLOTS, BLOCK)
    arena.close()
    assert (memory == 5).all()
    del arena
    print(live(), said(SettingsError, PinnedArena.register, memory[1:], BLOCK))
    print(said(SettingsError, PinnedArena.register, memory.reshape(SLOTS, BLOCK), BLOCK))


def pinning_that_is_closed_before_its_end() -> None:
    began_s = time.monotonic()
    arena = PinnedArena(256 << 20, 2 << 20, slice_bytes=2 << 20, share=1e-6, threads=2)
    ready = arena.ready_bytes
    arena.close()
    del arena
    print(ready < 256 << 20, live(), time.monotonic() - began_s < 60)


def pinning_pauses_until_it_is_waited_for() -> None:
    size, piece = 64 << 20, 2 << 20
    arena = PinnedArena(size, piece, slice_bytes=piece, share=1e-9, threads=1)
    alone = arena.ready_bytes  # every pause is a second long
    assert arena.wait_ready(size, 30.0)
    print(alone < size, arena.ready_bytes == size)
    arena.close()


def pinning_while_a_graph_is_captured() -> None:
    size, piece = 64 << 20, 2 << 20
    arena = PinnedArena(size, piece, slice_bytes=piece, share=1e-9, threads=1)
    os.environ["FAKE_CUDA_CAPTURING"] = "1"
    print(arena.wait_ready(size, 30.0), arena.error or "no error")
    print(said(DeviceError, PinnedArena.register, page_aligned(BLOCK), BLOCK))
    arena.close()


def a_pool_that_does_not_fit() -> None:
    print(said(SettingsError, PinnedArena, 1 << 50, 4096))


if __name__ == "__main__":
    os.environ.setdefault("FAKE_CUDA_DEVICES", "1")
    globals()[sys.argv[1]]()
