"""Pinned memory on a real driver: of ours, of the caller, and used before it is all there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_rig import PATIENCE_S, GpuRig

from forebay.errors import DeviceError, SettingsError
from forebay.transfer.messages import Outcome
from forebay.transfer.native import NativeMover
from forebay.transfer.pinned import PinnedArena
from forebay.transfer.pool import Pool

BLOCK, SLOTS = 64 * 1024, 64


def load_all(arena: PinnedArena, slots: int = SLOTS) -> torch.Tensor:
    device = torch.zeros(slots, BLOCK, dtype=torch.uint8, device="cuda")
    mover = NativeMover(
        Pool.of([device]),
        Pool.of([arena.blocks(slots, BLOCK)], seam_bytes=arena.seam_bytes),
        backend="cuda",
        window_bytes=8 * BLOCK,
    )
    rig = GpuRig.over(mover)
    assert rig.end_of(rig.load(range(slots), range(slots))).outcome is Outcome.DONE
    mover.close(5.0)
    return device.cpu()


def page_aligned(size: int) -> np.ndarray:
    memory = np.empty(size + 4096, np.uint8)
    return memory[-memory.ctypes.data % 4096 :][:size]


def test_memory_of_the_caller_is_used_where_it_is_and_left_as_it_was():
    memory = page_aligned(SLOTS * BLOCK)
    memory[:] = np.random.default_rng(1).integers(0, 256, len(memory), np.uint8)
    before = memory.copy()
    with PinnedArena.register(memory, BLOCK, slice_bytes=8 * BLOCK) as arena:
        assert arena.wait_ready(len(memory), PATIENCE_S)
        assert arena.how == "registered"
        assert (load_all(arena).numpy().ravel() == before).all()
        with pytest.raises(DeviceError, match="ALREADY_REGISTERED"):
            PinnedArena.register(memory, BLOCK)
    assert (memory == before).all()
    # It is free again: the same memory can be pinned once more.
    PinnedArena.register(memory, BLOCK).close()


def test_memory_that_the_driver_allocates_serves_as_well():
    with PinnedArena(SLOTS * BLOCK, BLOCK, in_place=False) as arena:
        assert arena.how == "allocated"
        assert arena.ready_bytes == SLOTS * BLOCK
        arena.bytes[:] = 3
        assert (load_all(arena) == 3).all()


def test_the_front_is_used_while_the_rest_is_pinned():
    size = 512 * BLOCK
    with PinnedArena(size, BLOCK, slice_bytes=SLOTS * BLOCK, share=1e-9) as arena:
        ready = arena.ready_bytes
        assert ready >= SLOTS * BLOCK
        arena.bytes[: SLOTS * BLOCK] = 9
        assert (load_all(arena) == 9).all()
        assert arena.wait_ready(size, PATIENCE_S)
        assert arena.error == ""


def test_a_pool_that_does_not_fit_is_refused_before_it_takes_any():
    with pytest.raises(SettingsError, match=r"of pinned memory do not fit: .* use a smaller pool"):
        PinnedArena(1 << 50, BLOCK)
