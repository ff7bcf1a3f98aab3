"""The verdict: equal, nearly tied, wrong, or nothing shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from forebay.cache import CacheStats
from forebay.core.ledger import MissReason, PrefetchOutcome, Source
from forebay.core.modes import Mode
from forebay.demo.client import Answer
from forebay.demo.report import judge, table, write_timelines
from forebay.demo.run import ModeResult
from forebay.demo.workload import Turn
from forebay.timeline.record import Timeline

FIRST = Turn(0, 0)


def answer(*tokens: int, gaps: tuple[float, ...] | None = None) -> Answer:
    sources = {Source.DEVICE: 32, Source.HOST: 64, Source.RECOMPUTED: 5}
    texts = tuple(f"<{token}>" for token in tokens)
    return Answer("".join(texts), texts, gaps or (0.5,) * len(tokens), 1.25, sources)


def result(mode: Mode, *answers: Answer, used: int = 100, stall_s: float = 0.5) -> ModeResult:
    outcomes = {outcome.value: 0 for outcome in PrefetchOutcome}
    stats = CacheStats(
        sources=dict.fromkeys(Source, 0),
        misses=dict.fromkeys(MissReason, 0),
        prefetch_bytes=outcomes | {"used": used},
        prefetch_open_bytes=0,
        loaded_bytes=7_000_000,
        saved_bytes=9_000_000,
        save_s=0.0,
        load_s=2.0,
        evicted_blocks=0,
        dropped_dirty_blocks=0,
        quarantined_blocks=0,
        given_up_blocks=0,
        failed_loads=0,
        failed_saves=0,
        layered_starts=0,
        layered_hidden_s=0.0,
        link_stops=0,
        link_stopped=False,
    )
    turns = {Turn(0, number): each for number, each in enumerate(answers)}
    return ModeResult(mode, "ready", turns, stats, stall_s, 10.0, Timeline())


def lines(*results: ModeResult) -> str:
    return "\n".join(judge(results).lines())


def test_equal_answers_pass():
    results = [result(mode, answer(1, 2), answer(3)) for mode in (Mode.RECOMPUTE, Mode.LOOK_AHEAD)]
    assert judge(results).exit_status == 0
    assert "all 2 modes gave the same 2 answers" in lines(*results)


def test_a_near_tie_passes_and_is_named():
    left = result(Mode.RECOMPUTE, answer(1, 2, 3, gaps=(0.5, 0.0004, 0.5)))
    right = result(Mode.LOOK_AHEAD, answer(1, 9, 8, gaps=(0.5, 0.0002, 0.5)))
    verdict = judge([left, right])
    assert verdict.exit_status == 0
    assert [(each.position, each.gap) for each in verdict.near_ties] == [(1, 0.0004)]
    said = lines(left, right)
    assert "but for 1 near-tie" in said
    assert "user 1, turn 1, token 2: b4 chose '<9>' instead of '<2>' (gap 0.0004)" in said


@pytest.mark.parametrize("gaps", [(0.2, 0.2), (0.0004, 0.2), (0.2, 0.0004), (0.001, 0.001)])
def test_any_other_difference_fails(gaps):
    left = result(Mode.RECOMPUTE, answer(1, 2, gaps=(0.5, gaps[0])))
    right = result(Mode.SYNCHRONOUS, answer(1, 9, gaps=(0.5, gaps[1])))
    assert judge([left, right]).exit_status == 1
    assert "DIFFERENT ANSWERS: 1" in lines(left, right)
    assert "error: user 1, turn 1, token 2" in lines(left, right)


def test_what_follows_a_near_tie_is_not_compared():
    left = result(Mode.RECOMPUTE, answer(1, 2, 3, gaps=(1e-5, 0.5, 0.5)))
    right = result(Mode.SYNCHRONOUS, answer(4, 5, 6, gaps=(1e-5, 0.5, 0.5)))
    verdict = judge([left, right])
    assert len(verdict.near_ties) == 1
    assert verdict.exit_status == 0


def test_an_answer_of_another_length_fails():
    left, right = result(Mode.RECOMPUTE, answer(1, 2)), result(Mode.SYNCHRONOUS, answer(1))
    assert judge([left, right]).exit_status == 1
    assert "user 1, turn 1: b1 said '<1>' instead of '<1><2>'" in lines(left, right)


def test_an_answer_of_the_same_tokens_and_another_text_fails():
    left = result(Mode.RECOMPUTE, answer(1, 2))
    other = replace(answer(1, 2), text="half a character")
    assert judge([left, result(Mode.SYNCHRONOUS, other)]).exit_status == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"used": 0}, "used no prefetched bytes"), ({"stall_s": 2.0}, "hid nothing")],
)
def test_look_ahead_that_does_nothing_fails(changes: dict[str, Any], said: str):
    reference = result(Mode.RECOMPUTE, answer(1))
    ahead = result(Mode.LOOK_AHEAD, answer(1), **changes)
    assert judge([reference, ahead]).exit_status == 1
    assert said in lines(reference, ahead)


def test_the_other_modes_need_not_hide_anything():
    assert judge([result(Mode.SYNCHRONOUS, answer(1), used=0, stall_s=3.0)]).exit_status == 0


def test_the_table_has_a_column_for_each_mode():
    recompute = result(Mode.RECOMPUTE, answer(1))
    recompute = replace(recompute, stats=replace(recompute.stats, load_s=0.0))
    console = Console(width=120, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(table([recompute, result(Mode.LOOK_AHEAD, answer(1))]))
    shown = captured.get()
    for words in ("b0", "look-ahead", "1.25", "32", "64", "75%", "10.0"):
        assert words in shown


def test_a_mode_without_loads_has_no_picture(tmp_path):
    quiet = result(Mode.RECOMPUTE, answer(1))
    quiet = replace(quiet, stats=replace(quiet.stats, loaded_bytes=0))
    assert write_timelines([quiet], tmp_path, 1.0) == []
    assert list(tmp_path.iterdir()) == []
