"""All parts in turn, for one model on its device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from forebay.calibration.record import Calibration, Missing
from forebay.engine.memory import device_free_bytes
from forebay.engine.models import LoadedModel
from forebay.engine.placement import describe_device
from forebay.engine.runner import probe_geometry
from forebay.engine.settings import EngineSettings
from forebay.errors import SettingsError
from forebay.geometry import default_window_bytes
from forebay.machine.cpus import machine_name
from forebay.machine.memory import read_memory
from forebay.machine.sizes import show_size
from forebay.machine.tree import Tree
from forebay.measure.link import MIB, Link
from forebay.release import installed_version
from forebay.tune.parts import (
    FRAGMENTED_BLOCK_BYTES,
    KIB,
    fragment_rates,
    link_rates,
    model_rates,
    window_costs,
)
from forebay.tune.steps import StepSizes

_MOST_POOL_BYTES = {"cpu": 256 * MIB, "cuda": 2048 * MIB}
# Of the memory that is free, for one of two pools: nobody else is to be pushed out for this.
_POOL_SHARE = 8
_LEAST_POOL_BYTES = 32 * MIB
_WINDOWS = {
    "cpu": [256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB],
    "cuda": [MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB],
}
_FRAGMENTS = {
    "cpu": [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB],
    "cuda": [n * KIB for n in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)],
}
_FRAGMENT_WINDOW = {"cpu": MIB, "cuda": 8 * MIB}
_STEP_SIZES = StepSizes(
    requests=EngineSettings().batch.max_running,
    context_tokens=512,
    prefill_tokens=EngineSettings().batch.step_tokens,
)
_WITHOUT_A_GPU = (
    Missing(
        what="the link to a GPU",
        why="the link here is between two parts of the same memory; it takes a GPU",
    ),
    Missing(
        what="what others' copies wait for a window",
        why="on the CPU no copy engine is shared with others; it takes a GPU",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """How much is measured. The defaults are what a server runs with, where it has defaults."""

    sizes: StepSizes = _STEP_SIZES
    foreign_samples: int = 600
    most_pool_bytes: int | None = None


def tune(
    loaded: LoadedModel,
    settings: TuneSettings | None = None,
    begun: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measure the device that `loaded` lies on. `begun` is told each part as it begins.

    Raises SettingsError where there is too little memory, LinkTimeoutError where the link hangs.
    """
    settings = settings or TuneSettings()
    device = torch.device(loaded.model.device)
    kind, on_gpu = device.type, device.type == "cuda"
    geometry = probe_geometry(loaded)
    block = geometry.block_bytes
    window = default_window_bytes(block)
    # What is made without naming a device lies on this one.
    with torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
        begun("fragments")
        with _link(device, FRAGMENTED_BLOCK_BYTES, settings) as link:
            fragments = fragment_rates(link, _FRAGMENTS[kind], _FRAGMENT_WINDOW[kind])
        begun("link and windows")
        with _link(device, block, settings) as link:
            link_found = link_rates(link, block, window)
            samples = settings.foreign_samples if on_gpu else 0
            windows = window_costs(link, block, _WINDOWS[kind], samples)
            begun("model")
            with link.carrier(block, window_bytes=window) as carrier:
                model = model_rates(loaded, geometry, carrier, settings.sizes)
    return Calibration(
        machine=machine_name(),
        device=describe_device(device),
        measured=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        version=installed_version(),
        link=link_found,
        fragments=tuple(fragments),
        windows=tuple(windows),
        models=(model,),
        missing=() if on_gpu else _WITHOUT_A_GPU,
    )


@contextlib.contextmanager
def _link(device: torch.device, block_bytes: int, settings: TuneSettings) -> Iterator[Link]:
    """Two pools of whole blocks."""
    size = _pool_bytes(device, block_bytes, settings) // block_bytes * block_bytes
    link = Link(
        "cuda" if device.type == "cuda" else "cpu",
        size,
        device_index=device.index or 0,
        grain_bytes=block_bytes,
    )
    try:
        yield link
    finally:
        link.close()


def _pool_bytes(device: torch.device, block_bytes: int, settings: TuneSettings) -> int:
    """Of each of two pools. Raises SettingsError where not even small ones can be had."""
    rooms = [read_memory(Tree()).room_bytes, device_free_bytes(device)]
    room = min((each for each in rooms if each is not None), default=_MOST_POOL_BYTES["cpu"] * 8)
    least = max(_LEAST_POOL_BYTES, 4 * block_bytes)
    most = settings.most_pool_bytes or _MOST_POOL_BYTES[device.type]
    size = max(least, min(most, room // _POOL_SHARE))
    if 2 * size > room:
        raise SettingsError(
            f"two pools of {show_size(size)} do not fit the {show_size(room)} that are free: end "
            "what else runs here, or take a smaller model"
        )
    return size
