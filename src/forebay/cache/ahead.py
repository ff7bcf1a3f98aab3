"""Look-ahead: give the planner its view of the queue, and carry out what it decides."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from forebay.cache.loads import Loads
from forebay.cache.parts import Parts
from forebay.core.planner import Running, View, Wanted, expected_starts, make_plan
from forebay.core.requests import Hint, Waiting

# Bounds the work of one event; the next event goes on where this one stopped.
_MOST_BRINGS = 2


class LookAhead:
    """Plans for the head of the queue at every event. Does nothing in modes without look-ahead."""

    def __init__(self, parts: Parts, loads: Loads) -> None:
        self._settings = parts.settings
        self._switch = parts.switch
        self._store = parts.store
        self._line = parts.line
        self._flights = parts.flights
        self._rates = parts.rates
        self._loads = loads

    def plan(
        self, now_s: float, running: Iterable[Running], free_run_slots: int, owed: int
    ) -> None:
        """Plan once: lease and load for waiting requests whose turn has not come.

        `running` is read only where there is something to bring.
        `owed` blocks are kept out of it beside the reserve: somebody nearer waits for them.
        """
        if not self._switch.policy.look_ahead or not self._settings.host_slots:
            return
        lease_room, copy_room = self._rooms()
        if lease_room <= 0 or copy_room <= 0:
            return
        wanted = self._wanted(now_s, running, free_run_slots)
        if not wanted:
            return
        device = self._store.device
        view = View(
            now_s=now_s,
            block_bytes=self._settings.block_bytes,
            obtainable=device.obtainable(protected=False),
            obtainable_protected=device.obtainable(protected=True),
            reserve=self._settings.reserve_blocks + owed,
            lease_room=lease_room,
            copy_room=copy_room,
            lead_loads=self._settings.lead_loads,
            most_brings=_MOST_BRINGS,
            wanted=wanted,
        )
        plan = make_plan(view, self._rates)
        for bring in plan.bring:
            entry = self._line[bring.request]
            # What the plan brought before may have displaced part of its path.
            self._line.refresh(entry)
            self._loads.cover(
                entry,
                bring.reach,
                bring.blocks,
                bring.deadline_s,
                now_s,
                protected=bring.protected,
            )
        for request in plan.refused:
            self._line[request].refused = True
            self._make_way(request, wanted)

    def _wanted(
        self, now_s: float, running: Iterable[Running], free_run_slots: int
    ) -> list[Wanted]:
        """The head of the queue, and hints, as the planner sees them, in order of expected start;
        empty when there is nothing to bring.
        """
        # Each with what is worth loading for it.
        waiting: list[tuple[Waiting, int]] = []
        hinted: list[tuple[Waiting, int, Hint]] = []
        lacking = False
        for entry in self._line.head(self._settings.look_ahead_requests):
            if entry.turn_s is None:
                self._line.refresh(entry)
                worth = self._loads.worth(entry, now_s)
                lacking = lacking or entry.here > 0 or worth > 0
                if entry.request.hint is None:
                    waiting.append((entry, worth))
                else:
                    hinted.append((entry, worth, entry.request.hint))
        if not lacking:
            return []
        tokens = self._settings.block_tokens
        queue = [entry.request.tokens - entry.length * tokens for entry, _ in waiting]
        starts = expected_starts(now_s, list(running), queue, free_run_slots, self._rates)
        wanted = [
            _as_wanted(entry, start_s, worth)
            for (entry, worth), start_s in zip(waiting, starts, strict=True)
        ]
        hints = [
            _as_wanted(entry, max(now_s, hint.eta_s), worth, hint.expires_s)
            for entry, worth, hint in hinted
        ]
        hints.sort(key=_eta)
        return list(heapq.merge(wanted, hints, key=_eta)) if hints else wanted

    def _rooms(self) -> tuple[int, int]:
        """Blocks that may still be leased ahead, and that may still be copied ahead."""
        settings = self._settings
        leased = self._store.device.prefetch_leased
        lease_room = int(settings.device_slots * settings.prefetch_share) - leased
        copied = self._rates.blocks_in(settings.in_flight_s, settings.block_bytes)
        return lease_room, copied - self._flights.load_blocks

    def _make_way(self, request: int, wanted: Sequence[Wanted]) -> None:
        """`request` did not fit: of those that come later by more than its own load the last one
        gives way, a hint before any that waits, and for a hint nobody else.
        """
        mine = next(item for item in wanted if item.request == request)
        after_s = mine.eta_s + self._rates.load_s(mine.to_load * self._settings.block_bytes)
        later = [item for item in wanted if item.covered and item.eta_s > after_s]
        hints = [item for item in later if item.is_hint]
        able = hints if hints or mine.is_hint else later
        if able:
            self._loads.give_back(self._line[able[-1].request])


def _as_wanted(entry: Waiting, eta_s: float, worth: int, expires_s: float = float("inf")) -> Wanted:
    covered, here, kept = entry.covered, entry.here, entry.kept
    return Wanted(entry.request.id, eta_s, covered, here, kept, worth, expires_s)


def _eta(wanted: Wanted) -> float:
    return wanted.eta_s
