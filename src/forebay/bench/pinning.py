"""How fast host memory is pinned, and how soon an engine serves while it still is being pinned."""

from __future__ import annotations

import time

import torch

from forebay.engine.engine import Engine
from forebay.engine.models import LoadedModel
from forebay.engine.sampler import SamplingParams
from forebay.engine.settings import EngineSettings
from forebay.errors import SettingsError
from forebay.measure.link import GIB, MIB
from forebay.measure.report import Figure
from forebay.transfer.pinned import PinnedArena

_PIN_S = 300.0


def pin_figure(size_bytes: int) -> Figure:
    """Our pinned memory against what the runtime allocates pinned, fresh memory both.

    Memory that this process, or a virtual machine, has touched before is quicker: measure it first.
    """
    began_s = time.monotonic()
    with PinnedArena(size_bytes, 2 * MIB) as arena:
        if not arena.wait_ready(size_bytes, _PIN_S):
            raise SettingsError(f"host memory could not be pinned: {arena.error}")
        ours = size_bytes / (time.monotonic() - began_s)
        how = arena.how
    began_s = time.monotonic()
    allocated = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    theirs = allocated.nbytes / (time.monotonic() - began_s)
    settings = {
        "bytes": size_bytes,
        "gb_per_s": ours / 1e9,
        "runtime_gb_per_s": theirs / 1e9,
        "how": how,
    }
    return Figure("pin_rate", ours / theirs, "ratio", (ours / theirs,), settings)


def serve_figure(model: LoadedModel, host_bytes: int) -> Figure:
    """From a loaded model to the first token of an engine with a host pool of that size."""
    settings = EngineSettings(device_tokens=65_536, host_bytes=host_bytes, block_tokens=16)
    began_s = time.monotonic()
    with Engine(model, settings) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True))
        first_s = time.monotonic() - began_s
        open_slots = engine.cache.view.occupancy().host_free
    told = {"host_gib": host_bytes / GIB, "host_slots_open_then": open_slots}
    return Figure("serve_while_pinning_s", first_s, "s", (first_s,), told)
