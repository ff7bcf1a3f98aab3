"""Processors: how many this process may use, in which nodes they and the memory lie."""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass

from forebay.machine.cgroups import cpu_quota
from forebay.machine.tree import Tree, as_numbers


def affinity() -> frozenset[int]:
    """The processors that this process may run on."""
    ask = getattr(os, "sched_getaffinity", None)
    return frozenset(ask(0)) if ask else frozenset(range(os.cpu_count() or 1))


def usable_cores(tree: Tree | None = None) -> int:
    """Cores by this process's affinity and by the tightest quota of its control groups, at least 1.

    A part of a core counts as one.
    """
    cores = max(1, len(affinity()))
    quota = cpu_quota(tree or Tree())
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def processor_name(tree: Tree | None = None) -> str:
    """The processor's model, or its architecture where the kernel does not tell."""
    lines = ((tree or Tree()).text("/proc/cpuinfo") or "").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = next(iter(names), "") or platform.processor() or platform.machine() or "processor"
    return " ".join(name.split())


def machine_name(tree: Tree | None = None) -> str:
    """The processor and how many cores of it: equal for machines that are as quick."""
    tree = tree or Tree()
    cores = usable_cores(tree)
    return f"{processor_name(tree)}, {cores} core{'s' * (cores > 1)}"


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node."""

    number: int
    cpus: frozenset[int]
    total_bytes: int
    free_bytes: int


def read_nodes(tree: Tree) -> list[Node]:
    """The nodes that have memory or processors; none where the kernel names none."""
    base = "/sys/devices/system/node"
    nodes: list[Node] = []
    for number in sorted(as_numbers(tree.text(f"{base}/online"))):
        sizes = _sizes(tree.text(f"{base}/node{number}/meminfo") or "")
        cpus = as_numbers(tree.text(f"{base}/node{number}/cpulist"))
        node = Node(number, cpus, sizes.get("MemTotal", 0), sizes.get("MemFree", 0))
        if node.cpus or node.total_bytes:
            nodes.append(node)
    return nodes


def _sizes(text: str) -> dict[str, int]:
    """Bytes by name, of lines such as "Node 0 MemTotal: 123 kB"."""
    lines = [line.split() for line in text.splitlines()]
    return {
        words[2].rstrip(":"): int(words[3]) * 1024
        for words in lines
        if len(words) > 3 and words[3].isdigit()
    }
