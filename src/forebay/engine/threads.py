"""How many threads torch computes with: no more than there are cores for this process.

In a container with a quota torch sees every core of the machine and starts a thread on each; they
then take turns, and a step takes several times as long.
"""

from __future__ import annotations

import torch

from forebay.machine.cpus import usable_cores


def limit_threads() -> None:
    """Lowers torch's thread count to the usable cores; a lower one that was set is kept."""
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
