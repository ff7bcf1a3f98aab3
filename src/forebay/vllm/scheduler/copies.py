"""Copies under way, as the half in the scheduler follows them: from their start to their end."""

from __future__ import annotations

from collections.abc import Mapping

from forebay.cache.account import Account
from forebay.cache.loads import Loads
from forebay.cache.parts import Parts
from forebay.cache.saves import Saves
from forebay.errors import ProtocolError
from forebay.transfer.messages import Completion, Outcome, Report
from forebay.vllm.scheduler.mailbox import Mailbox
from forebay.vllm.scheduler.pool import VllmDevicePool
from forebay.vllm.scheduler.records import Record


class Copies:
    """The transfers that `loads` and `saves` start, told to `mail`; `records` are the requests, by
    our id.
    """

    def __init__(
        self,
        parts: Parts,
        device: VllmDevicePool,
        mail: Mailbox,
        loads: Loads,
        saves: Saves,
        account: Account,
        records: Mapping[int, Record],
    ) -> None:
        self._flights = parts.flights
        self._device = device
        self._mail = mail
        self._loads = loads
        self._saves = saves
        self._account = account
        self._records = records
        self._moved_s = 0.0
        self.landed_s = 0.0
        """When the newest load landed, of those that have been heard of."""

    @property
    def under_way(self) -> bool:
        """Whether there are any."""
        return len(self._flights) > 0

    def gives_back_soon(self, now_s: float) -> bool:
        """Whether loads hold blocks that vLLM's pool has back soon."""
        if not self._flights.load_blocks or self._loads.link.stopped:
            return False
        return now_s - self._moved_s < self._loads.longest_s

    def name_loads(self, now_s: float) -> None:
        """vLLM finds what new loads bring by the hashes of a request that they are for."""
        loads = self._mail.take_new_loads()
        if loads:
            self._moved_s = now_s
        for transfer in loads:
            flight = self._flights.get(transfer)
            if flight is not None and flight.dependents:
                record = self._records[min(flight.dependents)]
                self._device.loads_for(record.request, flight.blocks)

    def reported(self, report: Report, now_s: float) -> None:
        """What the mover says."""
        self._mail.deliver(report)
        news = self._mail.poll()
        for transfer in news.issued:
            self._loads.issued(transfer, now_s)
        # Ancestors first: two lanes may have ended theirs in another order.
        for completion in sorted(news.completions, key=lambda each: each.id):
            self._ended(completion, now_s)

    def _ended(self, completion: Completion, now_s: float) -> None:
        flight = self._flights.get(completion.id)
        if flight is None:
            raise ProtocolError(f"transfer {completion.id} ended twice")
        if flight.is_load:
            self._moved_s = now_s
            self.landed_s = max(self.landed_s, completion.finished_s)
            self._loads.ended(completion, self._account.loaded(completion), now_s)
            return
        self._saves.ended(completion, now_s)
        self._account.saved(completion)
        if completion.outcome is Outcome.CANCELLED:
            self._saves.again(flight.blocks[completion.blocks_done :])
