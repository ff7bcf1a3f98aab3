"""Host memory for pools: exact in size, page aligned, given back when closed.

An allocator that rounds up to powers of two would cost up to twice the memory, and memory on pages
of its own can be pinned in place.
"""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from forebay.errors import ProtocolError, SettingsError
from forebay.machine.sizes import show_size


class Arena(ABC):
    """Memory of a host pool, from the front; `close` gives it back."""

    _bytes: NDArray[np.uint8] | None

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """All of the memory, uint8 of shape [size_bytes]; a view that must not outlive `close`."""
        if self._bytes is None:
            raise ProtocolError("the arena is closed")
        return self._bytes

    @property
    def address(self) -> int:
        """Where the memory begins in this process."""
        return int(self.bytes.ctypes.data)

    @property
    def size_bytes(self) -> int:
        """As asked for; nothing is rounded up."""
        return len(self.bytes)

    @property
    @abstractmethod
    def ready_bytes(self) -> int:
        """How much of it, from the front, can be used by now."""

    @property
    @abstractmethod
    def seam_bytes(self) -> int:
        """No copy may cross a multiple of this from the front; 0: it may, anywhere."""

    def blocks(self, slots: int, block_bytes: int) -> NDArray[np.uint8]:
        """The first `slots * block_bytes` bytes, of shape [slots, block_bytes].

        Raises `SettingsError` when the arena is smaller.
        """
        if slots * block_bytes > self.size_bytes:
            raise SettingsError(
                f"{slots} blocks of {block_bytes} bytes do not fit an arena of {self.size_bytes}"
            )
        return self.bytes[: slots * block_bytes].reshape(slots, block_bytes)

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. Idempotent. Close every mover first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class HostArena(Arena):
    """`size_bytes` of zeroed memory. Pages are taken from the system when first written.

    With `shared` the memory has a file descriptor through which a child process can map it too.
    `huge_pages` asks the kernel for transparent huge pages, which it may ignore.
    Raises `SettingsError` when the memory cannot be had.
    """

    def __init__(self, size_bytes: int, *, shared: bool = False, huge_pages: bool = False) -> None:
        if size_bytes <= 0:
            raise SettingsError("an arena needs a positive size")
        self._fd = -1
        try:
            if shared:
                self._fd = os.memfd_create("forebay-arena", os.MFD_CLOEXEC)
                os.ftruncate(self._fd, size_bytes)
            self._map(size_bytes)
        except OSError as error:
            self._drop_fd()
            raise SettingsError(
                f"{show_size(size_bytes)} of host memory cannot be had ({error}): use a smaller "
                "host pool"
            ) from error
        if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            self._advise_huge()

    @classmethod
    def attach(cls, fd: int, size_bytes: int) -> HostArena:
        """The arena another process shared, by a descriptor inherited from it. Takes over `fd`."""
        arena = cls.__new__(cls)
        arena._fd = fd
        arena._map(size_bytes)
        return arena

    def _map(self, size_bytes: int) -> None:
        if self._fd >= 0:
            self._memory = mmap.mmap(self._fd, size_bytes)
        else:
            self._memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)

    def _advise_huge(self) -> None:
        try:
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return  # a kernel without them: ordinary pages serve as well

    @property
    def ready_bytes(self) -> int:
        """How much of it can be used by now: all, unlike with pinned memory."""
        return self.size_bytes

    @property
    def seam_bytes(self) -> int:
        """0: a copy may cross it anywhere, unlike pinned memory."""
        return 0

    @property
    def fd(self) -> int:
        """The descriptor of shared memory. Raises `ProtocolError` when it is not shared."""
        if self._fd < 0:
            raise ProtocolError("the arena is not shared: create it with shared=True")
        return self._fd

    def close(self) -> None:
        """Give the memory back. Idempotent.

        Views still held keep the mapping alive until they are gone. Close every mover first.
        """
        self._bytes = None
        try:
            self._memory.close()
        except BufferError:
            return  # somebody still holds a view: the mapping goes with the last one
        finally:
            self._drop_fd()

    def _drop_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
