"""The requests that vLLM has: who waits in the line, who runs, and under which name each is known.

vLLM knows them by its ids, the core by ours. A hint is known here for as long as it is open, which
may be longer than vLLM has the request that gave it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from forebay.core.waiting import WaitingLine
from forebay.vllm.adapter import Step, VllmRequest, awaits_outputs, over, runs
from forebay.vllm.scheduler.lately import Lately
from forebay.vllm.scheduler.records import Record, Turn
from forebay.vllm.scheduler.wishes import Wishes


class Roster:
    """Records of requests, whose blocks have `block_tokens`. Those that wait stand in `line`, in
    vLLM's order: `by_priority`, or as they came.
    """

    def __init__(
        self, block_tokens: int, line: WaitingLine, lately: Lately, *, by_priority: bool
    ) -> None:
        self._block_tokens = block_tokens
        self._line = line
        self._lately = lately
        self._by_priority = by_priority
        self._here: dict[str, Record] = {}
        self._by_id: dict[int, Record] = {}
        self._running: dict[int, Record] = {}
        self._leaving: list[VllmRequest] = []
        self._last_id = 0
        self._resets = 0
        self._guesses = False

    @property
    def namespace(self) -> bytes:
        """Whose blocks they find. vLLM's hashes tell models, adapters and salts apart."""
        return b"vllm%d" % self._resets

    @property
    def by_id(self) -> Mapping[int, Record]:
        """All that are known, by our id."""
        return self._by_id

    @property
    def running(self) -> Mapping[int, Record]:
        """Those that were scheduled and have not ended, by our id."""
        return self._running

    def in_steps(self) -> list[VllmRequest]:
        """Those that run, and those that were preempted and have outputs to come."""
        here = [*self._leaving, *(record.request for record in self._running.values())]
        return [each for each in here if runs(each) or _leaves(each)]

    def arrived(self, request: VllmRequest, now_s: float) -> Record:
        """vLLM has a request more. It does not stand in the line yet."""
        self._last_id += 1
        arrival_s = request.arrival_time if self._by_priority else now_s
        record = Record(self._last_id, request, arrival_s, Wishes.of(request))
        self._here[request.request_id] = self._by_id[record.id] = record
        return record

    def find(self, request: VllmRequest) -> Record | None:
        """The record of `request`, while vLLM has it."""
        return self._here.get(request.request_id)

    def wait(self, record: Record) -> None:
        """Put it in the line."""
        request = record.request
        if len(request.block_hashes) != request.num_tokens // self._block_tokens:
            return  # not one hash for each block: nothing of it can be named
        if record.id in self._line:
            return  # a hint that was preempted stands there still
        priority = request.priority if self._by_priority else 0
        self._lately.came(self._line.add(record.waiting(self.namespace, priority)).blocks)

    def preempted(self, step: Step) -> list[Record]:
        """Those that `step` preempts. A reset of vLLM's cache preempts requests that may go on in
        the very same step: not those.
        """
        if not step.preempted:
            return []
        names = step.preempted.difference(part.request for part in step.scheduled)
        return [self._here[name] for name in names if name in self._here]

    def follow(self, step: Step, preempted: Sequence[Record]) -> list[tuple[Record, int]]:
        """Take note of who runs and waits now, behind a step by which these are `preempted`.
        Returns those of which `step` fills blocks, and how many of its tokens each has computed
        then.
        """
        if preempted:
            left = [record.request for record in preempted]
            self._leaving = [each for each in self._leaving + left if _leaves(each)]
        for record in preempted:
            if self._running.pop(record.id, None) is not None:
                record.waits_again()
                self.wait(record)
        self._guesses = guesses = self._guesses or bool(step.drafts)
        filled: list[tuple[Record, int]] = []
        for part in step.scheduled:
            record = self._here.get(part.request)
            if record is None:
                continue
            if part.blocks or part.whole:
                record.scheduled(part)
                self._running[record.id] = record
            end = part.start + part.tokens
            # Guesses, and what comes of them, are behind what is known.
            record.computed = min(end, record.request.num_tokens) if guesses else end
            if end >= (record.named + 1) * self._block_tokens:
                filled.append((record, end))
        return filled

    def ended(self, request: VllmRequest) -> tuple[Record | None, bool]:
        """vLLM has `request` no more. Returns its record, if it had one, and whether it ran."""
        record = self._here.pop(request.request_id, None)
        if record is None:
            return None, False
        ran = self._running.pop(record.id, None) is not None
        self._forget_if_over(record)
        return record, ran

    def hint_over(self, record: Record) -> None:
        """It is a hint no more, and goes on like any other request, where vLLM has it still."""
        record.hint = None
        self._forget_if_over(record)

    def start_anew(self, waiting: Iterable[Record]) -> None:
        """Nobody finds what was computed so far any more. `waiting` stood in the line, and do so
        again.
        """
        self._resets += 1
        for record in waiting:
            self.wait(record)
            record.turn = Turn.NOT_ASKED
        for record in self._here.values():
            record.named, record.session = 0, None

    def _forget_if_over(self, record: Record) -> None:
        if record.hint is None and record.request.request_id not in self._here:
            del self._by_id[record.id]


def _leaves(request: VllmRequest) -> bool:
    """Whether it was preempted, and outputs of steps that it was in may end it yet."""
    return awaits_outputs(request) and not runs(request) and not over(request)
