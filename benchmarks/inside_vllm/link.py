"""The rate of the link from pinned host memory to the GPU, in GB/s, in a process of its own."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

_BYTES = 2 << 30
_COPIES = 7


def main(file: Path) -> None:
    """Write the rate of each of several copies of 2 GiB."""
    source = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_BYTES, dtype=torch.uint8, device="cuda")
    rates: list[float] = []
    for _ in range(_COPIES):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(_BYTES / (time.perf_counter() - began_s) / 1e9)
    file.write_text(json.dumps({"bytes": _BYTES, "gb_per_s": rates}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
