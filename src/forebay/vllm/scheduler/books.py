"""The books of the half in vLLM's scheduler: where blocks came from, how long steps take."""

from __future__ import annotations

from forebay._native import count_true
from forebay.cache.account import Account, CacheStats
from forebay.cache.link import LinkWatch
from forebay.cache.parts import Parts
from forebay.core.ledger import MissReason, Source
from forebay.core.requests import Waiting
from forebay.vllm.adapter import BlockPool, Step
from forebay.vllm.scheduler.hints import Hints
from forebay.vllm.scheduler.records import Record
from forebay.vllm.seen.measures import Tally, Values, counted, standing

# How much of the slowest step counts one step later.
_SLOW_MEMORY = 0.95


class Books:
    """Counts what others decide. Changes nothing of theirs but the measured `rates` of steps."""

    def __init__(
        self,
        parts: Parts,
        pool: BlockPool,
        link: LinkWatch,
        hints: Hints,
    ) -> None:
        self._settings = parts.settings
        self._switch = parts.switch
        self._store = parts.store
        self._line = parts.line
        self._ledger = parts.ledger
        self._rates = parts.rates
        self._pool = pool
        self._link = link
        self._hints = hints
        self.account = Account()
        self.tally = Tally()
        # Steps with tokens whose output has not come, by number, in order: prefill tokens, decode
        # tokens, when they were scheduled, whether they are to be timed. Of steps without tokens
        # vLLM drops the output where it is empty.
        self._under_way: dict[int, tuple[int, int, float, bool]] = {}
        self._heard_s = 0.0
        self.slow_step_s = 0.0
        """The slowest step, where older ones count for less and less."""

    @property
    def computes(self) -> bool:
        """Whether the output of a step that computes something is still to come."""
        return bool(self._under_way)

    def asked(self, record: Record) -> None:
        """A request came, with its wishes."""
        for _, why in record.wishes.ignored:
            self.tally.ignored[why] += 1

    def started(self, record: Record, entry: Waiting, now_s: float) -> None:
        """A request starts: where its blocks came from, and why others did not."""
        size = self._settings.block_tokens
        found = record.found_blocks(size)
        brought = self._read(entry, found, now_s)
        # It may have got tokens while it waited, of a step under way as it was preempted.
        tokens = record.request.num_tokens
        asked = tokens // size
        # What others brought, or a hint, is there too for one that never waited.
        loaded = count_true(entry.origins[: min(found, entry.length)]) + brought
        waited_s = 0.0 if record.asked_s is None else now_s - record.asked_s
        there = record.found_tokens
        self.tally.prompt(tokens, min(loaded * size, there), there, waited_s)
        sources = self.account.sources
        sources[Source.HOST] += loaded
        sources[Source.DEVICE] += found - loaded
        sources[Source.RECOMPUTED] += asked - found
        self._missed(entry, tokens, found)

    def _missed(self, entry: Waiting, tokens: int, found: int) -> None:
        """Of a request of so many `tokens` the first `found` blocks are read, others computed."""
        misses, size = self.account.misses, self._settings.block_tokens
        asked = tokens // size
        if entry.request.no_cache or not self._switch.policy.host_tier:
            misses[MissReason.DISABLED] += asked - found
            return
        dropped = self._dropped(entry, found)
        found += dropped
        last = min(entry.request.tokens // size - entry.usable, asked - found)
        misses[MissReason.LAST] += dropped + last
        known = max(0, entry.length - found)
        reason = entry.limit_reason
        if entry.limit is None and known:
            reason = MissReason.STOPPED if self._link.stopped else MissReason.SHORT
            reason = MissReason.LAST if tokens == (found + 1) * size else reason
        misses[reason] += known
        misses[MissReason.ABSENT] += asked - found - last - known

    def _dropped(self, entry: Waiting, found: int) -> int:
        """How many blocks behind the first `found` vLLM found too, and computes once more."""
        if found:
            return self._line.dropped
        first = entry.blocks[: self._line.dropped]
        return int(self._store.resident(first).sum())

    def _read(self, entry: Waiting, found: int, now_s: float) -> int:
        """Its first `found` blocks are read. How many that it did not cover were prefetched."""
        turn_s = now_s if entry.turn_s is None else entry.turn_s
        path = entry.blocks[: min(found, entry.length)]
        own = min(len(path), entry.covered)
        self._ledger.read(path[:own], turn_s)
        if entry.beside and found >= entry.length:
            self._ledger.read(entry.blocks[entry.length :], turn_s)
        if found and self._line.dropped:
            # What shows that these are right had to be there as much.
            self._ledger.read(entry.blocks[found : found + self._line.dropped], turn_s)
        return self._ledger.read(path[own:], turn_s)

    def scheduled(
        self, number: int, step: Step, now_s: float, *, loads_lack: bool, held: bool
    ) -> None:
        """vLLM scheduled `step`, of this number, while requests lack loads or not. One that is
        `held` for loads takes longer than its work.
        """
        if step.tokens:
            drafts = step.drafts
            if drafts:
                alone = [each.tokens - drafts.get(each.request, 0) for each in step.scheduled]
            else:
                alone = [each.tokens for each in step.scheduled]
            decode = alone.count(1)
            prefill = step.tokens - sum(drafts.values()) - decode
            self._under_way[number] = (prefill, decode, now_s, not held)
        self.tally.step(now_s, computes=step.tokens > 0, loads_lack=loads_lack)

    def step_ended(self, number: int, now_s: float) -> None:
        """The output of the step of this number came: how long it took, if it computed anything."""
        for step in [step for step in self._under_way if step < number]:
            del self._under_way[step]  # outputs come in order: this one's never came
        if number not in self._under_way:
            return
        prefill, decode, began_s, timed = self._under_way.pop(number)
        took_s = now_s - max(began_s, self._heard_s)
        if timed:
            self._rates.stepped(prefill, decode, took_s)
            self.slow_step_s = max(took_s, _SLOW_MEMORY * self.slow_step_s)
        self._heard_s = now_s

    def stats(self) -> CacheStats:
        """Counters since the start."""
        return self.account.stats(self._ledger, self._store.counters, self._link)

    def figures(self) -> tuple[dict[str, Values], dict[str, Values]]:
        """The counters of its metrics, and the gauges, as they stand, by family."""
        stats = self.stats()
        unused = self._pool.get_num_free_blocks()
        gauges = standing(stats, self._store, unused, self._switch.mode, len(self._hints))
        gauges["forebay:block_bytes"] = {"": self._settings.block_bytes}
        return counted(stats, self.tally, self._hints.outcomes), gauges

    def take_load_waits(self) -> list[float]:
        """How long each of the requests that started since the last time waited for loads."""
        waits, self.tally.load_waits_s = self.tally.load_waits_s, []
        return waits
