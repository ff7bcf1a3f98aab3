"""The planner: what to bring to the device, when, and what to give up for it.

It reads a view and returns a plan; it keeps no state and touches nothing, so that the same code
decides for a live engine and for a replayed trace. It deals in counts; the cache picks slots.

The policy, in order of expected start:
- Whatever a waiting request finds on the device is leased, so that it is there when its turn comes.
- Host blocks are loaded at once while there is room that nobody wants, root first, as many as fit.
- Only a load that must displace blocks which other waiting requests want is delayed, until a few of
  its own load times before its start. What sooner requests want is leased by then and cannot be
  displaced.
- The first request that does not fit ends the plan: a later one must not overtake it in the pool.
  A hint that does not fit ends nothing: it may be wrong, and who waits is there.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from forebay.core.rates import Rates

_NEVER = float("inf")


class Wanted(NamedTuple):
    """A waiting request, or a hint of one, as the planner sees it. Counts are blocks.

    Of the blocks it matched, the first `covered` are under its prefetch lease. Behind them lie
    `here` that need only a lease (on the device, or being loaded for somebody), `kept` of which
    others lease already, and `to_load` that have only a host copy. Only a hint expires.
    """

    request: int
    eta_s: float
    covered: int
    here: int
    kept: int
    to_load: int
    expires_s: float = _NEVER

    @property
    def is_hint(self) -> bool:
        """Whether it is only word of a request."""
        return self.expires_s < _NEVER


@dataclass(frozen=True, slots=True)
class View:
    """The state that a plan rests on. Counts are blocks, times are the caller's clock."""

    now_s: float
    block_bytes: int
    obtainable: int
    obtainable_protected: int
    reserve: int
    lease_room: int
    copy_room: int
    lead_loads: float
    most_brings: int
    wanted: Sequence[Wanted]


@dataclass(frozen=True, slots=True)
class Bring:
    """Lease the next `reach` blocks of `request`'s path at most, loading `blocks` of them."""

    request: int
    reach: int
    blocks: int
    deadline_s: float
    protected: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, in this order. `refused` requests did not fit and will be looked at again."""

    bring: list[Bring] = field(default_factory=list["Bring"])
    refused: list[int] = field(default_factory=list[int])


class Running(NamedTuple):
    """A running request: prompt tokens still to compute, and tokens it may still generate."""

    prefill_tokens: int
    answer_tokens: int


def expected_starts(
    now_s: float,
    running: Sequence[Running],
    queue: Sequence[int],
    free_run_slots: int,
    rates: Rates,
) -> list[float]:
    """When each of `queue` starts: it needs a run slot, and the prefill ahead of it done.

    `queue` has the prompt tokens that each waiting request will have to compute, in order.
    Run slots come free as running requests end; a request started from the queue is assumed to give
    its slot back after an average answer. A low estimate is the safe side: the load comes earlier.
    """
    step_s = rates.step_s.value
    slots = [now_s] * max(0, min(free_run_slots, len(queue)))
    slots += [
        now_s + rates.prefill_s(run.prefill_tokens) + run.answer_tokens * step_s for run in running
    ]
    heapq.heapify(slots)
    compute_free_s = now_s + sum(rates.prefill_s(run.prefill_tokens) for run in running)
    answer_s = rates.answer_tokens.value * step_s
    starts: list[float] = []
    token_s = 1.0 / rates.prefill_tokens_per_s.value
    for tokens in queue:
        slot_s = heapq.heappop(slots) if slots else now_s
        start_s = slot_s if slot_s > compute_free_s else compute_free_s
        starts.append(start_s)
        compute_free_s = start_s + tokens * token_s
        heapq.heappush(slots, compute_free_s + answer_s)
    return starts


def make_plan(view: View, rates: Rates) -> Plan:
    """Decide what to bring now. `view.wanted` is in order of expected start."""
    plan = Plan()
    due_s = _due_times(view, rates)
    room = view.obtainable - view.reserve
    protected_room = view.obtainable_protected - view.reserve
    lease_room, copy_room = view.lease_room, view.copy_room
    for wanted, by_s in zip(view.wanted, due_s, strict=True):
        if wanted.expires_s <= view.now_s or not (wanted.here or wanted.to_load):
            continue
        # What others lease already takes no more of the pool.
        idle = wanted.here - wanted.kept
        blocks = max(0, min(wanted.to_load, room, lease_room - idle, copy_room))
        protected = False
        if blocks < wanted.to_load and by_s <= view.now_s:
            most = max(0, min(wanted.to_load, protected_room, lease_room - idle, copy_room))
            protected, blocks = most > blocks, max(most, blocks)
        reach = min(wanted.here + blocks, wanted.kept + lease_room)
        if reach:
            plan.bring.append(Bring(wanted.request, reach, blocks, wanted.eta_s, protected))
        if blocks < wanted.to_load:
            plan.refused.append(wanted.request)
            if not wanted.is_hint:
                break
        room -= blocks
        protected_room -= blocks + idle
        lease_room -= blocks + idle
        copy_room -= blocks
        if copy_room <= 0 or lease_room <= 0 or len(plan.bring) >= view.most_brings:
            break
    return plan


def _due_times(view: View, rates: Rates) -> list[float]:
    """When the load of each of `view.wanted` must start at the latest: a few of its own load times
    before its request does, and early enough for those behind it, which the link serves afterwards.
    """
    # The caller looks again only a step later, and hears late of what has arrived.
    heard_s = rates.load_latency_s.value + rates.step_s.value
    due: list[float] = []
    next_s = _NEVER
    for wanted in reversed(view.wanted):
        if wanted.to_load:
            load_s = rates.load_s(wanted.to_load * view.block_bytes)
            own_s = wanted.eta_s - view.lead_loads * load_s - heard_s
            next_s = min(own_s, next_s - load_s)
        due.append(next_s)
    due.reverse()
    return due
