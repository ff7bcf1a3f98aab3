"""What copies cost whoever computes: a decode step, and the launch of a kernel."""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from forebay.measure.decode import GraphedStep
from forebay.measure.link import GIB, MIB, Carrier, Link
from forebay.measure.report import Figure, median_figure
from forebay.transfer.messages import Direction

BLOCK_BYTES = 5 * MIB
POOL_BYTES = 4 * GIB
_STEPS = 30
_BARE_S = 0.3
_BETWEEN_LAUNCHES_S = 30e-6
_BOTH = (Direction.LOAD, Direction.SAVE)
CASES: dict[str, tuple[Direction, ...]] = {"load": (Direction.LOAD,), "both": _BOTH}


def inflation_figures(kind: str, step: GraphedStep, carrier: Carrier, rounds: int) -> list[Figure]:
    """A step with the link busy over the step alone, in turns, and the link's rate meanwhile.

    The link is busy from before the first step to after the last, which is checked, and every
    step's time is between two events of the device: so the copies lie inside what is timed. Samples
    are one ratio of medians a round.
    """
    figures: list[Figure] = []
    for name, directions in CASES.items():
        alone_ms: list[float] = []
        beside_ms: list[float] = []
        ratios: list[float] = []
        rates: list[float] = []
        shares: list[float] = []
        for _ in range(rounds):
            alone = [step.replay_ms() for _ in range(_STEPS)]
            beside, rate, bare_rate = _busy_round(step, carrier, directions)
            ratios.append(statistics.median(beside) / statistics.median(alone))
            rates.append(rate)
            shares.append(rate / bare_rate)
            alone_ms += alone
            beside_ms += beside
        rate, alone_med = statistics.median(rates), statistics.median(alone_ms)
        extra_ms = statistics.fmean(beside_ms) - alone_med
        settings = {
            "step_alone_ms": alone_med,
            "gb_per_s": rate / 1e9,
            "extra_ms_per_gb": extra_ms / (1e-3 * statistics.fmean(beside_ms) * rate / 1e9),
            "alone_ms": [round(each, 4) for each in alone_ms],
            "beside_ms": [round(each, 4) for each in beside_ms],
        }
        link = {"method": "rate beside the steps over that of the same mover right before them"}
        figures.append(median_figure(f"{kind}_inflation_{name}", ratios, "ratio", settings))
        figures.append(median_figure(f"link_beside_{kind}_{name}", shares, "ratio", link))
    return figures


def _busy_round(
    step: GraphedStep, carrier: Carrier, directions: tuple[Direction, ...]
) -> tuple[list[float], float, float]:
    """Milliseconds of steps beside the copies, the link's rate meanwhile, and without them."""
    with carrier.running(*directions, most_s=_BARE_S + 2.0) as flow:
        _, bare = carrier.rate_during(lambda: time.sleep(_BARE_S))
        beside, rate = carrier.rate_during(lambda: [step.replay_ms() for _ in range(_STEPS)])
    flow.check()
    return beside, rate, bare


def launch_figures(link: Link, launches: int) -> list[Figure]:
    """What one kernel launch takes the host, at the 99th percentile: beside copies over none."""
    figures: list[Figure] = []
    for name, fragment_bytes in {"2mib": None, "64kib": 64 << 10}.items():
        with link.carrier(2 * MIB, fragment_bytes) as carrier:
            idle = _launches_us(launches)
            with carrier.running(*_BOTH, most_s=launches * 2e-4 + 2.0) as flow:
                busy, rate = carrier.rate_during(lambda: _launches_us(launches))
            flow.check()
        idle_p99, busy_p99 = (float(np.percentile(each, 99)) for each in (idle, busy))
        settings = {
            "idle_p99_us": idle_p99,
            "busy_p99_us": busy_p99,
            "idle_p50_us": statistics.median(idle),
            "busy_p50_us": statistics.median(busy),
            "gb_per_s": rate / 1e9,
            "method": "p99 of a launch beside loads and saves, less p99 without; samples: beside",
        }
        delay = busy_p99 - idle_p99
        figures.append(Figure(f"launch_delay_{name}_us", delay, "us", busy, settings))
    return figures


def _launches_us(launches: int) -> list[float]:
    value = torch.zeros(16, device="cuda")
    costs: list[float] = []
    for _ in range(launches):
        began_s = time.perf_counter()
        value.add_(1)
        ended_s = time.perf_counter()
        costs.append(1e6 * (ended_s - began_s))
        while time.perf_counter() - ended_s < _BETWEEN_LAUNCHES_S:
            pass  # an engine's thread is awake between launches too
    torch.cuda.synchronize()
    return costs
