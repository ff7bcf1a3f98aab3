"""The batching rules: who runs in the next step, and how many of its tokens.

Running requests go first, oldest first: a decode takes one token, an unfinished prompt as many as
the budget leaves (chunked prefill, mixed with decodes). Then waiting requests start, in order,
while run slots and budget last. One that lacks only its load or another's prefill is stepped over
and costs neither, unless nothing else can run: then the first of them may start by layer. One that
lacks room ends the round, so that nobody overtakes it in the pool.
When a running request cannot grow, the youngest gives up its slots and waits again.

Pure, so that a replay batches exactly as an engine does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from forebay.config import BatchSettings
from forebay.core.planner import Running
from forebay.core.rates import Rates
from forebay.core.requests import Growth, NotYet, Request, Ticket


class Sequence(Protocol):
    """A request as the batching rules see it: of `known_tokens`, `computed_tokens` have their
    KV.
    """

    ticket: Ticket | None
    computed_tokens: int

    @property
    def request_id(self) -> int:
        """The id under which the cache knows it."""
        ...

    @property
    def known_tokens(self) -> int:
        """Prompt and generated tokens."""
        ...

    @property
    def answer_left(self) -> int:
        """Tokens that it may still generate."""
        ...

    def renew(self) -> Request:
        """The request with all tokens known by now, to wait again after a preemption."""
        ...


class Admission(Protocol):
    """What batching asks of a cache."""

    def waiting(self) -> list[Request]:
        """Waiting requests in order."""
        ...

    def admit(self, request: int, *, first: bool, alone: bool = False) -> Ticket | NotYet:
        """A ticket, or why not yet; `alone`: nothing else can run."""
        ...

    def grow(self, ticket: Ticket, tokens: int) -> Growth:
        """Slots for `tokens` tokens in all."""
        ...

    def preempt(self, ticket: Ticket, request: Request) -> None:
        """Give up its slots and let it wait again."""
        ...

    def abort(self, request: int) -> None:
        """Forget the request."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """Compute `tokens` tokens of `sequence`, from its token `start` on."""

    sequence: Sequence
    start: int
    tokens: int


@dataclass(slots=True)
class Batch:
    """One step: the work in it, who started with it, and who could not go on.

    `failed` can never run any more and is forgotten: the pool lost too many slots.
    """

    work: list[Work] = field(default_factory=list[Work])
    admitted: list[Sequence] = field(default_factory=list[Sequence])
    preempted: list[Sequence] = field(default_factory=list[Sequence])
    failed: list[Sequence] = field(default_factory=list[Sequence])
    stepped_over: dict[int, NotYet] = field(default_factory=dict[int, NotYet])

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(work.tokens for work in self.work)


class Batcher:
    """Chooses the next batch. `sequences` by request id: the caller adds before it enqueues."""

    def __init__(self, settings: BatchSettings, cache: Admission) -> None:
        self._settings = settings
        self._cache = cache
        self.sequences: dict[int, Sequence] = {}
        self.running: list[Sequence] = []
        self.stepped_over: dict[int, NotYet] = {}
        """Who could not start in the last round, and why."""

    @property
    def free_run_slots(self) -> int:
        """Requests that could start now by their number."""
        return self._settings.max_running - len(self.running)

    def schedule(self) -> Batch:
        """Choose the next step's work, growing, admitting and preempting on the way."""
        batch = Batch()
        self.stepped_over = batch.stepped_over
        budget = self._running_work(batch)
        if not batch.preempted:
            self._start_waiting(batch, budget)
            if not batch.work:
                self._start_alone(batch, budget)
        return batch

    def remove(self, sequence: Sequence) -> None:
        """The sequence ended or was aborted."""
        self.sequences.pop(sequence.request_id, None)
        if sequence in self.running:
            self.running.remove(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Let a running sequence wait again; its KV is found or computed anew."""
        self.running.remove(sequence)
        ticket = sequence.ticket
        sequence.ticket, sequence.computed_tokens = None, 0
        if ticket is not None:
            self._cache.preempt(ticket, sequence.renew())

    def outlook(self, rates: Rates) -> list[Running]:
        """The running requests as the planner sees them."""
        average = rates.answer_tokens.value
        return [
            Running(
                prefill_tokens=max(0, sequence.known_tokens - sequence.computed_tokens - 1),
                answer_tokens=min(sequence.answer_left, max(1, int(average))),
            )
            for sequence in self.running
        ]

    def _running_work(self, batch: Batch) -> int:
        budget = self._settings.step_tokens
        for sequence in list(self.running):
            if budget <= 0:
                break
            # An earlier one may have taken this one's slots in the same round.
            if sequence.ticket is None:
                continue
            tokens = min(sequence.known_tokens - sequence.computed_tokens, budget)
            if tokens > 0 and self._grow(sequence, tokens, batch):
                batch.work.append(Work(sequence, sequence.computed_tokens, tokens))
                budget -= tokens
        return budget

    def _grow(self, sequence: Sequence, tokens: int, batch: Batch) -> bool:
        """Slots for `tokens` more, taken from younger sequences if need be."""
        while sequence.ticket is not None:
            growth = self._cache.grow(sequence.ticket, sequence.computed_tokens + tokens)
            if growth is not Growth.FULL:
                return growth is Growth.GROWN
            victim = self.running[-1]
            self.preempt(victim)
            batch.preempted.append(victim)
        return False

    def _start_waiting(self, batch: Batch, budget: int) -> None:
        first = True
        for request in self._cache.waiting():
            if budget <= 0 or self.free_run_slots <= 0:
                return
            answer = self._cache.admit(request.id, first=first)
            if answer is NotYet.NEVER:
                self._fail(self.sequences[request.id], batch)
                continue
            if isinstance(answer, NotYet):
                batch.stepped_over[request.id] = answer
                if answer is NotYet.FULL:
                    return
                first = False
                continue
            budget -= self._start(self.sequences[request.id], answer, budget, batch)

    def _start_alone(self, batch: Batch, budget: int) -> None:
        """Nothing can run: the first that lacks only its load may start before that has come."""
        reasons = batch.stepped_over.values()
        if NotYet.LOADING not in reasons:
            return
        place = list(reasons).index(NotYet.LOADING)
        request = list(batch.stepped_over)[place]
        answer = self._cache.admit(request, first=place == 0, alone=True)
        if isinstance(answer, Ticket):
            del batch.stepped_over[request]
            self._start(self.sequences[request], answer, budget, batch)

    def _fail(self, sequence: Sequence, batch: Batch) -> None:
        self._cache.abort(sequence.request_id)
        self.remove(sequence)
        batch.failed.append(sequence)

    def _start(self, sequence: Sequence, ticket: Ticket, budget: int, batch: Batch) -> int:
        sequence.ticket, sequence.computed_tokens = ticket, ticket.cached_tokens
        self.running.append(sequence)
        batch.admitted.append(sequence)
        tokens = min(sequence.known_tokens - sequence.computed_tokens, budget)
        if self._cache.grow(ticket, sequence.computed_tokens + tokens) is not Growth.GROWN:
            return 0
        batch.work.append(Work(sequence, sequence.computed_tokens, tokens))
        return tokens
