"""Host memory from which a GPU's copy engines read at full rate: pinned, and ready from the front.

Pageable memory goes through the driver's own buffer, at a seventh of the rate and with the caller
blocked. Pinning takes seconds for tens of gigabytes, so it goes on in the background, slice by
slice, while the front is used.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay import _native
from forebay.errors import ProtocolError, SettingsError
from forebay.machine.memory import read_memory
from forebay.machine.sizes import show_size
from forebay.machine.tree import Tree
from forebay.transfer.arena import Arena

_SLICE_BYTES = 32 << 20
"""A registration holds a lock of the driver that other threads' calls may need: an H200's host
registered 30 GiB/s in pieces of 32 MiB and of 128 MiB alike, so the smaller, a millisecond each."""
_SHARE = 0.25
"""At full rate, an allocation by another thread waited 13 ms instead of 0.4 (medians); at a quarter
it took as long as without any pinning."""
_TOUCHING_THREADS = 2
"""Two touched 13 GiB/s of memory that the machine had touched before, more than a quarter of what
registering takes. While eight touched fresh memory, a mapping by another thread waited for half a
millisecond; and eight may be all the cores that there are."""

_open: weakref.WeakSet[PinnedArena] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A CUDA device as the driver tells of it. `numa_node` is -1 where there is only one."""

    name: str
    memory_bytes: int
    copy_engines: int
    numa_node: int


def cuda_devices() -> list[CudaDevice]:
    """The CUDA devices that this process sees. Raises SettingsError without a driver."""
    return [CudaDevice(*each) for each in _native.cuda_devices()]


class PinnedArena(Arena):
    """`size_bytes` of pinned memory for blocks of `block_bytes`, of which no copy may cross a
    registration.

    Its first `ready_bytes` can be used; they grow in the background, in registrations of about
    `slice_bytes`, which take at most `share` of the time while nobody waits for them in
    `wait_ready`. `threads` touch its pages ahead of that. Memory that may not be registered is
    allocated by the driver instead, all at once, as it is with `in_place` False; `how` tells.

    Raises `SettingsError` without a driver, a device of that index, or the memory, and
    `DeviceError` when nothing of it can be pinned.
    """

    def __init__(
        self,
        size_bytes: int,
        block_bytes: int,
        *,
        device_index: int = 0,
        slice_bytes: int = _SLICE_BYTES,
        share: float = _SHARE,
        threads: int = _TOUCHING_THREADS,
        in_place: bool = True,
    ) -> None:
        if size_bytes <= 0:
            raise SettingsError("an arena needs a positive size")
        room = read_memory(Tree()).room_bytes
        if room is not None and size_bytes > room:
            raise SettingsError(
                f"{show_size(size_bytes)} of pinned memory do not fit: {show_size(room)} are to be "
                "had; use a smaller pool"
            )
        devices = cuda_devices()
        known = 0 <= device_index < len(devices)
        self._memory = _native.PinnedMemory(
            size_bytes,
            address=0,
            device_index=device_index,
            grain_bytes=block_bytes,
            slice_bytes=slice_bytes,
            share=share,
            threads=threads,
            numa_node=devices[device_index].numa_node if known else -1,
            in_place=in_place,
        )
        buffer = (ctypes.c_uint8 * size_bytes).from_address(self._memory.address)
        self._opened(np.ctypeslib.as_array(buffer))

    @classmethod
    def register(
        cls,
        memory: NDArray[np.uint8],
        block_bytes: int,
        *,
        device_index: int = 0,
        slice_bytes: int = _SLICE_BYTES,
        share: float = _SHARE,
    ) -> PinnedArena:
        """Pin `memory`, uint8 of shape [size_bytes], which begins at a page and stays the caller's.

        Its bytes are not changed, and `close` only unpins it: the caller frees it afterwards.
        Raises `SettingsError` for memory of another form, `DeviceError` where the driver refuses.
        """
        if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous:
            raise SettingsError("memory to pin must be a contiguous one-dimensional uint8 array")
        arena = cls.__new__(cls)
        arena._memory = _native.PinnedMemory(
            len(memory),
            address=memory.ctypes.data,
            device_index=device_index,
            grain_bytes=block_bytes,
            slice_bytes=slice_bytes,
            share=share,
            threads=1,
            numa_node=-1,
            in_place=True,
        )
        arena._opened(memory)
        return arena

    def _opened(self, memory: NDArray[np.uint8]) -> None:
        self._bytes = memory
        self._users: weakref.WeakSet[object] = weakref.WeakSet()
        _open.add(self)

    @staticmethod
    def lend(address: int, user: object) -> PinnedArena | None:
        """The open arena that `address` lies in, if any: it is not closed before `user` is, who
        gives it back by :meth:`take_back`.
        """
        for arena in _open:
            if arena._bytes is not None and 0 <= address - arena.address < arena.size_bytes:
                arena._users.add(user)
                return arena
        return None

    def take_back(self, user: object) -> None:
        """`user` copies nothing any more."""
        self._users.discard(user)

    @property
    def ready_bytes(self) -> int:
        """How much of it, from the front, is pinned by now."""
        return self._memory.ready_bytes

    @property
    def seam_bytes(self) -> int:
        """How long one registration is: no copy may cross a multiple of it from the front. 0 where
        there is only one, or none because the driver allocated."""
        slice_bytes = self._memory.slice_bytes
        return slice_bytes if self.how == "registered" and slice_bytes < self.size_bytes else 0

    @property
    def how(self) -> str:
        """ "registered", or "allocated" where the driver would not pin memory in place."""
        return self._memory.how

    @property
    def error(self) -> str:
        """Why pinning stopped before the end; empty as long as it has not."""
        return self._memory.error

    def wait_ready(self, size_bytes: int, timeout_s: float) -> bool:
        """Wait until so much is ready or no more will be. Returns whether it is."""
        return self._memory.wait_ready(size_bytes, timeout_s)

    def close(self) -> None:
        """Unpin and give back. Idempotent. Views of it must not be used afterwards.

        Raises `ProtocolError` under a mover that is open.
        """
        if len(self._users):
            raise ProtocolError("a mover over this memory is open: close it first")
        self._bytes = None
        self._memory.close()
