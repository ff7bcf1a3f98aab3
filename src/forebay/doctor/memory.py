"""Whether the pools fit: memory that is there, that may be used, that may be locked, and how."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from forebay.doctor.device import choose
from forebay.doctor.finding import Finding, Level, Machine, Wanted
from forebay.doctor.model import Weights
from forebay.machine.cgroups import swap_is_barred
from forebay.machine.memory import read_huge_pages, read_memory
from forebay.machine.sizes import show_size

PROCESS_BYTES = 400 << 20
"""What a server takes beside weights and pools: the resident memory of one over a model of a few
kilobytes, on the CPU build of PyTorch 2.13."""

# A machine that is this full has no page cache left to speak of.
_TIGHT = 0.9
_SMALL_SHM_BYTES = 1 << 30
_RAISE = (
    "a smaller --host-bytes, or a larger limit: docker run --memory=SIZE, MemoryMax= in systemd, "
    "resources.limits.memory in Kubernetes"
)


def host_pool_room(machine: Machine, wanted: Wanted, weights: Weights) -> int | None:
    """Bytes of the largest host pool that fits now; None where the memory is not known."""
    room = read_memory(machine.tree).room_bytes
    return None if room is None else max(0, room - _beside(machine, wanted, weights))


def check_memory(machine: Machine, wanted: Wanted, weights: Weights) -> Iterator[Finding]:
    """The pools against the machine's memory and every control group's limit."""
    memory = read_memory(machine.tree)
    room = memory.room_bytes
    if room is None:
        yield Finding(
            "memory",
            Level.NOTE,
            "/proc/meminfo cannot be read",
            "how large the pools may be is not known",
            "mount /proc in the container",
        )
        return
    needed = wanted.host_bytes + _beside(machine, wanted, weights)
    read = f"{show_size(room)} to be had ({memory.bound})"
    asked = f"a host pool of {show_size(wanted.host_bytes)} and all beside it, {show_size(needed)},"
    if needed > room:
        yield Finding(
            "memory", Level.FAIL, read, f"{asked} does not fit: the kernel ends the server", _RAISE
        )
    elif needed > _TIGHT * room:
        yield Finding("memory", Level.WARN, read, f"{asked} leaves nearly nothing", _RAISE)
    else:
        yield Finding("memory", Level.OK, read)
    yield from _check_address_space(machine, needed)


def check_locked(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """What may be locked in memory, where a pool is pinned."""
    limit = machine.limit(resource.RLIMIT_MEMLOCK)
    if limit is None:
        yield Finding("locked memory", Level.OK, "unlimited")
        return
    read = f"limit {show_size(limit)} (ulimit -l)"
    if limit >= wanted.host_bytes:
        yield Finding("locked memory", Level.OK, read)
    elif choose(machine, wanted).gpu is None:
        yield Finding("locked memory", Level.OK, f"{read}; on the CPU the host pool is not pinned")
    else:
        # Driver 580 pinned and registered 1 GiB for a user without privileges under a limit of
        # 8 MiB, which mlock of 64 MiB failed under.
        yield Finding(
            "locked memory",
            Level.NOTE,
            read,
            f"CUDA's driver pins a host pool of {show_size(wanted.host_bytes)} without counting it "
            "here; mlock, io_uring and RDMA count, and cannot",
            "docker run --ulimit memlock=-1, LimitMEMLOCK=infinity in systemd, or memlock in "
            "/etc/security/limits.conf",
        )


def check_swap(machine: Machine) -> Iterator[Finding]:
    """Whether the host pool can be swapped out."""
    swap = read_memory(machine.tree).swap_bytes
    if not swap or swap_is_barred(machine.tree):
        yield Finding("swap", Level.OK, "none for this process")
        return
    yield Finding(
        "swap",
        Level.NOTE,
        f"{show_size(swap)}",
        "under pressure the kernel may swap out a host pool that is not pinned, and a load then "
        "waits for the disk",
        "swapoff -a, docker run --memory-swap equal to --memory, or MemorySwapMax=0 in systemd",
    )


def check_shared(machine: Machine) -> Iterator[Finding]:
    """/dev/shm, which is for others: Forebay's shared arenas have no path."""
    disk = machine.disk(Path("/dev/shm"))
    if disk is None:
        return
    read = f"{show_size(disk.total_bytes)}, {show_size(disk.free_bytes)} free"
    if disk.total_bytes >= _SMALL_SHM_BYTES:
        yield Finding("/dev/shm", Level.OK, read)
    else:
        yield Finding(
            "/dev/shm",
            Level.NOTE,
            read,
            "Forebay's own arenas do not use it; PyTorch's and NCCL's worker processes do, and "
            "fail where it is small",
            "docker run --shm-size=2g, or an emptyDir of medium Memory in Kubernetes",
        )


def check_huge_pages(machine: Machine) -> Iterator[Finding]:
    """Transparent huge pages, and explicit pools that nobody else can use."""
    pages = read_huge_pages(machine.tree)
    base = "/sys/kernel/mm/transparent_hugepage"
    if pages.enabled in ("", "never"):
        yield Finding(
            "huge pages",
            Level.NOTE,
            f"transparent ones: {pages.enabled or 'not in this kernel'}",
            "arenas lie on small pages: more of them to touch and to pin at start",
            f"echo madvise > {base}/enabled",
        )
    else:
        read = f"transparent ones: {pages.enabled}; defrag: {pages.defrag or 'unknown'}"
        yield Finding("huge pages", Level.OK, f"{read}; shared: {pages.shared or 'unknown'}")
    reserved = sum(size * free for size, (_, free) in pages.pools.items())
    if reserved:
        yield Finding(
            "huge page pools",
            Level.NOTE,
            f"{show_size(reserved)} reserved and free",
            "Forebay takes no pages from explicit pools, so this memory is not for the host pool",
            "echo 0 > /proc/sys/vm/nr_hugepages, unless another program needs them",
        )


def _beside(machine: Machine, wanted: Wanted, weights: Weights) -> int:
    """What lies in memory beside the host pool. Without a GPU the device pool does too."""
    needed = PROCESS_BYTES + weights.memory_bytes
    if choose(machine, wanted).gpu is None and weights.geometry is not None:
        needed += wanted.device_tokens * weights.geometry.token_bytes
    return needed


def _check_address_space(machine: Machine, needed: int) -> Iterator[Finding]:
    for which, name, option in (
        (resource.RLIMIT_AS, "address space", "-v"),
        (resource.RLIMIT_DATA, "data segment", "-d"),
    ):
        limit = machine.limit(which)
        if limit is not None and limit < needed:
            yield Finding(
                name,
                Level.FAIL,
                f"limit {show_size(limit)}",
                f"{show_size(needed)} are to be reserved, which the kernel refuses",
                f"ulimit {option} unlimited",
            )
