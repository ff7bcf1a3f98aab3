"""Pipeline parallelism: each stage has other layers of a block, and several steps are under way."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

from test_vllm_schedules import live, random_settings
from vllm.lora.request import LoRARequest
from vllm_toy import (
    LANES,
    answers,
    assert_nothing_left,
    prompt_of,
    wrong_answers,
)
from vllm_toy_bytes import Watched
from vllm_toy_config import BLOCK_BYTES, BLOCK_TOKENS
from vllm_toy_held import asked_again_behind_held_saves
from vllm_toy_stages import StagedEngine

from forebay.core.ledger import Source
from forebay.core.requests import Waiting
from forebay.transfer.messages import Direction, Report
from forebay.vllm.messages import News
from forebay.vllm.scheduler.agreement import Agreement, Ranked
from forebay.vllm.scheduler.records import Record
from forebay.vllm.scheduler.roster import Roster
from forebay.vllm.scheduler.turns import Turns
from forebay.vllm.worker import WorkerHalf

BLOCK = 1
"""Windows of so many bytes are one block."""

MakeStaged = Callable[..., StagedEngine]


@pytest.fixture
def staged(tiny_llama: Path) -> Iterator[MakeStaged]:
    """Makes engines of stages, and closes them."""
    engines: list[StagedEngine] = []

    def make(**options: Any) -> StagedEngine:
        engines.append(StagedEngine(tiny_llama, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", range(8))
def test_random_lives_of_stages(staged: MakeStaged, seed: int, lag: int):
    """Two of unequal length or three: each is at another step, and some are late."""
    dice = random.Random(2000 + seed)
    settings = random_settings(dice)
    late = dice.choice([0.0, 2e5, 1e6])
    engine = staged(
        stages=dice.choice([2, 3]), seed=seed, lag=lag, late_bytes_per_s=late, **settings
    )
    watched = Watched(engine)
    one = dice.choice(engine.workers).worker_half._mover.core
    one.fail_window(dice.choice([Direction.LOAD, Direction.SAVE]), dice.randrange(60))
    for _ in range(5):
        live(engine, dice, steps=30)
        watched.check_books()
    engine.run()
    watched.check_device()
    watched.check_host()
    assert not wrong_answers(engine)
    assert sum(asked.ended == "finished" for asked in engine.asked.values()) > 5
    assert_nothing_left(engine)


@pytest.mark.parametrize("late", [0, 1])
def test_a_load_is_found_when_the_last_stage_has_its_layers(staged: MakeStaged, late: int):
    engine = staged()
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    core = engine.workers[late].worker_half._mover.core
    for lane in LANES:
        core.hold_lane(Direction.LOAD, lane)
    again = engine.ask(prompt_of(1, 200), 8)
    for _ in range(40):
        engine.step()
    # The other stage has long had its layers, and nothing is found yet.
    assert engine.half._flights.load_blocks
    assert not again.given
    for lane in LANES:
        core.release_lane(Direction.LOAD, lane)
    engine.run()
    assert not wrong_answers(engine)
    stats = engine.half.stats()
    assert stats.sources[Source.HOST] == 200 // BLOCK_TOKENS
    # Of all three layers.
    assert stats.loaded_bytes == 200 // BLOCK_TOKENS * 3 * BLOCK_BYTES
    assert_nothing_left(engine)


@pytest.mark.parametrize("late", [0, 1])
def test_a_stage_that_is_believed_too_early_is_noticed(
    staged: MakeStaged, monkeypatch: pytest.MonkeyPatch, late: int
):
    """The mutant: what the other stage says counts for all."""

    def other_alone(self: Agreement, told: tuple[Ranked, ...]) -> News:
        nothing = News(Report((), (), 0), 400)
        return next((news for rank, news in told if rank != late), nothing)

    monkeypatch.setattr(Agreement, "hear", other_alone)
    engine = staged()
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    core = engine.workers[late].worker_half._mover.core
    for lane in LANES:
        core.hold_lane(Direction.LOAD, lane)
    again = engine.ask(prompt_of(1, 200), 8)
    while not again.ended:
        engine.step()
    for lane in LANES:
        core.release_lane(Direction.LOAD, lane)
    assert wrong_answers(engine)


@pytest.mark.parametrize("rule", ["kept", "broken"])
@pytest.mark.parametrize("late", [0, 1])
def test_a_save_ends_before_its_stage_writes_what_it_reads(
    staged: MakeStaged, monkeypatch: pytest.MonkeyPatch, late: int, rule: str
):
    """Each stage has to see to it by itself: it is at a step of its own."""
    if rule == "broken":
        monkeypatch.setattr(WorkerHalf, "_settle", lambda self, saves: None)
    engine = staged(blocks=14, window_bytes=BLOCK, min_load_tokens=0)
    core = engine.workers[late].worker_half._mover.core
    again = asked_again_behind_held_saves(engine, core)
    assert engine.half.stats().sources[Source.HOST] > 0
    assert (again.given == answers(again.prompt, 4)) == (rule == "kept")


@pytest.mark.parametrize(("stages", "lag"), [(3, 0), (2, 1)])
def test_a_request_whose_outputs_are_under_way_is_not_put_off(
    staged: MakeStaged, monkeypatch: pytest.MonkeyPatch, stages: int, lag: int
):
    """With three steps under way vLLM 0.26 asks about one that was preempted before its last output
    came, and dies where that ends it among those put off.
    """
    asks_again = Turns._asks_again
    put_off: list[int] = []

    def often(self: Turns, record: Record, entry: Waiting, now_s: float) -> bool:
        if record.request.status.name == "PREEMPTED" and put_off.count(record.id) < 3:
            put_off.append(record.id)
            return True
        return asks_again(self, record, entry, now_s)

    monkeypatch.setattr(Turns, "_asks_again", often)
    engine = staged(stages=stages, lag=lag, blocks=13, most_running=6, host_bytes=400 * BLOCK_BYTES)
    asked, early = engine.half.asked, list[int | None]()

    def watched(request: Any, local_tokens: int) -> int | None:
        answer = asked(request, local_tokens)
        if request.num_in_flight_tokens:
            early.append(answer)
        return answer

    engine.half.asked = watched
    dice = random.Random(1)
    for number in range(150):
        engine.ask(prompt_of(number, dice.randrange(28, 34)), dice.randrange(1, 8))
    engine.run()
    assert not wrong_answers(engine)
    assert engine.preempted > 2
    assert put_off
    # Later versions wait for outputs before they ask.
    waits_itself = hasattr(next(iter(engine.asked.values())).request, "num_stale_output_tokens")
    assert bool(early) != waits_itself
    assert None not in early
    assert_nothing_left(engine)


def test_what_starts_again_before_its_outputs_came_is_not_saved(staged: MakeStaged):
    engine = staged()
    admitted = engine.half.admitted

    def early(request: Any, block: int | None) -> None:
        request.num_in_flight_tokens += 1
        admitted(request, block)
        request.num_in_flight_tokens -= 1

    engine.half.admitted = early
    engine.ask(prompt_of(1, 200), 8)
    engine.run()
    assert not wrong_answers(engine)
    assert engine.half.stats().saved_bytes == 0
    assert_nothing_left(engine)


@pytest.mark.parametrize("rule", ["kept", "broken", "vLLM's own"])
def test_the_lora_of_a_request_whose_outputs_are_under_way_stays_taken(
    staged: MakeStaged, monkeypatch: pytest.MonkeyPatch, rule: str
):
    """Or one for another LoRA starts, and the first has to wait for that: where its outputs end it
    meanwhile vLLM 0.26 dies of it, by itself too.
    """
    if rule == "broken":
        monkeypatch.setattr(
            Roster, "in_steps", lambda self: [each.request for each in self.running.values()]
        )
    engine = staged(stages=3, loras=True)
    if rule == "vLLM's own":
        engine.half.asked = lambda request, local_tokens: 0
    # Its second block is wanted when its first token is known, by the fourth step.
    grows = engine.ask(prompt_of(1, 16), 20)
    engine.step()
    engine.step()
    first, second = (LoRARequest(name, number, "there") for number, name in enumerate("ab", 1))
    ends = engine.ask(prompt_of(2, 16), 1, lora_request=first)
    other = engine.ask(prompt_of(3, 16), 20, lora_request=second)
    engine.step()
    taken = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())
    engine.step()
    # Later versions wait for outputs before they ask, and for blocks before they preempt.
    waits_itself = hasattr(ends.request, "num_stale_output_tokens")
    assert (ends.request.status.name == "PREEMPTED") != waits_itself
    assert ends.request.num_in_flight_tokens
    engine.pool.free_blocks(taken)
    if rule != "kept" and not waits_itself:
        with pytest.raises(RuntimeError, match="Invalid request status"):
            engine.run()
        return
    engine.run()
    assert [each.ended for each in (grows, ends, other)] == ["finished"] * 3
    assert not wrong_answers(engine)
    assert_nothing_left(engine)
