"""How many threads torch computes with: no more than there are cores for this process.

In a container with a quota torch sees every core of the machine and starts a thread on each; they
then take turns, and a step takes several times as long.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota: Path = _QUOTA) -> int:
    """Cores by this process's affinity and by its control group's quota (a cgroup v2 `cpu.max`)."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        allowed_us, period_us = quota.read_text().split()
        return max(1, min(cores, math.ceil(int(allowed_us) / int(period_us))))
    except (OSError, ValueError):
        return cores


def limit_threads() -> None:
    """Lowers torch's thread count to the usable cores; a lower one that was set is kept."""
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
