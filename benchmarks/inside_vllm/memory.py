"""What host memory an arm takes: by its own processes, and by what the machine has left.

Neither sees all there is. Pinned memory that the driver allocates belongs to no process, and what
the machine has left is not told, or is of a whole host, in some containers: so all are noted.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

_CHARGED = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
_LOOK_S = 0.5
_STILL_BYTES = 128 << 20
_SETTLES_S = 60.0


def memory() -> dict[str, int]:
    """Bytes: of the machine, charged to this container, and of this session's processes."""
    found: dict[str, int] = {}
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, value = line.split(":")
        if name in ("MemAvailable", "MemFree", "MemTotal", "Shmem"):
            found[name] = int(value.split()[0]) * 1024
    charged = next((place for place in map(Path, _CHARGED) if place.exists()), None)
    if charged is not None:
        found["charged"] = int(charged.read_text(encoding="ascii"))
    found["resident"] = sum(map(_resident, _session()))
    return found


async def settled() -> dict[str, Any]:
    """Memory once it grows no more (host memory is pinned in the background), and how long that
    took.
    """
    began_s = time.perf_counter()
    before = memory()
    still = 0
    while still < 2 and time.perf_counter() - began_s < _SETTLES_S:
        await asyncio.sleep(_LOOK_S)
        after = memory()
        grew = max(abs(after[name] - before[name]) for name in ("resident", "MemAvailable"))
        still = still + 1 if grew < _STILL_BYTES else 0
        before = after
    return {"memory_started": before, "memory_settled_s": time.perf_counter() - began_s}


def taken(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Bytes taken between two looks, by where they were looked for."""
    grown = {
        name: after[name] - before[name]
        for name in ("resident", "charged")
        if name in after and name in before
    }
    shrunk = {
        name: before[name] - after[name]
        for name in ("MemAvailable", "MemFree")
        if name in after and name in before
    }
    return {**grown, **shrunk}


def _session() -> list[Path]:
    """The processes of this session: an arm's process leads one."""
    own = os.getsid(0)
    return [each for each in Path("/proc").glob("[0-9]*") if _session_of(each) == own]


def _session_of(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[3])
    except (OSError, IndexError, ValueError):
        return -1


def _resident(process: Path) -> int:
    """Its share of what lies in memory, or all of it where shares are not told."""
    for file, name in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            lines = (process / file).read_text().splitlines()
        except OSError:
            continue
        told = [line.split()[1] for line in lines if line.startswith(name)]
        if told:
            return int(told[0]) * 1024
    return 0
