"""The host pool under a device: pinned where a GPU reads it, plain memory where a CPU does."""

from __future__ import annotations

import logging
import resource

from forebay.errors import DeviceError, SettingsError
from forebay.machine.memory import read_memory
from forebay.machine.sizes import show_size
from forebay.machine.tree import Tree
from forebay.transfer.arena import HostArena
from forebay.transfer.pinned import PinnedArena
from forebay.transfer.pool import Pool

_logger = logging.getLogger("forebay.transfer")


class HostMemory:
    """Host memory of `slots` blocks, for the GPU `device_index`, or for a CPU where it is None.

    For a GPU it is pinned in the background; :meth:`ready_slots` says how far.
    Raises SettingsError for what cannot be had. Close every mover over it first.
    """

    def __init__(self, slots: int, block_bytes: int, device_index: int | None) -> None:
        self._slots, self._block_bytes = slots, block_bytes
        self._told = False
        size_bytes = slots * block_bytes
        self._arena = (
            _plain(size_bytes)
            if device_index is None
            else _pinned(size_bytes, block_bytes, device_index)
        )

    @property
    def pool(self) -> Pool:
        """The pool of all slots, ready or not."""
        arena = self._arena
        return Pool.of([arena.blocks(self._slots, self._block_bytes)], seam_bytes=arena.seam_bytes)

    def ready_slots(self) -> int:
        """Slots, from the first, that can be used by now. Logs it once if no more will be."""
        arena = self._arena
        if not self._told and isinstance(arena, PinnedArena) and arena.error:
            self._told = True
            _logger.warning(
                "the host pool stays at %s of %s: %s; %s",
                show_size(arena.ready_bytes),
                show_size(arena.size_bytes),
                arena.error,
                _how_to_pin(),
            )
        return min(self._slots, arena.ready_bytes // self._block_bytes)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._arena.close()


def require_room(size_bytes: int) -> None:
    """Raises SettingsError for more than is free: the kernel gives it, and kills who fills it."""
    memory = read_memory(Tree())
    if memory.room_bytes is not None and size_bytes > memory.room_bytes:
        raise SettingsError(
            f"a host pool of {show_size(size_bytes)} does not fit: {show_size(memory.room_bytes)} "
            f"are to be had ({memory.bound}); use a smaller one"
        )


def _plain(size_bytes: int) -> HostArena:
    require_room(size_bytes)
    return HostArena(size_bytes)


def _pinned(size_bytes: int, block_bytes: int, device_index: int) -> PinnedArena:
    """Raises SettingsError where nothing can be pinned, with the limits that may be why."""
    try:
        return PinnedArena(size_bytes, block_bytes, device_index=device_index)
    except DeviceError as error:
        raise SettingsError(
            f"a host pool of {show_size(size_bytes)} cannot be pinned: {error}; {_how_to_pin()}"
        ) from error


def _how_to_pin() -> str:
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit = "unlimited" if locked == resource.RLIM_INFINITY else show_size(locked)
    memory = read_memory(Tree())
    room = "unknown" if memory.room_bytes is None else show_size(memory.room_bytes)
    return (
        f"memory to be had: {room} ({memory.bound}), locked memory: {limit} (ulimit -l); use a "
        "smaller host pool or raise these limits"
    )
