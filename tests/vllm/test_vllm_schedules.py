"""Random lives of vLLM's real scheduler and block pool with our half: no token may be wrong."""

from __future__ import annotations

import random
import threading
import time

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

from vllm_toy import (
    BLOCK_BYTES,
    LANES,
    MakeEngine,
    ToyEngine,
    answers,
    assert_nothing_left,
    prompt_of,
    wrong_answers,
)
from vllm_toy_bytes import Watched
from vllm_toy_held import asked_again_behind_held_saves

from forebay.cache import saves
from forebay.core.ledger import MissReason, Source
from forebay.transfer.messages import Direction, Report
from forebay.vllm.messages import News
from forebay.vllm.scheduler.agreement import Agreement, Ranked
from forebay.vllm.scheduler.near import NearLoads
from forebay.vllm.worker import WorkerHalf


def test_what_left_the_device_comes_back_from_host_memory(toy: MakeEngine):
    engine = toy()
    first = engine.ask(prompt_of(1, 200), 8)
    engine.run()
    assert first.given == answers(first.prompt, 8)
    assert engine.scheduler.reset_prefix_cache()
    second = engine.ask(prompt_of(1, 200), 8)
    engine.run()
    assert second.given == first.given
    assert engine.half.stats().sources[Source.HOST] == 200 // 16
    assert_nothing_left(engine)


def test_a_queued_request_is_prefetched_and_hits_vllms_own_cache(toy: MakeEngine):
    engine = toy(most_running=1, blocks=60)
    engine.ask(prompt_of(1, 200), 4)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    engine.ask(prompt_of(2, 100), 60)
    waiting = engine.ask(prompt_of(1, 200), 4)
    while not waiting.request.num_computed_tokens:
        engine.step()
        time.sleep(1e-3)  # copies have threads of their own
    # It was looked up only when its turn came, and started at once with all that it could.
    assert engine.half.stats().prefetch_bytes["used"] == 12 * BLOCK_BYTES
    engine.run()
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


@pytest.mark.parametrize("rule", ["kept", "broken"])
def test_pitfall_08_a_save_ends_before_a_step_writes_what_it_reads(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, rule: str
):
    if rule == "broken":
        monkeypatch.setattr(WorkerHalf, "_settle", lambda self, saves: None)
    engine = toy(blocks=14, window_bytes=BLOCK_BYTES, min_load_tokens=0)
    again = asked_again_behind_held_saves(engine, engine.mover)
    assert engine.half.stats().sources[Source.HOST] > 0
    assert (again.given == answers(again.prompt, 4)) == (rule == "kept")


@pytest.mark.parametrize("ranks", [1, 2])  # a load that failed at one worker failed
def test_pitfall_18_what_a_failed_load_did_not_bring_is_computed(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, ranks: int
):
    monkeypatch.setattr(NearLoads, "approach", lambda *_: None)
    engine = toy(ranks=ranks, window_bytes=BLOCK_BYTES)
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    engine.mover.fail_window(Direction.LOAD, 5)
    again = engine.ask(prompt_of(1, 200), 8)
    engine.run()
    assert again.given == answers(again.prompt, 8)
    stats = engine.half.stats()
    assert (stats.failed_loads, stats.sources[Source.HOST]) == (1, 5)
    assert_nothing_left(engine)


def test_many_that_share_a_prefix_wait_for_one_load(toy: MakeEngine):
    engine = toy(blocks=120, most_running=12)
    engine.ask(prompt_of(1, 400), 1)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    for last in range(10):
        engine.ask([*prompt_of(1, 400), last], 4)
    engine.run()
    assert not wrong_answers(engine)
    assert engine.half.stats().loaded_bytes == 25 * BLOCK_BYTES
    assert_nothing_left(engine)


