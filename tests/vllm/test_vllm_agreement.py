"""What several workers say, as the news of one. Needs no vLLM."""

from __future__ import annotations

import random

import pytest

from forebay.errors import ProtocolError
from forebay.transfer.messages import Completion, Outcome, Report
from forebay.vllm.messages import News
from forebay.vllm.scheduler.agreement import Agreement


def ended(
    id_: int, outcome: Outcome = Outcome.DONE, done: int = 8, touched: int = 8, **more: object
) -> Completion:
    values = {"bytes": 64, "started_s": 1.0, "finished_s": 2.0, "error": "", **more}
    return Completion(id_, outcome, done, touched, **values)  # pyright: ignore[reportArgumentType]


def news(*completions: Completion, issued: tuple[int, ...] = (), step: int = 0) -> News:
    return News(Report(issued, completions, step), host_slots=100)


def test_a_transfer_ends_when_it_has_ended_everywhere():
    agreement = Agreement(3)
    assert not agreement.hear([(0, news(ended(7))), (2, news(ended(7)))]).report.completions
    assert not agreement.hear([]).report.completions
    late = agreement.hear([(1, news(ended(7, finished_s=9.0)))]).report.completions
    assert [(each.id, each.outcome, each.finished_s) for each in late] == [(7, Outcome.DONE, 9.0)]


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_each_worker_has_a_clock_of_its_own(ranks: tuple[int, int]):
    """On several machines they differ by days: a transfer took as long as it did at the slowest."""
    times = {0: (5.0, 6.0), 1: (9e5, 9e5 + 3.0)}
    each = ((rank, *times[rank]) for rank in ranks)
    told = [
        (rank, news(ended(1, started_s=started_s, finished_s=finished_s)))
        for rank, started_s, finished_s in each
    ]
    (end,) = Agreement(2).hear(told).report.completions
    assert (end.started_s, end.finished_s) == (5.0, 8.0)


def test_a_transfer_is_issued_when_the_last_one_has_issued_it():
    agreement = Agreement(2)
    assert agreement.hear([(0, news(issued=(1, 2))), (1, news(issued=(2,)))]).report.issued == (2,)
    assert agreement.hear([(1, news(issued=(1,)))]).report.issued == (1,)


@pytest.mark.parametrize(
    ("here", "there", "outcome"),
    [
        (Outcome.DONE, Outcome.FAILED, Outcome.FAILED),
        (Outcome.CANCELLED, Outcome.FAILED, Outcome.FAILED),
        (Outcome.DONE, Outcome.CANCELLED, Outcome.CANCELLED),
    ],
)
def test_what_went_wrong_anywhere_went_wrong(here: Outcome, there: Outcome, outcome: Outcome):
    said = "lost" if there is Outcome.FAILED else ""
    agreement = Agreement(2)
    told = agreement.hear([(0, news(ended(1, here))), (1, news(ended(1, there, 3, 4, error=said)))])
    (end,) = told.report.completions
    assert (end.outcome, end.blocks_done, end.blocks_touched) == (outcome, 3, 4)
    assert end.error == ("rank 1: lost" if said else "")


def test_only_blocks_of_which_a_copy_may_still_run_stay_out_of_use():
    """One rank ended early and cleanly: what the other did beyond that is over."""
    told = Agreement(2).hear(
        [(0, news(ended(1, done=8))), (1, news(ended(1, Outcome.CANCELLED, done=2, touched=2)))]
    )
    (end,) = told.report.completions
    assert (end.blocks_done, end.torn_from, end.blocks_touched) == (2, 2, 2)


def test_blocks_are_torn_from_the_first_that_is_torn_anywhere():
    told = Agreement(2).hear(
        [
            (0, news(ended(1, Outcome.FAILED, 2, 5, torn_from=4))),
            (1, news(ended(1, Outcome.FAILED, 1, 4, torn_from=3))),
        ]
    )
    (end,) = told.report.completions
    assert (end.blocks_done, end.torn_from, end.blocks_touched) == (1, 3, 5)


def test_steps_and_host_slots_are_those_of_the_last():
    agreement = Agreement(2)
    assert agreement.hear([(0, news(step=5))]).host_slots == 0
    told = agreement.hear([(1, News(Report((), (), 3), 40))])
    assert (told.report.completed_step, told.host_slots) == (3, 40)


@pytest.mark.parametrize(("moved", "together"), [((64, 96), 160), ((64, 0), 0)])
def test_bytes_are_those_of_all_where_none_stands_still(moved: tuple[int, int], together: int):
    """A link that moved none is not one that moves again."""
    told = [(rank, news(ended(1, bytes=own))) for rank, own in enumerate(moved)]
    (end,) = Agreement(2).hear(told).report.completions
    assert end.bytes == together


@pytest.mark.parametrize(
    "told",
    [
        [(2, news())],
        [(0, news(ended(1))), (0, news(ended(1)))],
        [(0, news(issued=(1,))), (0, news(issued=(1,)))],
    ],
)
def test_what_cannot_be_is_an_error(told: list[tuple[int, News]]):
    with pytest.raises(ProtocolError):
        Agreement(2).hear(told)


def test_nothing_is_kept_of_what_is_over():
    """In any order of ranks and steps, each transfer ends once, and nothing is left of it."""
    dice = random.Random(3)
    agreement, ranks = Agreement(4), range(4)
    left = {rank: list(range(200)) for rank in ranks}
    said: list[int] = []
    while any(left.values()):
        told = []
        for rank in ranks:
            now = [left[rank].pop(0) for _ in range(min(len(left[rank]), dice.randrange(3)))]
            # A transfer that failed before it was issued is never said to be.
            issued = tuple(id_ for id_ in now if dice.random() < 0.7)
            told.append((rank, news(*(ended(id_) for id_ in now), issued=issued)))
        dice.shuffle(told)
        said += [each.id for each in agreement.hear(told).report.completions]
    assert sorted(said) == list(range(200))
    assert not agreement._ended
    assert not agreement._issued
