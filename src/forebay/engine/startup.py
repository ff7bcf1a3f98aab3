"""What an engine measures when it starts, and the one line that it says about it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from forebay.config import CacheSettings
from forebay.core.modes import policy_of
from forebay.core.rates import Rates
from forebay.engine.memory import EngineMemory
from forebay.engine.runner import Chunk, Runner
from forebay.engine.settings import EngineSettings
from forebay.errors import LinkTimeoutError
from forebay.geometry import Geometry
from forebay.machine.sizes import show_size
from forebay.transfer.messages import Direction, Transfer, TransferClass
from forebay.transfer.mover import Mover

_PROBE_BLOCKS = 32
# Tokens of the prefills that are timed. A CPU that takes longer than this for the first has told.
_PROBE_TOKENS = (128, 256)
_SHORT_PREFILL_S = 0.3
_WARM_TOKENS = 16
_PROBE_S = 0.5
_PROBE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Start:
    """What an engine knows of its machine before its first request; transfer ids are free from
    `next_transfer` on. `source`: which calibration said so, "" where all was measured now.
    """

    link_bytes_per_s: float
    prefill_tokens_per_s: float
    step_s: float | None
    next_transfer: int
    source: str

    def tell(self, rates: Rates) -> None:
        """Start `rates` with it."""
        rates.link_bytes_per_s.add(self.link_bytes_per_s)
        rates.prefill_tokens_per_s.add(self.prefill_tokens_per_s)
        if self.step_s is not None:
            rates.step_s.add(self.step_s)


def know_machine(
    memory: EngineMemory, runner: Runner, sizes: CacheSettings, settings: EngineSettings
) -> Start:
    """By the calibration in `settings`, and what that lacks by measuring it now.

    Runs the model once in any case, which warms it up. Raises LinkTimeoutError.
    """
    known, limit, said = settings.calibration, settings.link_bytes_per_s, list[str]()
    # A link that is slowed down is another one than was calibrated.
    if known is not None and not limit:
        link = Link(known.link.load_bytes_per_s, 1)
        said.append("link")
    else:
        link = measure_link(memory, sizes, limit)
    model = known.model(runner.loaded.fingerprint) if known is not None else None
    if model is not None:
        warm_up(runner)
        prefill, step_s = model.prefill_tokens_per_s, model.step_s
        said.append("model")
    else:
        prefill, step_s = measure_prefill(runner, settings.batch.step_tokens), None
    return Start(
        link_bytes_per_s=link.bytes_per_s,
        prefill_tokens_per_s=prefill,
        step_s=step_s,
        next_transfer=link.next_transfer,
        source=f"{' and '.join(said)} by {known.told}" if known is not None and said else "",
    )


@dataclass(frozen=True, slots=True)
class Link:
    """The link's rate, and the first transfer id that is free once it is known."""

    bytes_per_s: float
    next_transfer: int


def measure_link(
    memory: EngineMemory, sizes: CacheSettings, limit_bytes_per_s: float = 0.0
) -> Link:
    """Load some blocks of empty host slots into empty device slots, and time it.

    Fewer of them over a link that is limited to less (0: not limited), so that the start does not
    wait for it. Raises LinkTimeoutError if the link does not answer.
    """
    mover = memory.mover
    blocks = min(_PROBE_BLOCKS, sizes.device_slots, memory.host_ready())
    if limit_bytes_per_s:
        blocks = max(1, min(blocks, int(_PROBE_S * limit_bytes_per_s / sizes.block_bytes)))
    slots = np.arange(blocks, dtype=np.int32)
    for transfer in (1, 2):
        # The first touches the memory; the second is timed.
        mover.submit(
            [
                Transfer(
                    id=transfer,
                    direction=Direction.LOAD,
                    transfer_class=TransferClass.DEMAND,
                    deadline_s=0.0,
                    sources=slots,
                    destinations=slots,
                    after_steps=np.zeros(blocks, np.int64),
                )
            ]
        )
        elapsed_s = _until_ended(mover, transfer)
    return Link(blocks * sizes.block_bytes / max(elapsed_s, 1e-9), 3)


