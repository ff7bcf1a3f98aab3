"""vLLM's look-ups in its own cache: none for a request that is to be asked about again anyway.

At each step vLLM looks every request up, block by block, that it could start, and asks about it
then. While one waits for loads of many blocks, that is most of what such a step costs. So between
two steps it is marked as one that must not read the cache; the mark is off when vLLM is answered.
"""

from __future__ import annotations

from collections.abc import Callable

from forebay.vllm.scheduler.records import Record


class Lookups:
    """Marks requests that were put off, and takes the marks off."""

    def __init__(self) -> None:
        self._put_off: list[Record] = []
        self._spared: dict[int, Record] = {}
        self._held: list[Record] = []

    def asked(self, record: Record) -> bool:
        """vLLM asks about it. Returns whether it was looked up before."""
        if self._spared.pop(record.id, None) is None:
            return True
        record.request.skip_reading_prefix_cache = False
        return False

    def put_off(self, record: Record) -> None:
        """vLLM is told to ask again about it."""
        self._put_off.append(record)

    def hold(self, record: Record) -> None:
        """vLLM is told to ask again about one, and nothing else is to change for it. From 0.32 on
        it does not heed that of one that must not read the cache.
        """
        if record.request.skip_reading_prefix_cache:
            record.request.skip_reading_prefix_cache = False
            self._held.append(record)

    def step_over(self) -> None:
        """vLLM has scheduled: who was put off is not looked up at the next step."""
        for record in self._held:
            record.request.skip_reading_prefix_cache = True
        self._held.clear()
        for record in self._put_off:
            record.request.skip_reading_prefix_cache = True
            self._spared[record.id] = record
        self._put_off.clear()

    def look_again(self, ready: Callable[[Record], bool]) -> None:
        """Those that are `ready` are looked up at the next step."""
        for record in [each for each in self._spared.values() if ready(each)]:
            self.asked(record)

    def over(self, record: Record) -> None:
        """The request is gone, or starts anew."""
        self.asked(record)
        self._put_off = [each for each in self._put_off if each is not record]