def test_a_request_may_leave_the_cache_alone(toy: MakeEngine):
    engine = toy()
    engine.ask(prompt_of(1, 200), 1, params={"forebay": {"no_save": True}})
    engine.run()
    assert engine.half.stats().saved_bytes == 0
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    engine.ask(prompt_of(1, 200), 1, params={"forebay": {"no_cache": True}})
    engine.run()
    assert engine.half.stats().loaded_bytes == 0
    assert not wrong_answers(engine)


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_random_lives(toy: MakeEngine, seed: int, lag: int):
    dice = random.Random(seed)
    engine = toy(lag=lag, **random_settings(dice))
    for _ in range(2):
        engine.mover.fail_window(dice.choice([Direction.LOAD, Direction.SAVE]), dice.randrange(60))
        live(engine, dice, steps=150)
    engine.run()
    assert not wrong_answers(engine)
    assert sum(asked.ended == "finished" for asked in engine.asked.values()) > 10
    assert_nothing_left(engine)


@pytest.mark.parametrize("seed", range(6))
def test_random_lives_of_workers_of_which_some_are_late(toy: MakeEngine, seed: int):
    dice = random.Random(1000 + seed)
    settings = random_settings(dice)
    late = dice.choice([0.0, 2e5, 1e6])
    engine = toy(
        ranks=dice.choice([2, 3]), lag=dice.choice([0, 2]), late_bytes_per_s=late, **settings
    )
    # At the last worker alone.
    engine.mover.fail_window(dice.choice([Direction.LOAD, Direction.SAVE]), dice.randrange(60))
    live(engine, dice, steps=150)
    engine.run()
    assert not wrong_answers(engine)
    assert sum(asked.ended == "finished" for asked in engine.asked.values()) > 5
    assert_nothing_left(engine)


def test_a_load_is_done_when_the_last_worker_has_its_part(toy: MakeEngine):
    """SGLang 30760 and 26921: workers that ask each other how far they are can wait for ever."""
    engine = toy(ranks=2)
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    for lane in LANES:
        engine.mover.hold_lane(Direction.LOAD, lane)
    again = engine.ask(prompt_of(1, 200), 8)
    for _ in range(20):
        engine.step()
    # The first worker has long had its part, and nothing is found yet.
    assert engine.half._flights.load_blocks
    assert not again.given
    for lane in LANES:
        engine.mover.release_lane(Direction.LOAD, lane)
    engine.run()
    assert again.given == answers(again.prompt, 8)
    assert engine.half.stats().sources[Source.HOST] == 200 // 16
    assert_nothing_left(engine)


def test_a_worker_that_is_believed_too_early_is_noticed(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch
):
    """The mutant: what the first worker says counts for all."""

    def first_alone(self: Agreement, told: tuple[Ranked, ...]) -> News:
        return next((news for rank, news in told if rank == 0), News(Report((), (), 0), 400))

    monkeypatch.setattr(Agreement, "hear", first_alone)
    engine = toy(ranks=2)
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    for lane in LANES:
        engine.mover.hold_lane(Direction.LOAD, lane)
    again = engine.ask(prompt_of(1, 200), 8)
    for _ in range(40):
        engine.step()
        time.sleep(1e-3)  # copies have threads of their own
    for lane in LANES:
        engine.mover.release_lane(Direction.LOAD, lane)
    assert wrong_answers(engine) or again.given != answers(again.prompt, 8)


def random_settings(dice: random.Random) -> dict[str, object]:
    return {
        "blocks": dice.choice([24, 30, 50]),
        # A window that fails takes all its blocks out of use.
        "window_bytes": BLOCK_BYTES,
        "most_running": dice.choice([1, 3, 6]),
        "step_tokens": dice.choice([32, 64, 200]),
        "policy": dice.choice(["fcfs", "priority"]),
        "host_bytes": dice.choice([20, 400, 400]) * BLOCK_BYTES,
        "copy_bytes_per_s": dice.choice([0.0, 0.0, 2e5, 2e6]),
        "mode": dice.choice(["b4", "b4", "b4", "b3"]),
        "min_load_tokens": dice.choice([0, 32]),
    }


