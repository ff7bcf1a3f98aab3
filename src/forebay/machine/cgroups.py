"""The control groups that this process is in, of both versions, from its own up to the mount.

A limit anywhere on that way binds. In a container the files of the own group may lie right at the
mount, whatever path the kernel names (a namespace of its own, or a bind mount).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from forebay.machine.tree import Tree, as_number

# The kernel writes "no limit" of version 1 as the largest multiple of a page; anything near is one.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A group's limit. `used_bytes` counts what its processes hold and its page cache;
    `reclaimable_bytes` of it the kernel gives up first (file pages that were not used lately).
    """

    folder: str
    limit_bytes: int
    used_bytes: int
    reclaimable_bytes: int

    @property
    def room_bytes(self) -> int:
        """What may still be taken."""
        return max(0, self.limit_bytes - max(0, self.used_bytes - self.reclaimable_bytes))


def memory_limits(tree: Tree) -> list[MemoryLimit]:
    """Every memory limit that binds this process, its own group's first."""
    found: list[MemoryLimit] = []
    for version, folder in _folders(tree, "memory"):
        if version == 2:
            # Above `high` a group is not ended but slowed down until it is below again.
            limits = ("memory.max", "memory.high")
            names = ("memory.current", "inactive_file")
        else:
            limits = ("memory.limit_in_bytes",)
            names = ("memory.usage_in_bytes", "total_inactive_file")
        numbers = [tree.number(f"{folder}/{name}") for name in limits]
        limit = min((number for number in numbers if number is not None), default=_NO_LIMIT)
        if limit >= _NO_LIMIT:
            continue
        used = tree.number(f"{folder}/{names[0]}") or 0
        reclaimable = tree.fields(f"{folder}/memory.stat").get(names[1], 0)
        found.append(MemoryLimit(folder, limit, used, min(reclaimable, used)))
    return found


def swap_is_barred(tree: Tree) -> bool:
    """Whether a group says that this process's memory is never swapped out."""
    for version, folder in _folders(tree, "memory"):
        if version == 2 and tree.number(f"{folder}/memory.swap.max") == 0:
            return True
        if version == 1 and tree.number(f"{folder}/memory.swappiness") == 0:
            return True
    return False


def cpu_quota(tree: Tree) -> float | None:
    """Cores' worth of time that the tightest group allows; None where none limits it."""
    quotas = [
        quota
        for version, folder in _folders(tree, "cpu")
        if (quota := _quota(tree, version, folder)) is not None
    ]
    return min(quotas, default=None)


def _quota(tree: Tree, version: int, folder: str) -> float | None:
    if version == 2:
        allowed, _, period = (tree.text(f"{folder}/cpu.max") or "").partition(" ")
        allowed_us, period_us = as_number(allowed), as_number(period)
    else:
        allowed_us = tree.number(f"{folder}/cpu.cfs_quota_us")
        period_us = tree.number(f"{folder}/cpu.cfs_period_us")
    if not allowed_us or not period_us or allowed_us < 0:
        return None
    return allowed_us / period_us


def _folders(tree: Tree, controller: str) -> list[tuple[int, str]]:
    """(version, folder) of the groups, own one first, in every mounted hierarchy that counts."""
    groups = _own_groups(tree)
    folders: list[tuple[int, str]] = []
    for line in (tree.text("/proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        words, kind = left.split(), right.split()
        if len(words) < 5 or len(kind) < 3:
            continue
        root, mount = words[3], words[4]
        if kind[0] == "cgroup2":
            version, group = 2, groups.get("")
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            version, group = 1, groups.get(controller)
        else:
            continue
        folders += [(version, each) for each in _chain(tree, mount, root, group or "/")]
    return folders


def _own_groups(tree: Tree) -> dict[str, str]:
    """The path of this process's group by controller; "" is version 2."""
    groups: dict[str, str] = {}
    for line in (tree.text("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def _chain(tree: Tree, mount: str, root: str, group: str) -> list[str]:
    """Folders from the own group's up to the mount."""
    inside = PurePosixPath(group)
    if root != "/" and inside.is_relative_to(root):
        inside = PurePosixPath("/") / inside.relative_to(root)
    # ".." appears where the group lies above what the namespace shows: then only the mount is left.
    if ".." in inside.parts or not tree.is_folder(f"{mount}{inside}"):
        inside = PurePosixPath("/")
    levels = [inside, *inside.parents] if inside != PurePosixPath("/") else [inside]
    return [f"{mount.rstrip('/')}{level}".rstrip("/") for level in levels]
