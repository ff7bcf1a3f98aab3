"""What of the cache's counters is shown as metrics: one name and one text wherever it is served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forebay.cache.account import CacheStats
from forebay.core.ledger import MissReason, PrefetchOutcome, Source


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric of `CacheStats`. `values` gives it by the `words` of its label, or, where it has no
    `label`, as that of "". A gauge stands; all others only grow.
    """

    name: str
    text: str
    values: Callable[[CacheStats], Mapping[str, float]]
    label: str = ""
    words: tuple[str, ...] = ("",)
    gauge: bool = False


FIGURES = (
    Figure(
        "forebay:blocks",
        "Prompt blocks by source.",
        lambda cache: {source.value: cache.sources[source] for source in Source},
        "source",
        tuple(source.value for source in Source),
    ),
    Figure(
        "forebay:misses",
        "Prompt blocks computed, by reason.",
        lambda cache: {reason.value: cache.misses[reason] for reason in MissReason},
        "reason",
        tuple(reason.value for reason in MissReason),
    ),
    Figure(
        "forebay:prefetch_bytes",
        "Planned bytes by outcome.",
        lambda cache: cache.prefetch_bytes,
        "outcome",
        tuple(outcome.value for outcome in PrefetchOutcome),
    ),
    Figure(
        "forebay:prefetch_open_bytes",
        "Planned, without outcome.",
        lambda cache: {"": cache.prefetch_open_bytes},
        gauge=True,
    ),
    Figure("forebay:loaded_bytes", "Host to device.", lambda cache: {"": cache.loaded_bytes}),
    Figure("forebay:saved_bytes", "Device to host.", lambda cache: {"": cache.saved_bytes}),
    Figure("forebay:load_seconds", "The link was busy loading.", lambda cache: {"": cache.load_s}),
    Figure("forebay:save_seconds", "The link was busy saving.", lambda cache: {"": cache.save_s}),
    Figure(
        "forebay:failed_transfers",
        "Transfers that the link failed or never ended.",
        lambda cache: {"load": cache.failed_loads, "save": cache.failed_saves},
        "direction",
        ("load", "save"),
    ),
    Figure(
        "forebay:link_stopped",
        "1 while loads are left out: one hung.",
        lambda cache: {"": int(cache.link_stopped)},
        gauge=True,
    ),
    Figure("forebay:link_stops", "How often that began.", lambda cache: {"": cache.link_stops}),
    Figure(
        "forebay:evicted_blocks",
        "Left the device for others; or gave up the host's, their last, copy.",
        lambda cache: {"device": cache.evicted_blocks, "host": cache.given_up_blocks},
        "tier",
        ("device", "host"),
    ),
    Figure(
        "forebay:dropped_dirty_blocks",
        "Left the device unsaved: lost.",
        lambda cache: {"": cache.dropped_dirty_blocks},
    ),
    Figure(
        "forebay:quarantined_blocks",
        "Slots out of use until restart.",
        lambda cache: {"": cache.quarantined_blocks},
        gauge=True,
    ),
)