def live(engine: ToyEngine, dice: random.Random, steps: int) -> None:
    """Arrivals, of which many repeat or go on with what was there, aborts and resets."""
    # A failed copy takes its block out of use, and here two may fail.
    most = (engine.pool.num_gpu_blocks - 4) * 16
    for _ in range(steps):
        if dice.random() < 0.25 and len(list(engine.open())) < 12:
            engine.ask(
                next_prompt(engine, dice, most),
                dice.randrange(1, 30),
                priority=dice.randrange(3),
                params=dice.choice([None] * 8 + [{"forebay": {"no_save": True}}]),
            )
        if dice.random() < 0.02:
            opened = list(engine.open())
            if opened:
                engine.abort(engine.asked[dice.choice(opened)])
        if dice.random() < 0.03:
            engine.try_to_reset()
        if dice.random() < 0.01:
            engine.scheduler.reset_connector_cache()
        engine.step()


def next_prompt(engine: ToyEngine, dice: random.Random, most: int) -> list[int]:
    before = [asked for asked in engine.asked.values() if asked.ended == "finished"]
    if before and dice.random() < 0.5:
        earlier = dice.choice(before)
        more = [dice.randrange(251) for _ in range(dice.randrange(1, 40))]
        prompt = earlier.prompt + earlier.given + more
    else:
        # One in two is of whole blocks.
        length = 16 * dice.randrange(1, 19) if dice.random() < 0.5 else dice.randrange(1, 300)
        prompt = prompt_of(dice.randrange(4), length)
    return prompt[: min(most, 400) - 40] or [1]


def test_a_load_on_an_idle_engine_begins_when_its_request_comes(toy: MakeEngine):
    engine = toy()
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    again = engine.ask(prompt_of(1, 200), 8)
    # No step was scheduled, and the mover brings it.
    while (news := engine.worker.worker_half.news()) is None or not news.report.completions:
        assert engine.mover.wait_news(5.0)
    assert engine.half._flights.load_blocks == 12
    engine.half._take(news)
    engine.step()
    assert again.request.num_computed_tokens == 200
    engine.run()
    assert again.given == answers(again.prompt, 8)
    assert_nothing_left(engine)


@pytest.mark.parametrize("rule", ["kept", "broken"])
def test_a_load_that_goes_at_once_waits_for_the_steps_that_use_its_block(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, rule: str
):
    """vLLM frees the blocks of a request that ends while steps under way still use them."""
    monkeypatch.setattr("forebay.vllm.connector.frees_idle", lambda config: rule == "broken")
    engine = toy(lag=2, blocks=20, most_running=1, reserve_share=0.0, prefetch_share=1.0)
    engine.scheduler.defer_block_free = False
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    runs = engine.ask(prompt_of(2, 200), 40)
    while len(runs.given) < 3:
        engine.step()
    engine.ask(prompt_of(1, 200), 4)
    # Its blocks are free, and steps that read and write them are yet to run.
    engine.abort(runs)
    engine.step()
    bound_s = 5.0 if rule == "broken" else 0.2
    while not engine.half.stats().loaded_bytes and engine.mover.wait_news(bound_s):
        engine.half.look()
    landed = engine.half.stats().loaded_bytes == 12 * BLOCK_BYTES
    assert landed == (rule == "broken")
    engine.run()
    assert (rule == "broken") or not wrong_answers(engine)


def test_a_block_that_is_forgotten_when_its_save_ends_is_in_no_slot(toy: MakeEngine):
    """vLLM took its slot, and has the same content in another one that is not in the books."""
    engine = toy(lag=1, step_tokens=512, window_bytes=BLOCK_BYTES)
    for lane in LANES:
        engine.mover.hold_lane(Direction.SAVE, lane)
    first = engine.ask(prompt_of(1, 192), 1)
    # It ends later, and leaves blocks behind those of the first one.
    no_save = {"forebay": {"no_save": True}}
    other = engine.ask(prompt_of(2, 96), 6, params=no_save)
    while not (first.ended and other.ended):
        engine.step()
    for _ in range(3):
        engine.step()
    release = threading.Timer(0.5, lambda: [engine.mover.release_lane(1, lane) for lane in LANES])
    release.start()
    free = [block.block_id for block in engine.pool.free_block_queue.get_all_free_blocks()]
    # All blocks up to the last one of the first.
    engine.ask(prompt_of(3, 16 * (free.index(first.table[-1]) + 1) - 3), 2)
    engine.step()
    engine.scheduler.reset_connector_cache()
    engine.ask(prompt_of(1, 192), 4, params=no_save)
    engine.run()
    release.join()
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


