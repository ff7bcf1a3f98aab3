"""The slots of one tier: what state each is in, and which FREE one is handed out next.

This is the only place where a slot's state is written. A slot's `stamp` is the newest step that may
touch what lies in it; a copy into the slot may begin when that step has completed. Among FREE slots
a load gets the one with the oldest stamp, since it waits for the stamp; compute gets the newest,
since its own stream orders it behind any earlier step.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from forebay._native import StateColumn
from forebay.core.arrays import EMPTY_IDS, Ids, Steps
from forebay.errors import ProtocolError


class SlotState(IntEnum):
    """Who may do what with a slot.

    FREE: nobody. LOADING: a copy writes it. DIRTY: written, no other copy. SAVING: a copy reads (in
    the device tier) or writes (in the host tier) it. CLEAN: valid, and on the device also present
    in the host tier. QUARANTINED: a copy never completed; not used again.
    """

    FREE = 0
    LOADING = 1
    DIRTY = 2
    SAVING = 3
    CLEAN = 4
    QUARANTINED = 5


_NEXT: dict[SlotState, frozenset[SlotState]] = {
    SlotState.FREE: frozenset({SlotState.LOADING, SlotState.DIRTY, SlotState.SAVING}),
    SlotState.LOADING: frozenset({SlotState.CLEAN, SlotState.FREE, SlotState.QUARANTINED}),
    SlotState.DIRTY: frozenset({SlotState.SAVING, SlotState.FREE}),
    SlotState.SAVING: frozenset(
        {SlotState.CLEAN, SlotState.DIRTY, SlotState.FREE, SlotState.QUARANTINED}
    ),
    SlotState.CLEAN: frozenset({SlotState.DIRTY, SlotState.FREE}),
    SlotState.QUARANTINED: frozenset(),
}


def in_state(states: NDArray[np.int8], state: SlotState) -> NDArray[np.bool_]:
    """Where `states` have `state`."""
    # As a plain number: beside an enumeration's member numpy takes several times as long.
    return states == int(state)


class TierSlots:
    """`count` slots of one tier, of which the first `opened` can be used; see :meth:`open`.

    All methods take and return slot numbers as int32 arrays.
    """

    def __init__(self, count: int, *, opened: int | None = None) -> None:
        self.count = count
        self.opened = 0
        self._state = StateColumn(count)
        # One more than there are, so that a look-up of "no slot" (-1) stays inside.
        self._stamp: Steps = np.zeros(count + 1, np.int64)
        # FREE slots whose stamp has completed, as a stack; then those that still wait, oldest
        # first.
        self._ready: Ids = np.empty(count, np.int32)
        self._ready_count = 0
        self._waiting: deque[tuple[int, Ids]] = deque()
        self._waiting_count = 0
        self._completed_step = 0
        self._counts = [0] * len(SlotState)
        self.open(count if opened is None else opened)

    def open(self, slots: int) -> None:
        """The first `slots` slots can be used from now on: those that are new are FREE."""
        fresh = slots - self.opened
        if not 0 <= fresh <= self.count - self.opened:
            raise ProtocolError(f"{self.opened} of {self.count} slots are open: not {slots}")
        # Below what is free already, so that used memory is used again first.
        self._ready[fresh : fresh + self._ready_count] = self._ready[: self._ready_count].copy()
        self._ready[:fresh] = np.arange(slots - 1, self.opened - 1, -1, dtype=np.int32)
        self._ready_count += fresh
        self._counts[SlotState.FREE] += fresh
        self.opened = slots

    @property
    def free(self) -> int:
        """FREE slots, whatever their stamp."""
        return self._ready_count + self._waiting_count

    def state(self, slots: Ids) -> NDArray[np.int8]:
        """The `SlotState` of each slot; FREE where it is -1, none."""
        return self._state.take(slots)

    def count_in(self, slots: Ids, state: SlotState) -> int:
        """How many of `slots`, -1 being none, are in `state`."""
        return self._state.counts(slots)[state]

    def stamps(self, slots: Ids) -> Steps:
        """The newest step that may touch each slot."""
        return self._stamp.take(slots)

    @property
    def dirty(self) -> int:
        """DIRTY slots."""
        return self._counts[SlotState.DIRTY]

    @property
    def quarantined(self) -> int:
        """QUARANTINED slots."""
        return self._counts[SlotState.QUARANTINED]

    def counts(self) -> dict[SlotState, int]:
        """How many open slots are in each state: kept, so that asking costs nothing."""
        return dict(zip(SlotState, self._counts, strict=True))

    def take_oldest(self, count: int, state: SlotState) -> Ids:
        """Move `count` FREE slots to `state`, oldest stamp first. The caller checked `free`."""
        self._require_free(count)
        taken = [self._pop_ready(min(count, self._ready_count))]
        missing = count - len(taken[0])
        while missing:
            stamp, slots = self._waiting.popleft()
            taken.append(slots[:missing])
            if len(slots) > missing:
                self._waiting.appendleft((stamp, slots[missing:]))
            self._waiting_count -= len(taken[-1])
            missing -= len(taken[-1])
        return self._hand_out(taken, state)

    def take_newest(self, count: int, state: SlotState) -> Ids:
        """Move `count` FREE slots to `state`, newest stamp first. The caller checked `free`."""
        self._require_free(count)
        taken: list[Ids] = []
        missing = count
        while missing and self._waiting:
            stamp, slots = self._waiting.pop()
            taken.append(slots[-missing:])
            if len(slots) > missing:
                self._waiting.append((stamp, slots[:-missing]))
            self._waiting_count -= len(taken[-1])
            missing -= len(taken[-1])
        taken.append(self._pop_ready(missing))
        return self._hand_out(taken, state)

    def move(self, slots: Ids, state: SlotState) -> None:
        """Change the state of `slots`. Raises ProtocolError for what `_NEXT` does not allow."""
        if not len(slots):
            return
        before = self._state.counts(slots)
        found = [was for was, count in zip(SlotState, before, strict=True) if count]
        if any(state not in _NEXT[was] for was in found):
            names = sorted(was.name for was in found)
            raise ProtocolError(f"slots in {names} cannot become {state.name}")
        self._state.put(slots, state)
        for was in found:
            self._counts[was] -= before[was]
        self._counts[state] += len(slots)
        if state is SlotState.FREE:
            self._put_back(slots)

    def touch(self, slots: Ids, step: int) -> None:
        """Note that `step`, the newest of all, may still touch `slots`: stamps only grow."""
        self._stamp.put(slots, step)

    def advance(self, completed_step: int) -> None:
        """Slots whose stamp has completed become ready."""
        self._completed_step = max(self._completed_step, completed_step)
        while self._waiting and self._waiting[0][0] <= self._completed_step:
            _, slots = self._waiting.popleft()
            self._waiting_count -= len(slots)
            self._push_ready(slots)

    def _put_back(self, slots: Ids) -> None:
        newest = int(self._stamp.take(slots).max())
        if newest <= self._completed_step:
            self._push_ready(slots)
            return
        # The deque stays ordered: a group is as young as its youngest slot, and never older than
        # the group before it. That is late for some, never early; the copy checks the true stamp.
        group = max(newest, self._waiting[-1][0]) if self._waiting else newest
        self._waiting.append((group, slots.copy()))
        self._waiting_count += len(slots)

    def _push_ready(self, slots: Ids) -> None:
        self._ready[self._ready_count : self._ready_count + len(slots)] = slots
        self._ready_count += len(slots)

    def _pop_ready(self, count: int) -> Ids:
        if not count:
            return EMPTY_IDS
        self._ready_count -= count
        return self._ready[self._ready_count : self._ready_count + count].copy()

    def _hand_out(self, pieces: list[Ids], state: SlotState) -> Ids:
        slots = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        self._state.put(slots, state)
        self._counts[SlotState.FREE] -= len(slots)
        self._counts[state] += len(slots)
        return slots

    def _require_free(self, count: int) -> None:
        if count > self.free:
            raise ProtocolError(f"{count} slots were asked for and {self.free} are FREE")
