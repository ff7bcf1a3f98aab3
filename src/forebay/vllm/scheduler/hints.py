"""Hints: a session comes back soon, so what it will ask for is brought now.

A hint is a request of one token whose prompt begins like the one that is to come. It stands in the
waiting line behind all that wait, with its eta, and look-ahead brings what it finds in host memory.
vLLM is told to ask again about it until that has landed; then it runs like any other, with a hit.
Its entry stays in the line, and what it brought wanted, until its session came or it expires.

Hints come from whoever may send requests, and may be wrong. So they are bounded, by number, by
blocks and in time, and what they hold is given up before anything that is held for who waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from forebay.cache.loads import Loads
from forebay.core.requests import Hint
from forebay.core.waiting import WaitingLine
from forebay.vllm.adapter import VllmRequest
from forebay.vllm.groups import Groups
from forebay.vllm.scheduler.records import Record
from forebay.vllm.scheduler.roster import Roster
from forebay.vllm.scheduler.wishes import AskedHint

_LEAD_S = 0.1
"""So long before its eta a hint's own token would be in the way of the session that comes."""
_LATE_S = 1.0
"""So long it waits for its session after that."""
_ANSWER_S = 30.0
"""And so long for its session's answer, but not beyond its expiry."""


class HintOutcome(StrEnum):
    """What became of a hint."""

    CLAIMED = "claimed"  # its session came
    EXPIRED = "expired"  # and it did not
    RENEWED = "renewed"  # a later hint of the same session took its place
    WITHDRAWN = "withdrawn"  # its client left before it was answered
    DROPPED = "dropped"  # the cache was told to forget what it had, or to look ahead no more
    REFUSED = "refused"  # it was over a bound, or in a mode without look-ahead


@dataclass(frozen=True, slots=True)
class HintBounds:
    """How much hints may take: their number, blocks of all together, and the longest expiry."""

    hints: int
    blocks: int
    expiry_s: float


NO_HINTS = HintBounds(hints=0, blocks=0, expiry_s=0.0)


@dataclass(slots=True)
class OpenHint:
    """A hint that was taken up, for the first `blocks` of the request in `record`, of which a hit
    needs `room` in all; `answered`: that was started.
    """

    record: Record
    hint: Hint
    blocks: int
    room: int
    answered: bool = False

    def shares(self, hashes: list[bytes], blocks: int) -> bool:
        """Whether a prompt with these hashes of blocks begins with the first `blocks` of it."""
        # Each hash is of all before it too.
        own = self.record.request.block_hashes
        return 0 < blocks <= len(hashes) and hashes[blocks - 1] == own[blocks - 1]


class Hints:
    """The hints that are open. Each has an entry in `line` under the id of its record."""

    def __init__(
        self,
        bounds: HintBounds,
        line: WaitingLine,
        roster: Roster,
        loads: Loads,
        groups: Groups,
    ) -> None:
        self._bounds = bounds
        self._line = line
        self._roster = roster
        self._loads = loads
        self._groups = groups
        self._open: dict[int, OpenHint] = {}
        self._blocks = 0
        self.outcomes = dict.fromkeys(HintOutcome, 0)

    def __len__(self) -> int:
        return len(self._open)

    def take_up(self, record: Record, now_s: float, *, looks_ahead: bool) -> None:
        """Note in `record` the hint that it asks for, if it does, or why it is none."""
        if record.wishes.hint is None:
            return
        hint = self._accept(record, record.wishes.hint, now_s, looks_ahead=looks_ahead)
        if isinstance(hint, str):
            record.hint_refused = hint
        else:
            record.hint = hint

    def _accept(
        self, record: Record, asked: AskedHint, now_s: float, *, looks_ahead: bool
    ) -> Hint | str:
        hashes, bounds = record.request.block_hashes, self._bounds
        blocks = len(hashes)
        room = blocks + self._groups.blocks_beside(blocks)
        renewed = [each for each in self._open.values() if each.shares(hashes, each.blocks)]
        others = self._blocks - sum(each.room for each in renewed)
        why = ""
        if not looks_ahead:
            why = "the mode does not look ahead"
        elif record.wishes.no_cache:
            why = "it is kept out of host memory, for its LoRA, salt, images or session"
        elif len(self._open) - len(renewed) >= bounds.hints:
            why = f"{bounds.hints} hints are open"
        elif others + room > bounds.blocks:
            why = f"hints may keep {bounds.blocks} blocks, and {others} are spoken for"
        if why:
            self.outcomes[HintOutcome.REFUSED] += 1
            return why
        expiry_s = bounds.expiry_s
        if asked.expiry_s is not None:
            expiry_s = min(expiry_s, asked.expiry_s)
        eta_s = now_s + asked.eta_s
        hint = Hint(eta_s, eta_s + expiry_s)
        for each in renewed:
            # By itself it would compute what the later one loads.
            self._give_way(each, record.request, now_s)
            self._close(each, HintOutcome.RENEWED)
        self._open[record.id] = OpenHint(record, hint, blocks, room)
        self._blocks += room
        return hint

    def waits(self, hint: int, now_s: float, *, lacks: bool) -> bool:
        """Whether vLLM should ask again about the hint: it `lacks` loads, or would be in the way.

        What it lacks is not waited for when its time is over.
        """
        eta_s, expires_s = self._open[hint].hint.eta_s, self._open[hint].hint.expires_s
        in_the_way = eta_s - _LEAD_S <= now_s < eta_s + _LATE_S
        return now_s < expires_s and (lacks or in_the_way)

    def answered(self, hint: int) -> None:
        """vLLM starts the hint's own request."""
        if hint in self._open:
            self._open[hint].answered = True

    def ended(self, record: Record) -> None:
        """A request is over: a hint that was its own stays open if it was answered."""
        found = self._open.get(record.id)
        if found is not None and not found.answered:
            self._close(found, HintOutcome.WITHDRAWN)

    def came(self, request: VllmRequest, now_s: float) -> None:
        """`request` starts. Hints of its session have done their work, whatever they found, and
        their own requests let it have its answer first.

        It begins with all that the hint said, or with all but the last block of it: how a prompt
        ends may depend on whether more follows.
        """
        hashes = request.block_hashes
        for found in list(self._open.values()):
            if found.shares(hashes, min(found.blocks, max(1, found.blocks - 1))):
                self._give_way(found, request, now_s)
                self._close(found, HintOutcome.CLAIMED)

    def expire(self, now_s: float) -> None:
        """Hints whose time is over keep nothing any more."""
        for found in list(self._open.values()):
            if found.hint.expires_s <= now_s:
                self._close(found, HintOutcome.EXPIRED)

    def drop(self, record: Record) -> None:
        """What was cached of it counts no more, and so does its hint, if it is one."""
        found = self._open.get(record.id)
        if found is not None:
            self._close(found, HintOutcome.DROPPED)

    def drop_all(self) -> None:
        """What was cached counts no more, or nothing is brought: so hints end."""
        for found in list(self._open.values()):
            self._close(found, HintOutcome.DROPPED)

    def _give_way(self, found: OpenHint, request: VllmRequest, now_s: float) -> None:
        """The hint's own request lets `request` have its answer first."""
        found.record.goes_behind = request
        found.record.until_s = min(now_s + _ANSWER_S, found.hint.expires_s)

    def _close(self, found: OpenHint, outcome: HintOutcome) -> None:
        record = found.record
        del self._open[record.id]
        self._blocks -= found.room
        self.outcomes[outcome] += 1
        entry = self._line.get(record.id)
        if entry is not None:
            self._loads.leave(entry)
        self._roster.hint_over(record)
