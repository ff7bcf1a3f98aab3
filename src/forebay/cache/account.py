"""The books: where blocks came from, what was moved, and how long the link took for it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from forebay.cache.link import LinkWatch
from forebay.core.ledger import MissReason, PrefetchLedger, Source
from forebay.core.requests import Waiting
from forebay.core.store import StoreCounters
from forebay.transfer.messages import Completion, Outcome

_logger = logging.getLogger("forebay.cache")

# A device that is broken fails every copy: its reason is told once, and few others beside it.
_MOST_REASONS = 8


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Since the start. Blocks by source and miss reason of admitted requests; bytes by outcome.

    `load_s` is how long the link was busy with loads, whatever the number of them at once, `save_s`
    the same of saves. `layered_starts`: requests that started by layer; `layered_hidden_s`: how
    long, at least, they computed while the rest of their loads flowed. `link_stops`: how often
    loads hung so that others were left out; `link_stopped`: they are now.
    """

    sources: dict[Source, int]
    misses: dict[MissReason, int]
    prefetch_bytes: dict[str, int]
    prefetch_open_bytes: int
    loaded_bytes: int
    saved_bytes: int
    load_s: float
    save_s: float
    evicted_blocks: int
    dropped_dirty_blocks: int
    given_up_blocks: int
    quarantined_blocks: int
    failed_loads: int
    failed_saves: int
    layered_starts: int
    layered_hidden_s: float
    link_stops: int
    link_stopped: bool


@dataclass(slots=True)
class Account:
    """Running totals of one cache."""

    sources: dict[Source, int] = field(default_factory=lambda: dict.fromkeys(Source, 0))
    misses: dict[MissReason, int] = field(default_factory=lambda: dict.fromkeys(MissReason, 0))
    loaded_bytes: int = 0
    saved_bytes: int = 0
    load_s: float = 0.0
    save_s: float = 0.0
    failed_loads: int = 0
    failed_saves: int = 0
    layered: int = 0
    hidden_s: float = 0.0
    _loaded_until_s: float = 0.0
    _saved_until_s: float = 0.0
    _told: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])

    def admitted(
        self, entry: Waiting, block_tokens: int
    ) -> tuple[dict[Source, int], dict[MissReason, int]]:
        """A request starts: every whole block has one source, every recomputed one a reason."""
        sources, misses = _attribute(entry, block_tokens)
        for source, count in sources.items():
            self.sources[source] += count
        for reason, count in misses.items():
            self.misses[reason] += count
        return sources, misses

    def loaded(self, completion: Completion) -> float:
        """A load ended. Returns the seconds for which only it, or it first, kept the link busy."""
        self.loaded_bytes += completion.bytes
        self.failed_loads += self._failed("load", completion)
        busy_s = _busy_s(completion, self._loaded_until_s)
        self._loaded_until_s = max(self._loaded_until_s, completion.finished_s)
        self.load_s += busy_s
        return busy_s

    def saved(self, completion: Completion) -> None:
        """A save ended."""
        self.saved_bytes += completion.bytes
        self.save_s += _busy_s(completion, self._saved_until_s)
        self._saved_until_s = max(self._saved_until_s, completion.finished_s)
        self.failed_saves += self._failed("save", completion)

    def _failed(self, what: str, completion: Completion) -> bool:
        """Whether it failed; the first failure for a reason is told to the log."""
        if completion.outcome is not Outcome.FAILED:
            return False
        reason = (what, completion.error)
        if reason not in self._told and len(self._told) < _MOST_REASONS:
            self._told.add(reason)
            _logger.warning("a %s failed, others may for the same reason: %s", *reason)
        return True

    def stats(self, ledger: PrefetchLedger, counters: StoreCounters, link: LinkWatch) -> CacheStats:
        """The totals as they stand."""
        return CacheStats(
            sources=dict(self.sources),
            misses=dict(self.misses),
            prefetch_bytes={outcome.value: count for outcome, count in ledger.outcomes.items()},
            prefetch_open_bytes=ledger.open_bytes,
            loaded_bytes=self.loaded_bytes,
            saved_bytes=self.saved_bytes,
            load_s=self.load_s,
            save_s=self.save_s,
            evicted_blocks=counters.evicted,
            dropped_dirty_blocks=counters.dropped_dirty,
            given_up_blocks=counters.given_up,
            quarantined_blocks=counters.quarantined,
            failed_loads=self.failed_loads,
            failed_saves=self.failed_saves,
            layered_starts=self.layered,
            layered_hidden_s=self.hidden_s,
            link_stops=link.stops,
            link_stopped=link.stopped,
        )


def _busy_s(completion: Completion, busy_until_s: float) -> float:
    """For how long it alone, or it first, kept its direction of the link busy."""
    return max(0.0, completion.finished_s - max(completion.started_s, busy_until_s))


def _attribute(
    entry: Waiting, block_tokens: int
) -> tuple[dict[Source, int], dict[MissReason, int]]:
    asked = entry.request.tokens // block_tokens
    sources = dict.fromkeys(Source, 0)
    sources[Source.HOST] = entry.loaded
    sources[Source.DEVICE] = entry.covered - entry.loaded
    sources[Source.RECOMPUTED] = asked - entry.covered
    misses = dict.fromkeys(MissReason, 0)
    if entry.request.no_cache:
        misses[MissReason.DISABLED] = asked
        return sources, misses
    limited = len(entry.blocks) - entry.covered
    unmatched = entry.usable - entry.covered - limited
    failed = max(0, min(entry.had - len(entry.blocks), unmatched))
    misses[entry.limit_reason] += limited
    misses[MissReason.FAILED] += failed
    misses[MissReason.ABSENT] += unmatched - failed
    misses[MissReason.LAST] = asked - entry.usable
    return sources, misses
