"""Memory: how much there is, what may be committed, and in which pages it comes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from forebay.machine.cgroups import MemoryLimit, memory_limits
from forebay.machine.sizes import show_size
from forebay.machine.tree import Tree

_NEVER_OVERCOMMIT = 2


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. `available_bytes` is what the kernel could give without swapping; None: not known."""

    total_bytes: int | None
    available_bytes: int | None
    swap_bytes: int
    commit_room_bytes: int | None
    """What may still be reserved where the kernel refuses more than it has; else None."""
    limits: list[MemoryLimit]

    @property
    def most_bytes(self) -> int | None:
        """What this process could have at most, were nothing else in memory."""
        sizes = [limit.limit_bytes for limit in self.limits]
        return min([*sizes, self.total_bytes] if self.total_bytes else sizes, default=None)

    @property
    def room_bytes(self) -> int | None:
        """What this process can still take, by the machine and by every group that it is in."""
        rooms = [limit.room_bytes for limit in self.limits]
        rooms += [r for r in (self.available_bytes, self.commit_room_bytes) if r is not None]
        return min(rooms, default=None)

    @property
    def bound(self) -> str:
        """In words, what bounds the room: the machine, or which group."""
        tightest = min(self.limits, key=lambda limit: limit.room_bytes, default=None)
        if tightest is not None and tightest.room_bytes == self.room_bytes:
            return f"control group {tightest.folder}: limit {show_size(tightest.limit_bytes)}"
        if self.commit_room_bytes is not None and self.commit_room_bytes == self.room_bytes:
            return "vm.overcommit_memory=2 lets no more be reserved"
        return f"of {show_size(self.total_bytes or 0)} in the machine"


def read_memory(tree: Tree) -> Memory:
    """The memory of the machine and of this process's groups."""
    info = tree.fields("/proc/meminfo")
    commit_room = None
    if tree.number("/proc/sys/vm/overcommit_memory") == _NEVER_OVERCOMMIT:
        commit_room = max(0, info.get("CommitLimit", 0) - info.get("Committed_AS", 0))
    return Memory(
        total_bytes=info.get("MemTotal"),
        available_bytes=info.get("MemAvailable", info.get("MemFree")),
        swap_bytes=info.get("SwapTotal", 0),
        commit_room_bytes=commit_room,
        limits=memory_limits(tree),
    )


@dataclass(frozen=True, slots=True)
class HugePages:
    """Transparent huge pages as set, "" where the kernel has none; explicit pools by page bytes,
    (pages in all, pages free).
    """

    enabled: str
    defrag: str
    shared: str
    pools: dict[int, tuple[int, int]]


def read_huge_pages(tree: Tree) -> HugePages:
    """What the kernel's settings say of huge pages."""
    base = "/sys/kernel/mm/transparent_hugepage"
    pools: dict[int, tuple[int, int]] = {}
    for name in tree.names("/sys/kernel/mm/hugepages"):
        size = re.fullmatch(r"hugepages-(\d+)kB", name)
        pages = tree.number(f"/sys/kernel/mm/hugepages/{name}/nr_hugepages")
        free = tree.number(f"/sys/kernel/mm/hugepages/{name}/free_hugepages")
        if size and pages:
            pools[int(size[1]) * 1024] = (pages, free or 0)
    return HugePages(
        enabled=_chosen(tree.text(f"{base}/enabled")),
        defrag=_chosen(tree.text(f"{base}/defrag")),
        shared=_chosen(tree.text(f"{base}/shmem_enabled")),
        pools=pools,
    )


def _chosen(text: str | None) -> str:
    """The word in brackets of "always [madvise] never"."""
    found = re.search(r"\[([\w+]+)\]", text or "")
    return found[1] if found else ""
