"""Who runs in the next step, with a cache that answers as a test says."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from forebay.config import BatchSettings
from forebay.core.batch import Batch, Batcher
from forebay.core.requests import Growth, NotYet, Request, Ticket


def request(number: int) -> Request:
    return Request(
        id=number, namespace=b"", keys=b"", tokens=4, max_answer_tokens=1, arrival_s=float(number)
    )


def ticket(number: int) -> Ticket:
    return Ticket(request(number), 1, 0, {}, {}, set())


@dataclass
class Prompt:
    """Of four tokens, nothing of it computed."""

    request_id: int
    ticket: Ticket | None = None
    computed_tokens: int = 0
    known_tokens: int = 4
    answer_left: int = 1

    def renew(self) -> Request:
        return request(self.request_id)


@dataclass
class Answers:
    """A cache: `admits` by request, a ticket where it has none; who is in `full` cannot grow."""

    admits: dict[int, NotYet] = field(default_factory=dict[int, NotYet])
    full: set[int] = field(default_factory=set[int])
    line: list[int] = field(default_factory=list[int])
    asked: list[tuple[int, bool]] = field(default_factory=list[tuple[int, bool]])

    def waiting(self) -> list[Request]:
        return [request(number) for number in self.line]

    def admit(self, request: int, *, first: bool, alone: bool = False) -> Ticket | NotYet:
        self.asked.append((request, first))
        answer = None if alone else self.admits.get(request)
        return answer or ticket(request)

    def grow(self, ticket: Ticket, tokens: int) -> Growth:
        return Growth.FULL if ticket.request.id in self.full else Growth.GROWN

    def preempt(self, ticket: Ticket, request: Request) -> None:
        self.full.clear()

    def abort(self, request: int) -> None:
        self.line.remove(request)


class Round:
    """Rounds of the rules; of `running` requests all run, then `line` waits."""

    def __init__(self, running: int = 0, line: int = 0, step_tokens: int = 100, **admits: NotYet):
        self.cache = Answers({int(name[1:]): why for name, why in admits.items()})
        self.batcher = Batcher(BatchSettings(max_running=4, step_tokens=step_tokens), self.cache)
        for number in range(1, running + line + 1):
            prompt = Prompt(number)
            self.batcher.sequences[number] = prompt
            if number <= running:
                prompt.ticket = ticket(number)
                self.batcher.running.append(prompt)
            else:
                self.cache.line.append(number)

    def schedule(self) -> Batch:
        return self.batcher.schedule()


def ids(sequences: list) -> list[int]:
    return [each.request_id for each in sequences]


def test_who_lacks_room_is_overtaken_by_nobody():
    round_ = Round(line=3, r2=NotYet.FULL)
    batch = round_.schedule()
    assert ids(batch.admitted) == [1]
    assert batch.stepped_over == {2: NotYet.FULL}


@pytest.mark.parametrize("why", [NotYet.LOADING, NotYet.COMPUTING])
def test_who_lacks_only_a_load_is_stepped_over_and_who_comes_behind_is_not_the_first(why: NotYet):
    round_ = Round(line=3, r2=why)
    batch = round_.schedule()
    assert ids(batch.admitted) == [1, 3]
    assert batch.stepped_over == {2: why}
    assert round_.cache.asked == [(1, True), (2, True), (3, False)]


def test_who_can_never_run_is_forgotten_and_who_comes_behind_is_the_first():
    round_ = Round(line=2, r1=NotYet.NEVER)
    batch = round_.schedule()
    assert (ids(batch.failed), ids(batch.admitted)) == ([1], [2])
    assert round_.cache.asked == [(1, True), (2, True)]
    assert round_.cache.line == [2]


def test_where_one_cannot_grow_the_youngest_waits_again_and_nobody_starts():
    round_ = Round(running=3, line=1)
    round_.cache.full = {1}
    batch = round_.schedule()
    assert ids(batch.preempted) == [3]
    assert [work.sequence.request_id for work in batch.work] == [1, 2]
    assert round_.cache.asked == []


def test_where_nothing_else_can_run_the_first_that_lacks_a_load_starts_alone():
    round_ = Round(line=3, r1=NotYet.COMPUTING, r2=NotYet.LOADING, r3=NotYet.LOADING)
    batch = round_.schedule()
    assert ids(batch.admitted) == [2]
    assert set(batch.stepped_over) == {1, 3}
    assert round_.cache.asked[-1] == (2, False)


def test_no_more_start_than_there_are_run_slots_and_tokens():
    assert ids(Round(running=2, line=4).schedule().admitted) == [3, 4]
    batch = Round(line=4, step_tokens=6).schedule()
    assert [work.tokens for work in batch.work] == [4, 2]
    assert batch.tokens == 6
