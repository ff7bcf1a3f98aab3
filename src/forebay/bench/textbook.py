"""The textbook case: the KV of 2,048 tokens of Llama 3 70B, 671 MB, loaded some time before it is
needed, while others decode.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forebay.bench.beside import BLOCK_BYTES
from forebay.bench.goals import LEADS_MS
from forebay.measure.decode import GraphedStep
from forebay.measure.link import Carrier
from forebay.measure.repeat import repeated
from forebay.measure.report import Figure, median_figure
from forebay.transfer.messages import Direction

BLOCKS = 128
LOAD_BYTES = BLOCKS * BLOCK_BYTES
_STEPS = 60


@dataclass(frozen=True, slots=True)
class Exposed:
    """One load: how long ahead it was started, and how long its reader then still waited."""

    led_ms: float
    waited_ms: float

    def excess_ms(self, bytes_per_s: float) -> float:
        """Beyond what a link of that rate still needed at best."""
        return self.waited_ms - max(0.0, 1e3 * LOAD_BYTES / bytes_per_s - self.led_ms)


def textbook_figures(step: GraphedStep, carrier: Carrier, rounds: int) -> list[Figure]:
    """For each lead the excess of the exposed wait, and what the decode of others suffers."""
    alone_ms = [step.replay_ms() for _ in range(_STEPS)]
    with carrier.running(Direction.LOAD, most_s=3.0) as flow:
        _, rate = carrier.rate_during(lambda: [step.replay_ms() for _ in range(_STEPS)])
    flow.check()
    figures: list[Figure] = []
    with repeated(step.replay_ms) as beside_ms:
        for lead in LEADS_MS:
            loads = [_load(carrier, 1e-3 * lead) for _ in range(rounds)]
            figures.append(_lead_figure(lead, loads, rate))
    ratio = float(np.percentile(beside_ms, 99) / np.percentile(alone_ms, 99))
    told = {"alone_p99_ms": float(np.percentile(alone_ms, 99)), "steps_beside": len(beside_ms)}
    return [*figures, Figure("textbook_itl_p99", ratio, "ratio", beside_ms, told)]


def _lead_figure(lead: int, loads: Sequence[Exposed], rate: float) -> Figure:
    settings = {
        "exposed_ms": statistics.median(each.waited_ms for each in loads),
        "led_ms": statistics.median(each.led_ms for each in loads),
        "exposed_samples_ms": [round(each.waited_ms, 4) for each in loads],
        "led_samples_ms": [round(each.led_ms, 4) for each in loads],
        "needed_ms": 1e3 * LOAD_BYTES / rate,
        "gb_per_s_beside_decode": rate / 1e9,
        "method": "exposed wait less what the link still needed at best beside that decode",
    }
    excess = [each.excess_ms(rate) for each in loads]
    return median_figure(f"textbook_excess_{lead}_ms", excess, "ms", settings)


def _load(carrier: Carrier, lead_s: float) -> Exposed:
    """Start a load, and when it is needed wait as an engine would: on the host until a step may be
    launched behind it, then on a stream of the device for its copies.
    """
    stream = torch.cuda.Stream()
    began_s = time.monotonic()
    load = carrier.submit(BLOCKS)
    time.sleep(lead_s)
    needed_s = time.monotonic()
    carrier.poll()
    carrier.until(lambda: load in carrier.issued)
    launchable_s = time.monotonic()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    carrier.mover.wait([load], stream.cuda_stream)
    end.record(stream)
    end.synchronize()
    waited_ms = 1e3 * (launchable_s - needed_s) + begin.elapsed_time(end)
    carrier.wait([load])
    return Exposed(1e3 * (needed_s - began_s), waited_ms)
