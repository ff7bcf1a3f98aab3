"""What the mover costs its caller and the machine's cores."""

from __future__ import annotations

import resource
import statistics
import time

from forebay.measure.link import MIB, Carrier, Link
from forebay.measure.report import Figure, median_figure
from forebay.transfer.messages import Direction, TransferClass

_BLOCKS_2048_TOKENS = 128
_BLOCK_BYTES_70B = 5 * MIB


def submit_figure(link: Link, rounds: int) -> Figure:
    """A load of 2,048 tokens of a 70B model, 128 blocks of 5 MiB, on the calling thread.

    The figure is taken with the arbiter asleep, so that it has to be woken; `busy_us` with it at
    work on another load.
    """
    with link.carrier(_BLOCK_BYTES_70B, window_bytes=8 * MIB) as carrier:
        asleep_us = [_submit_us(carrier) for _ in range(20 * rounds)]
        behind = carrier.submit(carrier.most_blocks, transfer_class=TransferClass.DEMAND)
        busy_us = [_submit_us(carrier) for _ in range(10)]
        carrier.drop([behind])
    settings = {"blocks": _BLOCKS_2048_TOKENS, "busy_us": statistics.median(busy_us)}
    return median_figure("submit_us_2048_tokens", asleep_us, "us", settings)


def _submit_us(carrier: Carrier) -> float:
    """Submits one load and cancels it again; what the submit took."""
    load = carrier.transfer(_BLOCKS_2048_TOKENS)
    began_s = time.perf_counter()
    carrier.mover.submit([load])
    spent_us = 1e6 * (time.perf_counter() - began_s)
    carrier.drop([load.id])
    return spent_us


def core_figures(link: Link, spin_s: float) -> list[Figure]:
    """Processor time of the mover's threads: both directions at full rate, and idle."""
    with link.carrier(2 * MIB, window_bytes=8 * MIB, spin_s=spin_s) as carrier:
        ways = Direction.LOAD, Direction.SAVE
        with carrier.running(*ways, most_s=2.0):
            busy = _cores_during(1.0)
        time.sleep(0.2)
        idle = _cores_during(2.0)
    settings = {"spin_us": 1e6 * spin_s, "method": "processor time of the process over wall time"}
    return [
        Figure("arbiter_cores", busy, "cores", (busy,), settings),
        Figure("arbiter_cores_idle", idle, "cores", (idle,), settings),
    ]


def _cores_during(seconds: float) -> float:
    """Processor time of this process over wall time, its calling thread asleep."""
    began_s, began_cpu_s = time.monotonic(), _cpu_s()
    time.sleep(seconds)
    return (_cpu_s() - began_cpu_s) / (time.monotonic() - began_s)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
