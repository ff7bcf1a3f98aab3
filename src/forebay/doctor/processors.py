"""Processors, nodes, and the clock."""

from __future__ import annotations

from collections.abc import Iterator

from forebay.doctor.finding import Finding, Level, Machine, Wanted
from forebay.machine.cgroups import cpu_quota
from forebay.machine.cpus import affinity, read_nodes, usable_cores
from forebay.machine.sizes import show_size
from forebay.machine.tree import as_number, as_numbers

# One computes; the arbiters, the event loop and the tokenizer share another.
_FEW_CORES = 2
# Read without a call into the kernel.
_CHEAP_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter")
_CLOCK = "/sys/devices/system/clocksource/clocksource0"


def check_cores(machine: Machine) -> Iterator[Finding]:
    """Cores by affinity and quota, and how many threads were asked for."""
    cores, allowed, quota = usable_cores(machine.tree), len(affinity()), cpu_quota(machine.tree)
    online = len(as_numbers(machine.tree.text("/sys/devices/system/cpu/online"))) or allowed
    read = f"{cores} usable"
    if quota is not None and quota < allowed:
        read += f": a control group allows {quota:g} of {allowed}"
    elif allowed < online:
        read += f": affinity allows {allowed} of {online}"
    if cores < _FEW_CORES:
        yield Finding(
            "processors",
            Level.WARN,
            read,
            "the threads that copy take turns with the model, so loads hide less",
            "two cores or more: docker run --cpus=2, CPUQuota=200% in systemd, taskset",
        )
    else:
        yield Finding("processors", Level.OK, read)
    threads = as_number(machine.environ.get("OMP_NUM_THREADS"))
    if threads is not None and threads > cores:
        yield Finding(
            "OMP_NUM_THREADS",
            Level.NOTE,
            f"{threads}, with {cores} usable cores",
            "the engine computes with no more threads than usable cores; other libraries may",
            f"export OMP_NUM_THREADS={cores}",
        )


def check_nodes(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """NUMA: where the processors, the memory and the devices are."""
    nodes = read_nodes(machine.tree)
    if len(nodes) < 2:
        yield Finding("NUMA", Level.OK, "one node")
        return
    allowed = affinity()
    mine = [node for node in nodes if node.cpus & allowed]
    listed = ", ".join(f"{n.number}: {show_size(n.total_bytes)}" for n in nodes)
    beside = {device.bus: _node_of(machine, device.bus) for device in machine.driver.devices}
    near = {node for node in beside.values() if node is not None}
    read = f"{len(nodes)} nodes ({listed})"
    if near:
        read += "; " + ", ".join(f"device {bus} at {node}" for bus, node in beside.items())
    if len(mine) > 1:
        best = min(near, default=max(nodes, key=lambda node: node.free_bytes).number)
        yield Finding(
            "NUMA",
            Level.NOTE,
            read,
            "this process may run on several nodes, so copies may cross from one to another",
            f"numactl --cpunodebind={best} --preferred={best} forebay serve ...",
        )
    elif near and mine and mine[0].number not in near:
        best = min(near)
        yield Finding(
            "NUMA",
            Level.WARN,
            read,
            f"this process runs at node {mine[0].number}, and every copy crosses to the device's",
            f"numactl --cpunodebind={best} --preferred={best} forebay serve ...",
        )
    else:
        yield Finding("NUMA", Level.OK, read)
    largest = max(node.total_bytes for node in nodes)
    if wanted.host_bytes > largest:
        yield Finding(
            "NUMA memory",
            Level.NOTE,
            f"the largest node has {show_size(largest)}",
            f"a host pool of {show_size(wanted.host_bytes)} spreads over nodes, and a part of it "
            "is copied across",
            "a smaller --host-bytes, or one server for each node",
        )


def check_clock(machine: Machine) -> Iterator[Finding]:
    """The clock that every window and step is timed by."""
    clock = machine.tree.text(f"{_CLOCK}/current_clocksource")
    if clock is None:
        return
    if clock in _CHEAP_CLOCKS:
        yield Finding("clock", Level.OK, clock)
        return
    known = (machine.tree.text(f"{_CLOCK}/available_clocksource") or "").split()
    better = next((name for name in _CHEAP_CLOCKS if name in known), None)
    yield Finding(
        "clock",
        Level.NOTE,
        clock,
        "every look at the clock is a call into the kernel, several for each step and window",
        f"echo {better} > {_CLOCK}/current_clocksource"
        if better
        else "ask the machine's provider for a tsc clock",
    )


def _node_of(machine: Machine, bus: str) -> int | None:
    node = machine.tree.number(f"/sys/bus/pci/devices/{bus}/numa_node")
    return None if node is None or node < 0 else node
