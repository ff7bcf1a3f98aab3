"""Arenas and pools: exact sizes, layouts that fit, memory given back."""

from __future__ import annotations

import gc
import mmap
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from forebay.errors import ProtocolError, SettingsError
from forebay.machine.memory import Memory
from forebay.transfer import host
from forebay.transfer.arena import HostArena
from forebay.transfer.host import HostMemory
from forebay.transfer.messages import (
    WINDOW_DTYPE,
    Completion,
    Direction,
    Outcome,
    Report,
    Transfer,
    TransferClass,
)
from forebay.transfer.native import NativeMover
from forebay.transfer.pool import Pool

torch = pytest.importorskip("torch")


def mapped_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmSize:")[1].split()[0])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("huge_pages", [False, True])
def test_an_arena_is_exact_aligned_and_zeroed(shared: bool, huge_pages: bool) -> None:
    with HostArena(12345, shared=shared, huge_pages=huge_pages) as arena:
        assert arena.size_bytes == 12345
        assert arena.address % mmap.PAGESIZE == 0
        assert not arena.bytes.any()
        arena.blocks(3, 4115)[2, 4114] = 9
        assert arena.bytes[-1] == 9
        with pytest.raises(SettingsError):
            arena.blocks(4, 4115)
    with pytest.raises(ProtocolError):
        arena.bytes  # noqa: B018


def test_a_closed_arena_gives_its_memory_back() -> None:
    size = 256 << 20
    before = mapped_kib()
    arena = HostArena(size)
    assert mapped_kib() - before > size // 2048
    view = arena.blocks(1, 64)
    arena.close()
    view[0, 0] = 1  # a view keeps the mapping
    del view, arena
    gc.collect()
    assert mapped_kib() - before < size // 2048


def test_a_host_pool_above_what_is_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would give it, and kill the process that fills it."""
    free = Memory(1 << 30, 1 << 20, 0, None, [])
    monkeypatch.setattr(host, "read_memory", lambda _: free)
    HostMemory(256, 4096, None).close()
    with pytest.raises(SettingsError, match=r"does not fit: 1 MiB are to be had \(of 1 GiB in"):
        HostMemory(257, 4096, None)


def test_an_arena_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(SettingsError):
        HostArena(0)
    with pytest.raises(
        SettingsError, match=r"1,048,576 TiB of host memory cannot be had .*smaller host pool"
    ):
        HostArena(1 << 60)
    with HostArena(1) as arena, pytest.raises(ProtocolError, match="shared"):
        arena.fd  # noqa: B018


def test_two_mappings_see_one_arena() -> None:
    with HostArena(4096, shared=True) as arena:
        with HostArena.attach(os.dup(arena.fd), 4096) as other:
            other.bytes[5] = 77
        assert arena.bytes[5] == 77


def test_a_pool_of_contiguous_blocks() -> None:
    pool = Pool.of([np.zeros((5, 3, 4), np.float32)])
    assert (pool.slots, pool.block_bytes) == (5, 48)
    assert pool.fragments == ((0, 48, 48),)


def test_a_pool_over_the_layers_of_a_tensor() -> None:
    caches = torch.zeros(2, 2, 6, 16, 4, 8, dtype=torch.bfloat16)
    pool = Pool.of([caches[layer, kv] for layer in range(2) for kv in range(2)])
    part = 16 * 4 * 8 * 2
    assert pool.slots == 6
    assert pool.fragments == tuple((at * 6 * part, part, part) for at in range(4))
    strided = Pool.of([caches.transpose(0, 2)[:, kv, layer] for layer in (0, 1) for kv in (0, 1)])
    assert strided.fragments == pool.fragments


def test_a_pool_over_tensors_that_lie_anywhere() -> None:
    layers = [torch.full((4, 10), float(at)) for at in range(3)]
    host = np.zeros((4, 120), np.uint8)
    mover = NativeMover(Pool.of(layers), Pool.of([host]))
    slots = np.arange(4, dtype=np.int32)
    steps = np.zeros(4, np.int64)
    mover.submit([Transfer(1, Direction.SAVE, TransferClass.SAVE, 0.0, slots, slots, steps)])
    while not mover.poll().completions:
        mover.wait_news(1.0)
    mover.close(1.0)
    np.testing.assert_array_equal(host.view(np.float32)[2], np.repeat([0.0, 1.0, 2.0], 10))


def test_pools_that_cannot_work_are_refused() -> None:
    with pytest.raises(SettingsError, match="contiguous"):
        Pool.of([np.zeros((4, 6, 6))[:, :, :3]])
    with pytest.raises(SettingsError, match="same number"):
        Pool.of([np.zeros((4, 6)), np.zeros((5, 6))])
    with pytest.raises(SettingsError, match="at least one part"):
        Pool.of([])
    with pytest.raises(SettingsError, match="numpy array"):
        Pool.of([[1, 2]])
    with pytest.raises(SettingsError, match="bytes on the device"):
        NativeMover(Pool.of([np.zeros((4, 6))]), Pool.of([np.zeros((4, 7))]))
    parts = [np.zeros((4, 6)), np.zeros((4, 6))]
    with pytest.raises(SettingsError, match="contiguous in the host"):
        NativeMover(Pool.of(parts), Pool.of(parts))
    with pytest.raises(SettingsError, match="stride"):
        NativeMover(Pool.of([np.broadcast_to(np.zeros(6), (4, 6))]), Pool.of([np.zeros((4, 6))]))


def test_messages_can_be_pickled() -> None:
    steps = np.zeros(2, np.int64)
    slots = np.array([1, 2], np.int32)
    sent = Transfer(1, Direction.SAVE, TransferClass.SAVE, 1.5, slots, slots, steps)
    got: Transfer = pickle.loads(pickle.dumps(sent))
    np.testing.assert_array_equal(got.sources, sent.sources)
    assert got.direction is Direction.SAVE
    report = Report((1,), (Completion(1, Outcome.DONE, 2, 2, 8, 0.5, 1.0, ""),), 3)
    assert pickle.loads(pickle.dumps(report)) == report
    assert WINDOW_DTYPE.itemsize == 40
