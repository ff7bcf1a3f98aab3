"""`forebay bench overlap`: what copies cost those who compute, and what a load ahead of time hides.

The step is the engine's own: a model of the shape of Llama 3 8B with random weights in bf16, eight
requests of 2,048 tokens; its work on the device is replayed as a graph, so that it does not wait
for the host. Beside it stands a step that only reads that model's weights: nothing that decodes is
more bound by memory. Times of steps and waits are the device's, by events.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from forebay.bench.beside import BLOCK_BYTES, POOL_BYTES, inflation_figures, launch_figures
from forebay.bench.pinning import pin_figure, serve_figure
from forebay.bench.textbook import textbook_figures
from forebay.measure.decode import DecodeStep, WeightsStep, llama_8b
from forebay.measure.link import GIB, Backend, Link
from forebay.measure.report import Figure

NOT_MEASURED = (
    "decode beside copies, launches and pinning need a CUDA device: nothing was measured; `forebay "
    "demo` shows overlap on a CPU"
)
_LAUNCHES = 20_000


class OverlapPart(StrEnum):
    """What can be measured by itself."""

    PIN = "pin"
    SERVE = "serve"
    DECODE = "decode"
    LAUNCH = "launch"
    TEXTBOOK = "textbook"


_WITH_MODEL = {OverlapPart.SERVE, OverlapPart.DECODE, OverlapPart.TEXTBOOK}


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSettings:
    """`rounds` of each ratio; sizes of what is pinned, and of the pool of an engine that starts."""

    rounds: int = 7
    parts: Collection[OverlapPart] = field(default_factory=lambda: tuple(OverlapPart))
    pin_bytes: int = 16 * GIB
    host_bytes: int = 64 * GIB


def overlap_figures(backend: Backend, settings: OverlapSettings) -> list[Figure]:
    """Everything that can be measured on `backend`: on "cpu" nothing.

    On a GPU takes 40 GB of its memory, and a minute or two.
    """
    if backend == "cpu":
        return []
    parts, figures = set(settings.parts), list[Figure]()
    if OverlapPart.PIN in parts:  # first of all, so that its memory is fresh to the machine
        figures.append(pin_figure(settings.pin_bytes))
    model = llama_8b() if parts & _WITH_MODEL else None
    if model is not None and OverlapPart.SERVE in parts:
        figures.append(serve_figure(model, settings.host_bytes))
        torch.cuda.empty_cache()
    if parts <= {OverlapPart.PIN, OverlapPart.SERVE}:
        return figures
    link = Link(backend, POOL_BYTES)
    try:
        if model is not None and parts & {OverlapPart.DECODE, OverlapPart.TEXTBOOK}:
            step = DecodeStep(model)
            with link.carrier(BLOCK_BYTES) as carrier:
                if OverlapPart.DECODE in parts:
                    figures += inflation_figures("decode", step, carrier, settings.rounds)
                    weights = WeightsStep(model)
                    figures += inflation_figures("weights", weights, carrier, settings.rounds)
                if OverlapPart.TEXTBOOK in parts:
                    figures += textbook_figures(step, carrier, 2 * settings.rounds)
        if OverlapPart.LAUNCH in parts:
            figures += launch_figures(link, _LAUNCHES)
    finally:
        link.close()
    return figures
