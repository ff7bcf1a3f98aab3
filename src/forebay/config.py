"""Every setting once: its unit, its default, the reason for it, and what cannot work."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from enum import StrEnum

from forebay.bounds import MOST_SLOTS, RATE, SECONDS, SHARE, Bound, Made, OneOf, Real, Whole, settle
from forebay.core.modes import MODE, Mode, policy_of
from forebay.errors import SettingsError

MIB = 1 << 20
LINK_BYTES_PER_S = 10e9


class SaveMode(StrEnum):
    """WRITE_THROUGH: save as blocks are computed. ON_EVICT: only ahead of eviction."""

    WRITE_THROUGH = "write_through"
    ON_EVICT = "on_evict"


class KVLayout(StrEnum):
    """How a device pool lies in memory. BLOCK_FIRST: each block contiguous, with all its layers.
    LAYER_FIRST: a layer's K of all blocks together, then its V.
    """

    BLOCK_FIRST = "block_first"
    LAYER_FIRST = "layer_first"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """Settings of a `Cache`. Slots are block-sized; see `geometry` for how big a block is.

    An enumeration may be given by its text, like "b4". Raises SettingsError for what cannot work.
    """

    block_tokens: int
    block_bytes: int
    device_slots: int
    host_slots: int
    mode: Mode = Mode.LOOK_AHEAD
    save_mode: SaveMode = SaveMode.WRITE_THROUGH
    # Two lanes with one 8 MiB window each reach 98 % of a PCIe 5 link, and a foreign copy waits for
    # them at most; smaller windows trade rate for that wait.
    window_bytes: int = 8 * MIB
    # Bounds the work of one planning event; requests further back start after these.
    look_ahead_requests: int = 64
    # What look-ahead may hold of the device pool (prefetch leases), so that running requests and
    # ordinary reuse keep the rest.
    prefetch_share: float = 0.5
    # Kept obtainable for running requests to grow into.
    reserve_share: float = 0.05
    # Prefetch copies in flight, in seconds of link time: what a cancelled plan may still cost.
    in_flight_s: float = 0.25
    # Saves in flight, in seconds of link time.
    saves_in_flight_s: float = 0.25
    # An asynchronous load costs about a step before it pays; shorter prefixes are recomputed.
    min_load_tokens: int = 64
    # Paths shorter than this are not saved; 0 saves all. What is used once, as short requests often
    # are, costs a copy and a host slot, and brings nothing.
    min_save_tokens: int = 0
    # A request waits for another's prefill of the same prefix above this many shared tokens.
    min_shared_tokens: int = 100
    # Only a load whose victims are wanted too is delayed until this many of its own load times
    # before its request starts.
    lead_loads: float = 3.0
    # A stream waits for issued loads by itself. Where the caller has to (a CPU), a request starts
    # only when its loads have landed, so that no step waits for the loads of one of its requests.
    waits_on_host: bool = False
    # A request may start by layer where at least two bands of layers have so many bytes of a block:
    # smaller parts cost the link's rate (a quarter MiB did on an H200, in layer-first pools).
    # 0: none does.
    band_bytes: int = MIB // 2
    # A cancelled load ends with its windows in flight; one that does not by then hangs.
    give_up_grace_s: float = 1.0
    # Unclaimed prefetched blocks become ordinary cache this long after their request is gone.
    slack_s: float = 5.0
    # Assumed until the first transfers have been timed.
    link_bytes_per_s: float = LINK_BYTES_PER_S

    def __post_init__(self) -> None:
        settle(self, CACHE_BOUNDS)
        if self.device_slots + self.host_slots > MOST_SLOTS:
            raise SettingsError(
                f"device_slots {self.device_slots} and host_slots {self.host_slots} are more than "
                f"{MOST_SLOTS} together; lower one of them"
            )
        if self.prefetch_share + self.reserve_share > 1.0:
            raise SettingsError(
                f"prefetch_share {self.prefetch_share} and reserve_share {self.reserve_share} "
                "exceed the device pool together; a prefetch_share of "
                f"{1.0 - self.reserve_share:g} would work"
            )
        if policy_of(self.mode).host_tier and self.host_slots:
            self._check_host()

    @property
    def reserve_blocks(self) -> int:
        """Device slots kept obtainable for running requests to grow into."""
        return max(1, int(self.device_slots * self.reserve_share))

    @property
    def effective_blocks(self) -> int:
        """Distinct blocks that fit in device and host memory together."""
        return self.device_slots + (self.host_slots if policy_of(self.mode).host_tier else 0)

    def _check_host(self) -> None:
        host_bytes = self.host_slots * self.block_bytes
        if self.window_bytes > host_bytes:
            raise SettingsError(
                f"a window of {self.window_bytes} bytes exceeds the host pool of {host_bytes} "
                f"bytes; a window_bytes of {max(self.block_bytes, host_bytes // 4)} would work, "
                "or a larger host pool"
            )
        if self.host_slots < self.device_slots:
            warnings.warn(
                f"the host tier ({self.host_slots} blocks) is smaller than the device pool "
                f"({self.device_slots}): it will mostly mirror it and bring little; give it "
                "several times the device pool",
                stacklevel=4,
            )


CACHE_BOUNDS: dict[str, Bound] = {
    "block_tokens": Whole(1),
    "block_bytes": Whole(1),
    "device_slots": Whole(1, MOST_SLOTS),
    "host_slots": Whole(0, MOST_SLOTS, "0 means no host tier"),
    "mode": MODE,
    "save_mode": OneOf(SaveMode),
    "window_bytes": Whole(1),
    "look_ahead_requests": Whole(1),
    "prefetch_share": SHARE,
    "reserve_share": SHARE,
    "in_flight_s": SECONDS,
    "saves_in_flight_s": SECONDS,
    "min_load_tokens": Whole(0),
    "min_save_tokens": Whole(0, note="0 saves all"),
    "min_shared_tokens": Whole(0),
    "lead_loads": Real(0.0, 1e9),
    "waits_on_host": Made(bool),
    "band_bytes": Whole(0, note="0: no start by layer"),
    "give_up_grace_s": Real(0.0, 1e9),
    "slack_s": Real(0.0, 1e9),
    "link_bytes_per_s": RATE,
}
"""What each field of `CacheSettings` may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Settings of the batching rules."""

    # Tokens a step may compute, prefill and decode together.
    step_tokens: int = 512
    # Requests that decode or prefill at once.
    max_running: int = 8
    # Waiting requests, running ones not counted; above it, enqueue refuses.
    max_waiting: int = 1024

    def __post_init__(self) -> None:
        settle(self, BATCH_BOUNDS)
        if self.step_tokens < self.max_running:
            raise SettingsError(
                f"step_tokens {self.step_tokens} cannot hold one token for each of max_running "
                f"{self.max_running}; raise step_tokens or lower max_running"
            )


BATCH_BOUNDS: dict[str, Bound] = {
    "step_tokens": Whole(1),
    "max_running": Whole(1),
    "max_waiting": Whole(1),
}
"""What each field of `BatchSettings` may be."""
