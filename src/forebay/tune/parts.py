"""The parts of a calibration, each measured by itself within a bound of time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from forebay.calibration.record import FragmentRate, LinkRates, ModelRates, WindowCost
from forebay.engine.models import LoadedModel
from forebay.engine.placement import dtype_name
from forebay.geometry import Geometry
from forebay.measure.copies import FOREIGN_EVERY_S, foreign_copies
from forebay.measure.link import MIB, Carrier, Link
from forebay.transfer.messages import Direction
from forebay.tune.steps import ModelSteps, StepSizes

KIB = 1 << 10
FRAGMENTED_BLOCK_BYTES = 4 * MIB
_BOTH = (Direction.LOAD, Direction.SAVE)
_TURNS, _STEPS, _TURN_S = 5, 6, 1.2
# A step beside copies may take so many times what the slowest alone took.
_SLOWER = 4
# How quick a link is was measured on little: it may run out of work before the steps have ended.
_TRIES = 4


def several(work: Callable[[], float], rounds: int, most_s: float) -> list[float]:
    """Results of `work`, at least one, until there are `rounds` or `most_s` have passed."""
    until_s = time.monotonic() + most_s
    results = [work()]
    while len(results) < rounds and time.monotonic() < until_s:
        results.append(work())
    return results


def link_rates(link: Link, block_bytes: int, window_bytes: int) -> LinkRates:
    """Scattered blocks, each way alone and both at once; medians of up to seven rounds."""
    with link.carrier(block_bytes, window_bytes=window_bytes) as carrier:
        carrier.bytes_per_s(carrier.most_blocks, *_BOTH)  # the first touches what it uses
        load, save, both = (
            _median_rate(carrier, ways, rounds=7)
            for ways in ((Direction.LOAD,), (Direction.SAVE,), _BOTH)
        )
    return LinkRates(
        block_bytes=block_bytes,
        window_bytes=window_bytes,
        load_bytes_per_s=load,
        save_bytes_per_s=save,
        both_bytes_per_s=both,
    )


def fragment_rates(link: Link, sizes: Sequence[int], window_bytes: int) -> list[FragmentRate]:
    """Loads of blocks whose device side lies in pieces of each of `sizes` bytes.

    The pools are cut into blocks of `FRAGMENTED_BLOCK_BYTES`, of which each size is a part.
    """
    found: list[FragmentRate] = []
    for size in sizes:
        block = FRAGMENTED_BLOCK_BYTES
        with link.carrier(block, size, window_bytes=window_bytes) as carrier:
            rate = _median_rate(carrier, (Direction.LOAD,), rounds=5)
        found.append(FragmentRate(fragment_bytes=size, fragments=block // size, bytes_per_s=rate))
    return found


def window_costs(
    link: Link, block_bytes: int, windows: Sequence[int], foreign_samples: int
) -> list[WindowCost]:
    """Loads in each of `windows`, alone; with `foreign_samples`, also what a 64 KiB copy of others
    waits meanwhile (on a GPU only).
    """
    found: list[WindowCost] = []
    for window in windows:
        with link.carrier(block_bytes, window_bytes=window) as carrier:
            rate = _median_rate(carrier, (Direction.LOAD,), rounds=5)
            p50 = p99 = None
            if foreign_samples:
                waits = 1e-6 * np.array(_foreign_waits_us(carrier, foreign_samples))
                p50, p99 = (float(np.percentile(waits, q)) for q in (50, 99))
        found.append(
            WindowCost(window_bytes=window, bytes_per_s=rate, foreign_p50_s=p50, foreign_p99_s=p99)
        )
    return found


def model_rates(
    loaded: LoadedModel, geometry: Geometry, carrier: Carrier, sizes: StepSizes
) -> ModelRates:
    """Prefill and decode alone, then decode beside loads, and beside loads and saves."""
    steps = ModelSteps(loaded, geometry, sizes)
    prefill = several(steps.prefill_s, rounds=7, most_s=10.0)
    steps.decode_s()
    alone = several(steps.decode_s, rounds=4 * _STEPS, most_s=10.0)
    return ModelRates(
        name=loaded.name,
        fingerprint=loaded.fingerprint,
        dtype=dtype_name(loaded.kv_dtype),
        token_bytes=geometry.token_bytes,
        prefill_tokens=steps.sizes.prefill_tokens,
        # What else runs on the machine can only slow it down.
        prefill_tokens_per_s=steps.sizes.prefill_tokens / min(prefill),
        requests=steps.sizes.requests,
        context_tokens=steps.sizes.context_tokens,
        step_s=statistics.median(alone),
        inflation_load=_inflation(steps, carrier, (Direction.LOAD,)),
        inflation_both=_inflation(steps, carrier, _BOTH),
    )


def _inflation(steps: ModelSteps, carrier: Carrier, ways: tuple[Direction, ...]) -> float:
    """Median of steps beside copies over the median of steps alone, both in turns."""
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(_TURNS):
        alone += several(steps.decode_s, rounds=_STEPS, most_s=_TURN_S)
        slowest_s = _SLOWER * max(alone)
        # A turn's last step begins in time and may end later.
        most_s = min(_TURN_S + slowest_s, _STEPS * slowest_s)
        beside += _beside(steps, carrier, ways, most_s)
    return statistics.median(beside) / statistics.median(alone)


def _beside(
    steps: ModelSteps,
    carrier: Carrier,
    ways: tuple[Direction, ...],
    most_s: float,
    tries: int = _TRIES,
) -> list[float]:
    """Steps while the link is busy for `most_s`; where that was too short, anew with more."""
    with carrier.running(*ways, most_s=most_s) as flow:
        taken = several(steps.decode_s, rounds=_STEPS, most_s=_TURN_S)
    if flow.ran_dry and tries > 1:
        return _beside(steps, carrier, ways, 4 * most_s, tries - 1)
    flow.check()
    return taken


def _median_rate(carrier: Carrier, ways: tuple[Direction, ...], rounds: int) -> float:
    return statistics.median(
        several(lambda: carrier.bytes_per_s(carrier.most_blocks, *ways), rounds, most_s=3.0)
    )


def _foreign_waits_us(carrier: Carrier, samples: int) -> list[float]:
    for_s = samples * FOREIGN_EVERY_S * 1.5
    with (
        carrier.running(Direction.LOAD, most_s=for_s + 1.0) as flow,
        foreign_copies(up=True) as waits_us,
    ):
        time.sleep(for_s)
    flow.check()
    return waits_us
