"""Files of machines that are not there: what /proc and /sys say on them."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from forebay.doctor.finding import Disk, Machine
from forebay.machine.driver import Driver
from forebay.machine.tree import Tree

GIB = 1 << 30
NO_DRIVER = Driver(error="libcuda.so.1: not there", missing=True)
V2_MOUNT = "30 22 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/{name} rw,nosuid - cgroup cgroup rw,{name}"


def tree_of(root: Path, files: dict[str, str]) -> Tree:
    """A tree below `root` with `files` by path."""
    for name, text in files.items():
        file = root / name.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return Tree(root)


def meminfo(**gib: float) -> str:
    """/proc/meminfo with these fields, in GiB."""
    return "".join(f"{name}:  {int(size * GIB / 1024)} kB\n" for name, size in gib.items())


def bare_metal() -> dict[str, str]:
    """Two nodes, no limits, a clock that costs nothing, huge pages on request."""
    cpus = {0: "0-15", 1: "16-31"}
    nodes = {
        f"/sys/devices/system/node/node{node}/{name}": text
        for node, listed in cpus.items()
        for name, text in (
            ("cpulist", listed),
            ("meminfo", f"Node {node} MemTotal: {256 << 20} kB\nNode {node} MemFree: 1024 kB\n"),
        )
    }
    return nodes | {
        "/proc/meminfo": meminfo(MemTotal=512, MemAvailable=480, SwapTotal=0),
        "/proc/self/cgroup": "0::/user.slice/session.scope\n",
        "/proc/self/mountinfo": V2_MOUNT.format(root="/") + "\n",
        "/proc/sys/vm/overcommit_memory": "0",
        "/proc/sys/net/core/somaxconn": "4096",
        "/sys/fs/cgroup/user.slice/session.scope/memory.max": "max",
        "/sys/fs/cgroup/user.slice/session.scope/cpu.max": "max 100000",
        "/sys/devices/system/node/online": "0-1",
        "/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc",
        "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        "/sys/kernel/mm/transparent_hugepage/defrag": "always defer [madvise] never",
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [advise] never",
    }


def container_v2(limit_bytes: int = 8 * GIB, quota: str = "150000 100000") -> dict[str, str]:
    """A container of version 2 with a namespace of its own: its files lie at the mount."""
    return bare_metal() | {
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": str(limit_bytes),
        "/sys/fs/cgroup/memory.current": str(3 * GIB),
        "/sys/fs/cgroup/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n",
        "/sys/fs/cgroup/memory.swap.max": "0",
        "/sys/fs/cgroup/cpu.max": quota,
    }


def nested_v2() -> dict[str, str]:
    """A service without a limit of its own, in a slice that has one."""
    group = "/sys/fs/cgroup/model.slice"
    return bare_metal() | {
        "/proc/self/cgroup": "0::/model.slice/forebay.service\n",
        f"{group}/memory.max": str(16 * GIB),
        f"{group}/memory.current": str(6 * GIB),
        f"{group}/cpu.max": "400000 100000",
        f"{group}/forebay.service/memory.max": "max",
        f"{group}/forebay.service/memory.current": str(GIB),
        f"{group}/forebay.service/cpu.max": "max 100000",
    }


def container_v1(group: str = "/docker/abc") -> dict[str, str]:
    """A container of version 1: the kernel names the host's path, the mount shows it as its top."""
    mounts = [V1_MOUNT.format(root="/docker/abc", name=name) for name in ("memory", "cpu,cpuacct")]
    return bare_metal() | {
        "/proc/self/cgroup": f"4:memory:{group}\n2:cpu,cpuacct:{group}\n0::/\n",
        "/proc/self/mountinfo": "\n".join(mounts) + "\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 * GIB),
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": str(2 * GIB),
        "/sys/fs/cgroup/memory/memory.stat": f"cache 1\ntotal_inactive_file {GIB}\n",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }


def machine_of(root: Path, files: dict[str, str], **changed: Any) -> Machine:
    """What the doctor sees on a machine with these files; no GPU unless one is given."""
    limits = {resource.RLIMIT_NOFILE: 65536} | changed.pop("limits", {})
    disk = changed.pop("disk", Disk(100 * GIB, 50 * GIB))
    settings: dict[str, Any] = {
        "tree": tree_of(root, files),
        "limit": limits.get,
        "disk": lambda _: disk,
        "driver": NO_DRIVER,
        "environ": {},
    }
    return Machine(**settings | changed)
