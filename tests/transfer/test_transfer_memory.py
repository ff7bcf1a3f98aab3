"""Arenas and pools: exact sizes, layouts that fit, memory given back."""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import weakref
from pathlib import Path

import numpy as np
import pytest

from forebay.errors import DeviceError, ProtocolError, SettingsError
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


def test_the_descriptor_of_an_arena_is_closed_once() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(SettingsError):
        HostArena(1 << 60, shared=True)
    arena = HostArena(4096, shared=True)
    arena.close()
    assert os.listdir("/proc/self/fd") == before
    other = os.open("/dev/null", os.O_RDONLY)
    arena.close()
    os.close(other)  # or it was closed for another's


class ShortArena(HostArena):
    """Pinned memory as a driver gives it that stops in the middle of the third block."""

    error = "the driver refuses"

    def __init__(self, size_bytes: int, block_bytes: int, *, device_index: int) -> None:
        if device_index:
            raise DeviceError("no page of it")
        super().__init__(size_bytes)
        self._ready_bytes = 2 * block_bytes + 1

    @property
    def ready_bytes(self) -> int:
        return self._ready_bytes

    @property
    def seam_bytes(self) -> int:
        return 8192


def test_a_host_pool_that_is_pinned_in_part_is_used_in_part_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host, "PinnedArena", ShortArena)
    memory = HostMemory(4, 4096, 0)
    assert (memory.pool.slots, memory.pool.seam_bytes) == (4, 8192)
    for _ in range(2):
        assert memory.ready_slots() == 2
    (said,) = caplog.messages
    assert "stays at 8 KiB of 16 KiB: the driver refuses; memory to be had" in said
    memory.close()
    with pytest.raises(ProtocolError, match="closed"):
        memory.pool  # noqa: B018


def test_a_host_pool_of_which_nothing_can_be_pinned_is_refused_with_the_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "PinnedArena", ShortArena)
    with pytest.raises(SettingsError, match=r"cannot be pinned: no page of it; .*\(ulimit -l\)"):
        HostMemory(4, 4096, 1)


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


def test_a_pool_begins_where_its_first_part_in_memory_does() -> None:
    memory = np.zeros((2, 4, 16), np.uint8)
    pool = Pool.of([memory[1], memory[0]])
    assert pool.base_address == memory.ctypes.data
    assert pool.fragments == ((64, 16, 16), (0, 16, 16))


def test_axes_of_one_have_no_stride_that_matters() -> None:
    memory = np.zeros((4, 3, 16), np.uint8)
    assert Pool.of([memory[:, ::2][:, :1]]).fragments == ((0, 48, 16),)
    assert Pool.of([memory[:1, 0]]).fragments == ((0, 16, 16),)


def test_a_pool_keeps_the_memory_that_it_lies_in() -> None:
    part = np.zeros((4, 16), np.uint8)
    gone = weakref.ref(part)
    pool = Pool.of([part])
    del part
    assert gone() is not None
    del pool
    assert gone() is None


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
    for nothing in (np.zeros((4, 0)), np.zeros((0, 4)), np.zeros(())):
        with pytest.raises(SettingsError, match="no empty axis"):
            Pool.of([nothing])
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


def test_blocks_before_the_torn_ones_of_a_transfer_are_used_again() -> None:
    def torn(done: int, touched: int, torn_from: int) -> range:
        return Completion(1, Outcome.FAILED, done, touched, 0, 0.0, 1.0, "", torn_from).torn

    assert torn(2, 5, 0) == range(2, 5)
    assert torn(2, 5, 4) == range(4, 5)
    assert len(torn(5, 5, 0)) == 0


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
