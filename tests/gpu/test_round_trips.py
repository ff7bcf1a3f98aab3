"""Blocks that go down and come back are the same bytes, and nothing beside them has changed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from gpu_rig import PATIENCE_S, POISON, GpuRig

from forebay.transfer.messages import Outcome
from forebay.transfer.native import NativeMover
from forebay.transfer.pinned import PinnedArena
from forebay.transfer.pool import Pool

SLOTS, LAYERS = 12, 3
DTYPES = ["float16", "bfloat16", "float32", "float8_e4m3fn"]
GUARD = 4096


@dataclass
class Layout:
    """`memory` uint8 with a guard of poison before and behind; `parts` are its [slot, ...] views,
    in the order of a block's bytes, and `used` tells which bytes belong to a slot."""

    memory: torch.Tensor
    parts: list[torch.Tensor]

    def used(self) -> torch.Tensor:
        told = torch.zeros(len(self.memory), dtype=torch.bool, device="cuda")
        base = self.memory.data_ptr()
        for part in self.parts:
            raw = part.view(torch.uint8)
            size = raw[0].numel()
            for slot in range(SLOTS):
                at = raw[slot].data_ptr() - base
                told[at : at + size] = True
        return told


def guarded(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    memory = torch.full((GUARD + size + GUARD,), POISON, dtype=torch.uint8, device="cuda")
    return memory, memory[GUARD : GUARD + size]


def block_first(dtype: torch.dtype, tokens: int, heads: int, dim: int) -> Layout:
    """[block, layer, K/V, token, head, dim]: a block is one piece."""
    memory, inner = guarded(SLOTS * LAYERS * 2 * tokens * heads * dim * dtype.itemsize)
    return Layout(memory, [inner.view(dtype).view(SLOTS, LAYERS, 2, tokens, heads, dim)])


def layer_first(dtype: torch.dtype, tokens: int, heads: int, dim: int) -> Layout:
    """[layer][K/V, block, token, head, dim]: one piece for each layer's K and V."""
    memory, inner = guarded(LAYERS * 2 * SLOTS * tokens * heads * dim * dtype.itemsize)
    pool = inner.view(dtype).view(LAYERS, 2, SLOTS, tokens, heads, dim)
    return Layout(memory, [pool[layer, kv] for layer in range(LAYERS) for kv in range(2)])


def block_then_kv(dtype: torch.dtype, tokens: int, heads: int, dim: int) -> Layout:
    """[layer][block, K/V, token, head, dim]: K and V of a block lie together."""
    memory, inner = guarded(LAYERS * SLOTS * 2 * tokens * heads * dim * dtype.itemsize)
    pool = inner.view(dtype).view(LAYERS, SLOTS, 2, tokens, heads, dim)
    return Layout(memory, [pool[layer] for layer in range(LAYERS)])


def padded(dtype: torch.dtype, tokens: int, heads: int, dim: int) -> Layout:
    """As layer first, each slot with bytes behind it that nobody uses."""
    size = tokens * heads * dim
    memory, inner = guarded(LAYERS * 2 * SLOTS * (size + 96) * dtype.itemsize)
    pool = inner.view(dtype).view(LAYERS, 2, SLOTS, size + 96)[..., :size]
    return Layout(memory, [pool[layer, kv] for layer in range(LAYERS) for kv in range(2)])


def two_sizes(dtype: torch.dtype, tokens: int, heads: int, dim: int) -> Layout:
    """Keys and values of different widths, in one block."""
    key, value = tokens * heads * dim, tokens * heads * (dim // 2)
    memory, inner = guarded(SLOTS * LAYERS * (key + value) * dtype.itemsize)
    pool = inner.view(dtype).view(SLOTS, LAYERS, key + value)
    parts = [p for layer in range(LAYERS) for p in (pool[:, layer, :key], pool[:, layer, key:])]
    return Layout(memory, parts)


LAYOUTS = [block_first, layer_first, block_then_kv, padded, two_sizes]


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(16, 8, 128), (16, 2, 64), (1, 1, 32)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_comes_back_and_no_other_changes(layout, dtype, tokens, heads, dim):
    made: Layout = layout(getattr(torch, dtype), tokens, heads, dim)
    used = made.used()
    made.memory[used] = torch.randint(0, 256, (int(used.sum()),), dtype=torch.uint8).cuda()
    before = made.memory.clone()
    device = Pool.of(made.parts)
    block = device.block_bytes
    with PinnedArena((SLOTS + 1) * block, block, threads=1) as arena:
        assert arena.wait_ready(arena.size_bytes, PATIENCE_S)
        arena.bytes[:] = POISON
        mover = NativeMover(
            device, Pool.of([arena.blocks(SLOTS, block)], seam_bytes=arena.seam_bytes),
            backend="cuda", window_bytes=block + block // 3,
        )  # fmt: skip
        rig = GpuRig.over(mover)
        order = np.random.default_rng(7).permutation(SLOTS)
        torch.cuda.synchronize()
        assert rig.end_of(rig.save(range(SLOTS), order)).outcome is Outcome.DONE
        saved = torch.from_numpy(arena.blocks(SLOTS, block)[order].copy())
        parts = [part.reshape(SLOTS, -1).view(torch.uint8) for part in made.parts]
        assert torch.equal(saved, torch.cat(parts, 1).cpu()), "the host has other bytes"
        assert (arena.bytes[SLOTS * block :] == POISON).all()
        made.memory[used] = 0
        torch.cuda.synchronize()
        assert rig.end_of(rig.load(order, range(SLOTS))).outcome is Outcome.DONE
        mover.close(5.0)
        torch.cuda.synchronize()
        assert torch.equal(made.memory, before)


@pytest.mark.parametrize("piece_by_piece", [False, True])
@pytest.mark.parametrize(
    ("parts", "fragment"), [(1, 1 << 20), (1, 65536), (8, 4096), (64, 512), (6, 1013), (5, 1)]
)
def test_fragments_of_every_size(make_rig, parts, fragment, piece_by_piece):
    rig = make_rig(parts=parts, fragment=fragment, piece_by_piece=piece_by_piece)
    rig.fill_device()
    before = rig.device_blocks()
    order = rig.rng.permutation(rig.slots)
    assert rig.end_of(rig.save(range(rig.slots), order)).outcome is Outcome.DONE
    assert (rig.host[order] == before).all()
    rig.fill_device()
    assert rig.end_of(rig.load(order, range(rig.slots))).outcome is Outcome.DONE
    assert (rig.device_blocks() == before).all()
    assert rig.poisoned()