def test_what_vllm_hands_out_while_it_is_saved_is_waited_for(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch
):
    """It is not on the device any more, and in host memory in a moment."""
    # In a save of its own, all of which the lanes that are held take.
    monkeypatch.setattr(saves, "_TOGETHER_BYTES", 0)
    engine = toy(lag=1, blocks=20, step_tokens=512, window_bytes=BLOCK_BYTES, min_load_tokens=16)
    engine.ask([8], 1)
    engine.run()
    for lane in LANES:
        engine.mover.hold_lane(Direction.SAVE, lane)
    first = engine.ask(prompt_of(1, 35), 1)
    # It ends later, and leaves blocks behind those of the first one.
    other = engine.ask(prompt_of(2, 96), 6)
    while not (first.ended and other.ended):
        engine.step()
    save = engine.half._flights.get(min(engine.half._flights._flights))
    while not save.issued:  # or it is cancelled before a byte of it is copied
        assert engine.mover.wait_news(5.0)
        engine.half.look()
    release = threading.Timer(
        0.5, lambda: [engine.mover.release_lane(Direction.SAVE, lane) for lane in LANES]
    )
    release.start()
    free = [block.block_id for block in engine.pool.free_block_queue.get_all_free_blocks()]
    takes = engine.ask(prompt_of(3, 16 * (free.index(first.table[0]) + 1) - 3), 1)
    engine.step()
    again = engine.ask(prompt_of(1, 40), 4)
    engine.run()
    release.join()
    assert set(first.table[:2]) < set(takes.table)
    assert again.given == answers(again.prompt, 4)
    stats = engine.half.stats()
    assert stats.sources[Source.HOST] == 2
    assert stats.misses[MissReason.SHORT] == stats.misses[MissReason.LAST] == 0
    assert_nothing_left(engine)


@pytest.mark.parametrize("mode", ["b0", "b4"])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("filled", ["in whole", "begun"])
def test_nobody_finds_what_a_request_was_to_fill_that_is_preempted_out_of_its_step(
    toy: MakeEngine, filled: str, lag: int, mode: str
):
    """vLLM had named it by then. Behind steps that overlap later versions preempt nobody so."""
    engine = toy(blocks=18, step_tokens=80, policy="priority", mode=mode, lag=lag)
    watched = Watched(engine)
    tokens = 64 if filled == "in whole" else 60
    engine.scheduler.scheduler_config.long_prefill_token_threshold = tokens
    low = engine.ask(prompt_of(1, 250), 4, priority=5)
    engine.step()
    high = engine.ask(prompt_of(2, 15), 6, priority=0)
    for _ in range(200):
        engine.step()
        watched.check_books()
        if not engine._scheduled:
            watched.check_device()
    engine.run()
    assert low.ended == high.ended == "finished"
    assert engine.preempted > 0 or lag
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_nobody_finds_what_was_to_be_filled_where_a_save_goes_on(toy: MakeEngine, delay: int):
    """vLLM hands out a slot whose block is being saved, and preempts the one that has it now."""
    engine = toy(blocks=18, step_tokens=80, policy="priority", copy_bytes_per_s=3000.0)
    watched = Watched(engine)
    engine.scheduler.scheduler_config.long_prefill_token_threshold = 64
    engine.ask(prompt_of(9, 60), 2, priority=0)
    engine.step()
    engine.ask(prompt_of(1, 250), 4, priority=5)
    for _ in range(delay):
        engine.step()
    engine.ask(prompt_of(2, 15), 6, priority=0)
    for _ in range(40):
        engine.step()
        watched.check_device()
    engine.run()
    assert not wrong_answers(engine)
    assert_nothing_left(engine)
