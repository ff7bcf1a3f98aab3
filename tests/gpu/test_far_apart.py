"""Layers further apart than a pitch may be, as in a pool of a hundred gigabytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_rig import PATIENCE_S, POISON, GpuRig

from forebay.transfer.messages import Outcome
from forebay.transfer.native import NativeMover
from forebay.transfer.pinned import PinnedArena
from forebay.transfer.pool import Pool

PARTS, SLOTS, FRAGMENT = 8, 24, 64 << 10
BLOCK = PARTS * FRAGMENT
GIB = 1 << 30


# The last is no multiple of a fragment, and lies at no even address.
@pytest.mark.parametrize("apart", [3 * GIB, 2 * GIB, 5 * GIB // 2 + 3 * 4097])
def test_every_byte_crosses_and_no_other_changes(apart: int) -> None:
    memory = torch.full((PARTS * apart,), POISON, dtype=torch.uint8, device="cuda")
    parts = [
        memory[part * apart + 512 :][: SLOTS * FRAGMENT].view(SLOTS, FRAGMENT)
        for part in range(PARTS)
    ]
    device = torch.stack(parts)
    device.copy_(torch.randint(0, 256, device.shape, dtype=torch.uint8))
    for part, bytes_ in zip(parts, device, strict=True):
        part.copy_(bytes_)
    torch.cuda.synchronize()
    with PinnedArena(SLOTS * BLOCK, BLOCK) as arena:
        assert arena.wait_ready(arena.size_bytes, PATIENCE_S)
        host = arena.blocks(SLOTS, BLOCK)
        mover = NativeMover(
            Pool.of(parts),
            Pool.of([host], seam_bytes=arena.seam_bytes),
            backend="cuda",
            window_bytes=5 * BLOCK + 1000,
        )
        rig = GpuRig.over(mover)
        order = np.random.default_rng(3).permutation(SLOTS)
        assert rig.end_of(rig.save(range(SLOTS), order)).outcome is Outcome.DONE
        wanted = device.permute(1, 0, 2).reshape(SLOTS, BLOCK).cpu().numpy()
        assert (host[order] == wanted).all()
        for part in parts:
            part.zero_()
        torch.cuda.synchronize()
        assert rig.end_of(rig.load(order, range(SLOTS))).outcome is Outcome.DONE
        mover.close(5.0)
    for part, bytes_ in zip(parts, device, strict=True):
        assert torch.equal(part, bytes_)
        part.fill_(POISON)
    # By pieces: a mask of all of it would take as much again.
    assert all(bool((piece == POISON).all()) for piece in memory.split(GIB))