def measure_prefill(runner: Runner, step_tokens: int) -> float:
    """Tokens a second of the prefill of a step, or of a part of it.

    The first also warms the device up, and a short one is mostly the reading of weights, so a
    longer one follows. A slow CPU is not made to: the estimate is good enough, and the first
    requests correct it.
    """
    most = min(step_tokens, runner.pool.slots * runner.pool.block_tokens)
    most = min(most, runner.loaded.context_tokens)
    rate = 0.0
    for tokens in (min(count, most) for count in _PROBE_TOKENS):
        slots = np.arange(-(-tokens // runner.pool.block_tokens), dtype=np.int32)
        chunk = Chunk(np.zeros(tokens, np.int64), 0, slots)
        began_s = time.perf_counter()
        runner.forward([chunk]).cpu()  # what a GPU computes is there when it is copied
        elapsed_s = time.perf_counter() - began_s
        rate = tokens / elapsed_s
        if runner.pool.device.type == "cpu" and elapsed_s > _SHORT_PREFILL_S:
            break
    return rate


def warm_up(runner: Runner) -> None:
    """A short prefill: first calls load kernels and take memory."""
    tokens = min(_WARM_TOKENS, runner.pool.block_tokens, runner.loaded.context_tokens)
    runner.forward([Chunk(np.zeros(tokens, np.int64), 0, np.zeros(1, np.int32))]).cpu()


def describe(settings: CacheSettings, geometry: Geometry, start: Start) -> str:
    """Pool sizes, effective capacity, link rate, and whether look-ahead can help here and why."""
    tokens = geometry.block_tokens
    sizes = (
        f"device {settings.device_slots * tokens:,} tokens "
        f"({_gb(settings.device_slots * settings.block_bytes)}), host "
        f"{settings.host_slots * tokens:,} ({_gb(settings.host_slots * settings.block_bytes)}), "
        f"effective {settings.effective_blocks * tokens:,}; blocks of {tokens} tokens; "
        f"mode {settings.mode.value}"
    )
    if not policy_of(settings.mode).host_tier or not settings.host_slots:
        return f"{sizes}; no host tier: what does not fit on the device is recomputed"
    load_s = geometry.token_bytes / start.link_bytes_per_s
    compute_s = 1.0 / start.prefill_tokens_per_s
    rates = (
        f"link {_gb(start.link_bytes_per_s)}/s, windows of {show_size(settings.window_bytes)}; "
        f"1,000 tokens load in {1e6 * load_s:,.1f} ms and compute in {1e6 * compute_s:,.1f} ms"
    )
    if start.source:
        rates += f" ({start.source})"
    return f"{sizes}; {rates}: {_verdict(settings, load_s, compute_s)}"


def _verdict(settings: CacheSettings, load_s: float, compute_s: float) -> str:
    if load_s >= compute_s:
        return "loading is slower than computing here, so the cache can bring little"
    if settings.host_slots <= settings.device_slots:
        return "the host tier is no larger than the device pool, so it can bring little"
    gain = f"a load is {compute_s / load_s:,.0f}x faster than computing"
    if not policy_of(settings.mode).look_ahead:
        return f"{gain}; this mode does not look ahead"
    return f"{gain}, and look-ahead can hide it under others' steps while requests queue"


def _until_ended(mover: Mover, transfer: int) -> float:
    deadline_s = time.monotonic() + _PROBE_TIMEOUT_S
    while time.monotonic() < deadline_s:
        for completion in mover.poll().completions:
            if completion.id == transfer:
                return completion.finished_s - completion.started_s
        mover.wait_news(0.1)
    raise LinkTimeoutError(f"the link moved nothing in {_PROBE_TIMEOUT_S} s; check the mover")


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:,.2f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:,.1f} MB"
