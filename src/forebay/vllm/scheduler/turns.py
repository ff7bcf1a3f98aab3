"""Whose turn it is: what happens when vLLM asks about a waiting request that lacks its loads.

vLLM asks about all that wait whenever a run slot is free, in their order, and goes on with the
next where it is told to ask again. So being asked is no sign that a request could start: as many
of those that lack something load now as there are run slots, the others stay with look-ahead.
Where one finds no room none behind it starts a load, or it would take the room that the first one
waits for. The first is left to vLLM then, which finds no room either, and keeps the order: until
there is room for its loads, which is less than what computing it takes.
"""

from __future__ import annotations

from operator import attrgetter

from forebay.cache.loads import Loads
from forebay.cache.parts import Parts
from forebay.core.requests import NotYet, Waiting
from forebay.vllm.adapter import awaits_outputs
from forebay.vllm.scheduler.hints import Hints
from forebay.vllm.scheduler.pool import VllmDevicePool
from forebay.vllm.scheduler.records import Record, Turn


class Turns:
    """The waiting requests that vLLM asked about and was told to ask about again."""

    def __init__(self, parts: Parts, device: VllmDevicePool, loads: Loads, hints: Hints) -> None:
        self._block_tokens = parts.settings.block_tokens
        self._store = parts.store
        self._line = parts.line
        self._flights = parts.flights
        self._device = device
        self._loads = loads
        self._hints = hints
        # Put off since the last orders; and those whose turn it was then.
        self._asked: dict[int, Record] = {}
        self._turning: set[int] = set()

    @property
    def lack_loads(self) -> bool:
        """Whether some request was put off in this step."""
        return bool(self._asked)

    def puts_off(self, record: Record, entry: Waiting | None, now_s: float, *, idle: bool) -> bool:
        """vLLM, which is `idle` or not, could start it. Returns whether to ask again at the next
        step.
        """
        if awaits_outputs(record.request):
            return False  # vLLM 0.26 would find it ended among those put off, and die of it
        if entry is None:
            return record.lets_pass(now_s)
        if record.hint is None:
            return self._asks_again(record, entry, now_s)
        # On an idle engine with nothing under way it gets no more: there was no room for it.
        stuck = record.turn is Turn.WAITS and idle and not len(self._flights)
        record.turn = Turn.WAITS
        lacks = self.lacks(entry, now_s) and not stuck
        return self._hints.waits(record.id, now_s, lacks=lacks)

    def puts_off_again(self, record: Record, entry: Waiting | None) -> bool:
        """One that was put off waits for the same loads still. Returns whether it does."""
        if entry is None or record.hint is not None or record.turn is not Turn.WAITS:
            return False
        if not self._flights.lacks_any(entry.waits):
            return False
        self._asked[record.id] = record
        return True

    def ready(self, record: Record, now_s: float) -> bool:
        """Whether one that was put off for its loads lacks none any more."""
        if record.hint is not None or record.lets_pass(now_s):
            return False
        entry = self._line.get(record.id)
        return entry is None or not self.lacks(entry, now_s)

    def _asks_again(self, record: Record, entry: Waiting, now_s: float) -> bool:
        if self._gains_nothing(record, entry) or not (
            self.lacks(entry, now_s) or self._loses(record, entry, now_s)
        ):
            record.turn = Turn.READY
            return False
        self._asked[record.id] = record
        if record.turn is Turn.NO_ROOM and not self._device.fits(entry.blocks[: entry.loadable]):
            return False
        record.turn = Turn.WAITS
        if record.asked_s is None:
            record.asked_s = now_s
        return True

    def _gains_nothing(self, record: Record, entry: Waiting) -> bool:
        """Whether vLLM found as much as loads could bring, where that needs blocks beside its path:
        vLLM may find a hit to end where nobody here knows of an end.
        """
        if not entry.beside:
            return False
        self._line.refresh(entry)
        return record.local_tokens >= entry.length * self._block_tokens

    def lacks(self, entry: Waiting, now_s: float) -> bool:
        """Whether something that `entry` can read is on its way, or worth a load."""
        self._line.refresh(entry)
        if self._flights.lacks_any(entry.waits) or self._loads.worth(entry, now_s) > 0:
            return True
        ahead = entry.blocks[entry.covered : entry.loadable]
        return entry.here > 0 and bool(self._store.loads_of(ahead))

    def _loses(self, record: Record, entry: Waiting, now_s: float) -> bool:
        """Whether vLLM took a block of its prompt that is being saved: that is in host memory in a
        moment, or nowhere. Of a save that does not end it is not known which.
        """
        waited_s = 0.0 if record.asked_s is None else now_s - record.asked_s
        if waited_s > self._loads.patience_s(entry, now_s):
            return False
        return self._device.given_up(entry.blocks[: entry.loadable])

    def begin(self, entry: Waiting, now_s: float) -> None:
        """Its turn comes with the next step, which vLLM schedules right away: start what it
        lacks.
        """
        if self.lacks(entry, now_s):
            self._turning.add(entry.request.id)
            self._start(entry, now_s, first=True)

    def start_next(self, free_run_slots: int, now_s: float) -> None:
        """The step is complete: start what the next of those lack that were put off in it, as many
        as there are `free_run_slots`.
        """
        if not self._asked and not self._turning:
            return
        asked, self._asked = self._asked, {}
        entries = sorted(map(self._line.__getitem__, asked), key=attrgetter("order"))
        entries = entries[: max(1, free_run_slots)]
        turning = {entry.request.id for entry in entries}
        for request in self._turning - turning:
            self._not_yet(request)
        self._turning = turning
        for record in asked.values():
            record.turn = Turn.WAITS
        for place, entry in enumerate(entries):
            if not self._start(entry, now_s, first=not place):
                if not place:
                    asked[entry.request.id].turn = Turn.NO_ROOM
                break

    def over(self, record: Record) -> None:
        """It started, or is gone."""
        self._asked.pop(record.id, None)

    def clear(self) -> None:
        """All wait anew."""
        self._asked.clear()

    def _start(self, entry: Waiting, now_s: float, *, first: bool) -> bool:
        """Start its loads. Returns whether there was room for them."""
        if self._loads.turn(entry, now_s, first=first) is not NotYet.FULL:
            return True
        # It is not its loads that it waits for.
        entry.demanded_s = None
        return False

    def _not_yet(self, request: int) -> None:
        """vLLM has no run slot for it any more: look-ahead goes on with it, if it still waits."""
        entry = self._line.get(request)
        if entry is not None:
            entry.turn_s = entry.demanded_s = None
