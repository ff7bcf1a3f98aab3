"""What the measurements say to set, by rules: pure functions of a calibration.

The shares below are choices. They are what one gives up for something that counts more: of the
link's rate, for copies of others and for blocks that cut prefixes less short; of the memory, for
everybody else on the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.calibration.record import Calibration, FragmentRate, ModelRates, WindowCost
from forebay.machine.sizes import show_size

WINDOW_SHARE = 0.97
"""Of the best rate, that a window still has to reach."""
SAME_WAIT = 1.2
"""Waits within this factor of the shortest count as equal: a p99 of some hundred is no finer."""
BLOCK_SHARE = 0.95
"""Of the best rate, that pieces as long as a block still have to reach."""
BLOCK_TOKENS = (16, 32, 64, 128)
"""Fewer are not offered: each block has its share of the directory and of every decision."""
HOST_SHARE = 0.8
"""Of the memory that is free, for the host pool."""

_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Advice:
    """An option of `forebay serve`, its value as one writes it ("": not known), and why."""

    setting: str
    value: str
    why: str


def best_window(windows: Sequence[WindowCost]) -> WindowCost | None:
    """Of the windows within 3 % of the best rate, the smallest of those that others wait least for.

    Where nobody waits, the smallest. None where no window was measured.
    """
    if not windows:
        return None
    floor = WINDOW_SHARE * max(each.bytes_per_s for each in windows)
    fast = [each for each in windows if each.bytes_per_s >= floor]
    waits = [each.foreign_p99_s for each in fast if each.foreign_p99_s is not None]
    if waits:
        longest = SAME_WAIT * min(waits)
        fast = [e for e in fast if e.foreign_p99_s is not None and e.foreign_p99_s <= longest]
    return min(fast, key=lambda each: each.window_bytes)


def best_block_tokens(fragments: Sequence[FragmentRate], token_bytes: int) -> int | None:
    """The fewest tokens whose block, in one piece, is within 5 % of the best rate of fragments.

    A block counts as fast as the longest fragment measured that is no longer; the largest choice
    where even that is slower. None where no fragment was measured.
    """
    if not fragments:
        return None
    floor = BLOCK_SHARE * max(each.bytes_per_s for each in fragments)
    for tokens in BLOCK_TOKENS:
        shorter = [each for each in fragments if each.fragment_bytes <= tokens * token_bytes]
        nearest = max(shorter, key=lambda each: each.fragment_bytes, default=None)
        if nearest is not None and nearest.bytes_per_s >= floor:
            return tokens
    return BLOCK_TOKENS[-1]


def gain(calibration: Calibration, model: ModelRates) -> float:
    """How many times quicker a token's KV is loaded than computed."""
    load_s = model.token_bytes / calibration.link.load_bytes_per_s
    return 1.0 / (model.prefill_tokens_per_s * load_s)


def advise(calibration: Calibration, model: ModelRates, room_bytes: int | None) -> list[Advice]:
    """What to set for `model`; `room_bytes` of host memory are free (None: not known)."""
    return [
        *_window(calibration),
        *_block(calibration, model),
        _host_pool(calibration, model, room_bytes),
    ]


def _as_option(size_bytes: int) -> str:
    return show_size(size_bytes).replace(",", "").replace(" ", "")


def _window(calibration: Calibration) -> list[Advice]:
    best = best_window(calibration.windows)
    if best is None:
        return []
    most = max(each.bytes_per_s for each in calibration.windows)
    why = f"{best.bytes_per_s / most:.2f} of the best rate"
    if best.foreign_p99_s is not None:
        why += f", and a small copy of others waits {1e6 * best.foreign_p99_s:,.0f} us (p99)"
    else:
        why += "; nobody else's copies wait here, so smaller only makes cancelling quicker"
    return [Advice("--window-bytes", _as_option(best.window_bytes), why)]


def _block(calibration: Calibration, model: ModelRates) -> list[Advice]:
    tokens = best_block_tokens(calibration.fragments, model.token_bytes)
    if tokens is None:
        return []
    size = show_size(tokens * model.token_bytes)
    why = f"{size} in one piece: the fewest tokens within 5 % of the best rate"
    return [Advice("--block-tokens", str(tokens), why)]


def _host_pool(calibration: Calibration, model: ModelRates, room_bytes: int | None) -> Advice:
    times = gain(calibration, model)
    if times < 1:
        return Advice(
            "--host-bytes",
            "0",
            f"loading a token takes {1 / times:.1f} times as long as computing it: a larger device "
            "pool helps, a host pool does not",
        )
    why = f"a token is loaded {times:.0f} times quicker than computed"
    if room_bytes is None:
        return Advice("--host-bytes", "", f"{why}; how much memory is free is not known")
    size = (
        int(HOST_SHARE * room_bytes) // _GIB * _GIB or int(HOST_SHARE * room_bytes) // _MIB * _MIB
    )
    tokens = size // model.token_bytes
    return Advice(
        "--host-bytes",
        _as_option(size),
        f"{why}; four fifths of what is free, {tokens:,} tokens of this model",
    )
