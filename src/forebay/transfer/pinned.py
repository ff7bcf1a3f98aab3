"""Host memory from which a GPU's copy engines read at full rate: pinned, and ready from the front.

Pageable memory goes through the driver's own buffer, at a seventh of the rate and with the caller
blocked. Pinning takes seconds for tens of gigabytes, so it goes on in the background, slice by
slice, while the front is used.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from forebay import _native
from forebay.errors import SettingsError
from forebay.transfer.arena import Arena

_SLICE_BYTES = 1 << 30
"""One registration of hundreds of gigabytes fails, and holds the driver's lock meanwhile."""
_TOUCHING_THREADS = 8


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

    Its first `ready_bytes` can be used; they grow in the background. Close every mover first.
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
        threads: int = _TOUCHING_THREADS,
    ) -> None:
        if size_bytes <= 0:
            raise SettingsError("an arena needs a positive size")
        devices = cuda_devices()
        known = 0 <= device_index < len(devices)
        self._memory = _native.PinnedMemory(
            size_bytes,
            address=0,
            device_index=device_index,
            grain_bytes=block_bytes,
            slice_bytes=slice_bytes,
            threads=threads,
            numa_node=devices[device_index].numa_node if known else -1,
        )
        buffer = (ctypes.c_uint8 * size_bytes).from_address(self._memory.address)
        self._bytes = np.ctypeslib.as_array(buffer)

    @property
    def ready_bytes(self) -> int:
        """How much of it, from the front, is pinned by now."""
        return self._memory.ready_bytes

    @property
    def seam_bytes(self) -> int:
        """How long one registration is: no copy may cross a multiple of it from the front."""
        return self._memory.slice_bytes

    @property
    def how(self) -> str:
        """ "registered", or "allocated" where the driver would not pin memory in place."""
        return self._memory.how

    @property
    def error(self) -> str:
        """Why pinning stopped before the end; empty if it did not."""
        return self._memory.error

    def wait_ready(self, size_bytes: int, timeout_s: float) -> bool:
        """Wait until so much is ready or no more will be. Returns whether it is."""
        return self._memory.wait_ready(size_bytes, timeout_s)

    def close(self) -> None:
        """Unpin and give back. Idempotent. Views of it must not be used afterwards."""
        self._bytes = None
        self._memory.close()
