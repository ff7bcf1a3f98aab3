"""The mover as the half in the scheduler knows it.

Where the worker is in another process, orders go out with a step, and reports come back with the
output of a later one. Where it is in the same thread they go from hand to hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from forebay._native import NumberColumn
from forebay.core.arrays import EMPTY_IDS, Ids
from forebay.errors import ProtocolError
from forebay.transfer.messages import (
    WINDOW_DTYPE,
    Direction,
    Report,
    Transfer,
    TransferClass,
)
from forebay.transfer.mover import DEFAULT_WAIT_S
from forebay.vllm.messages import BlockCopy, Expedite, News, Orders


class Hands(Protocol):
    """A worker in the same thread. See `Mover` for what each does."""

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """Take over transfers."""
        ...

    def cancel(self, ids: Sequence[int]) -> None:
        """Stop transfers."""
        ...

    def expedite(self, each: Expedite) -> None:
        """Raise the urgency of transfers."""
        ...

    def expect(self, loads: Sequence[int]) -> bool:
        """No step is launched from now on that may read what these bring, before they have ended;
        and then all of it is there, whatever became of them. False, and nothing is changed, where
        one of them has ended.
        """
        ...

    def news(self) -> News | None:
        """What is new since the last time, if anything is."""
        ...


class Mailbox:
    """A `Mover` that tells `hands` at once what it is told, if there are any, or collects it until
    `post`, and reports what `deliver` brought.

    Steps are numbered by whoever posts; the worker launches them. Nothing here blocks. Device slots
    are numbers up to `device_slots`, ids of transfers are above 0.
    """

    def __init__(self, device_slots: int, hands: Callable[[], Hands | None] = lambda: None) -> None:
        self._hands = hands
        self._new_loads: list[int] = []
        self._submit: list[Transfer] = []
        self._cancel: list[int] = []
        self._expedite: list[Expedite] = []
        self._reports: list[Report] = []
        self._saves: dict[int, Ids] = {}
        # The newest un-ended save that reads each device slot, or 0.
        self._save_of = NumberColumn(device_slots + 1)
        self._completed_step = 0

    # -- for the scheduler half ------------------------------------------------------------------

    def take_new_loads(self) -> list[int]:
        """The loads submitted since the last time."""
        loads, self._new_loads = self._new_loads, []
        return loads

    def saves_reading(self, slots: Ids) -> set[int]:
        """The un-ended saves that read any of these device slots."""
        if not self._saves:
            return set()
        return {save for save, _ in self._save_of.runs(slots)}

    def expect(self, loads: Sequence[int]) -> bool:
        """See `Hands.expect`; without hands there is none who could."""
        hands = self._hands()
        return hands is not None and hands.expect(loads)

    def post(
        self, step: int, settle: set[int], copies: tuple[BlockCopy, ...], *, idle: bool
    ) -> Orders:
        """All that was told since the last time, as the orders for `step`."""
        unsent = {each.id for each in self._submit}
        orders = Orders(
            step=step,
            # What goes out only now waits in the mover for whoever wrote its slots before.
            settle=tuple(sorted(settle - unsent)),
            copies=copies,
            submit=tuple(self._submit),
            cancel=tuple(self._cancel),
            expedite=tuple(self._expedite),
            idle=idle,
        )
        self._submit, self._cancel, self._expedite = [], [], []
        return orders

    def look(self) -> News | None:
        """What hands have to say, if there are any."""
        hands = self._hands()
        return None if hands is None else hands.news()

    def deliver(self, report: Report) -> None:
        """The worker's report came."""
        self._reports.append(report)

    # -- for what submits ------------------------------------------------------------------------

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """See `Mover.submit`: at once, or with the next step's orders."""
        for each in transfers:
            if each.direction is Direction.SAVE:
                self._saves[each.id] = each.sources
                self._save_of.put(each.sources, each.id)
            else:
                self._new_loads.append(each.id)
        hands = self._hands()
        if hands is None:
            self._submit.extend(transfers)
        else:
            hands.submit(transfers)

    def cancel(self, ids: Sequence[int]) -> None:
        """See `Mover.cancel`: at once, or with the next step's orders."""
        hands = self._hands()
        if hands is None:
            self._cancel.extend(ids)
        else:
            hands.cancel(ids)

    def expedite(
        self, ids: Sequence[int], transfer_class: TransferClass, deadline_s: float
    ) -> None:
        """See `Mover.expedite`: at once, or with the next step's orders."""
        each, hands = Expedite(tuple(ids), transfer_class, deadline_s), self._hands()
        if hands is None:
            self._expedite.append(each)
        else:
            hands.expedite(each)

    def use_bands(self, ids: Sequence[int], ends: Sequence[int]) -> None:
        """A start by layer is the engine's own; vLLM's steps wait for nothing."""
        self._not_here()

    def poll(self) -> Report:
        """See `Mover.poll`: what was delivered since the last time."""
        issued = tuple(id_ for report in self._reports for id_ in report.issued)
        completions = tuple(each for report in self._reports for each in report.completions)
        steps = [report.completed_step for report in self._reports]
        self._completed_step = max([self._completed_step, *steps])
        self._reports = []
        for each in completions:
            read = self._saves.pop(each.id, EMPTY_IDS)
            self._save_of.put(read[self._save_of.take(read) == each.id], 0)
        return Report(issued, completions, self._completed_step)

    def wait_news(self, timeout_s: float) -> bool:
        """See `Mover.wait_news`; does not wait: news comes with a step."""
        return bool(self._reports)

    def step_launched(self, step: int, stream: int = 0) -> None:
        """The worker's to say."""
        self._not_here()

    def step_abandoned(self, step: int) -> None:
        """The worker's to say."""
        self._not_here()

    def wait(
        self,
        ids: Sequence[int],
        stream: int = 0,
        timeout_s: float = DEFAULT_WAIT_S,
        *,
        band: int | None = None,
    ) -> None:
        """The worker's to do."""
        self._not_here()

    def windows(self) -> NDArray[Any]:
        """See `Mover.windows`: they stay with the worker."""
        return np.empty(0, dtype=WINDOW_DTYPE)

    @property
    def windows_dropped(self) -> int:
        """See `Mover.windows_dropped`."""
        return 0

    def close(self, timeout_s: float) -> None:
        """See `Mover.close`: the worker closes the mover that moves."""

    def _not_here(self) -> NoReturn:
        raise ProtocolError("steps run and transfers are waited for in vLLM's worker, not here")
