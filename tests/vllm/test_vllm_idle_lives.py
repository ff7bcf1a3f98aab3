"""Random lives of engines that are idle at times, so that loads are near, over a faulty link.

After each step the books are vLLM's, and every block has the right bytes in both tiers.
"""

from __future__ import annotations

import random
import threading

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

from vllm_toy import (
    BLOCK_BYTES,
    LANES,
    MakeEngine,
    ToyEngine,
    assert_nothing_left,
    prompt_of,
    wrong_answers,
)
from vllm_toy_bytes import Watched

from forebay.cache import saves
from forebay.core.ledger import PrefetchOutcome, Source
from forebay.core.modes import Mode
from forebay.transfer.messages import Direction
from forebay.vllm import worker
from forebay.vllm.scheduler import half
from forebay.vllm.worker import WorkerHalf


@pytest.mark.parametrize("seed", range(16))
def test_random_lives_of_an_engine_that_is_idle_at_times(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, seed: int
):
    monkeypatch.setattr(worker, "_AWAIT_S", 0.05)
    dice = random.Random(seed)
    # Loads of so few blocks go in pieces, and saves one by one.
    monkeypatch.setattr(half, "_IDLE_PIECE_BYTES", dice.choice([1, 3, 1000]) * BLOCK_BYTES)
    monkeypatch.setattr(half, "_PIECE_BYTES", dice.choice([2, 5, 1000]) * BLOCK_BYTES)
    monkeypatch.setattr(saves, "_TOGETHER_BYTES", dice.choice([0, 4, 1000]) * BLOCK_BYTES)
    engine = toy(**settings(dice))
    # A request that goes on after preemption is a new one there.
    engine.scheduler.use_v2_model_runner = dice.random() < 0.3
    live(engine, dice, steps=400)
    engine.run()
    engine.half._hints.drop_all()
    assert not wrong_answers(engine)
    assert sum(asked.ended == "finished" for asked in engine.asked.values()) > 10
    assert_nothing_left(engine)


def test_steps_that_are_not_held_are_noticed(toy: MakeEngine, monkeypatch: pytest.MonkeyPatch):
    """The mutant: who expects a load does not wait for it."""
    monkeypatch.setattr(WorkerHalf, "expect", lambda self, loads: True)

    def lives() -> None:
        for seed in range(10):
            dice = random.Random(seed)
            live(toy(**settings(dice) | {"copy_bytes_per_s": 4e5, "ranks": 1}), dice, steps=250)

    with pytest.raises(AssertionError):
        lives()


def settings(dice: random.Random) -> dict[str, object]:
    return {
        "lag": dice.choice([0, 0, 1, 2]),
        "ranks": dice.choice([1, 1, 1, 2]),
        "blocks": dice.choice([24, 30, 50]),
        # A window that fails takes all its blocks out of use.
        "window_bytes": dice.choice([1, 1, 3]) * BLOCK_BYTES,
        "most_running": dice.choice([1, 3, 6]),
        "step_tokens": dice.choice([32, 64, 200]),
        "policy": dice.choice(["fcfs", "priority"]),
        "kv_events": dice.random() < 0.3,
        "host_bytes": dice.choice([1, 2, 3, 20, 60, 400, 400]) * BLOCK_BYTES + dice.choice([0, 77]),
        "copy_bytes_per_s": dice.choice([0.0, 2e5, 4e5, 2e6]),
        "min_load_tokens": dice.choice([0, 32]),
        "min_save_tokens": dice.choice([0, 0, 48]),
        "save_mode": dice.choice(["write_through", "write_through", "on_evict"]),
        "look_ahead_requests": dice.choice([1, 64]),
        "prefetch_share": dice.choice([0.0, 0.1, 0.5, 0.7]),
        "reserve_share": dice.choice([0.0, 0.05, 0.3]),
        "hints": dice.choice([0, 1, 64]),
    }


def live(engine: ToyEngine, dice: random.Random, steps: int) -> None:
    """Arrivals, most of them on an idle engine, aborts, resets, and a link that fails and stops."""
    watched = Watched(engine)
    # Two may fail, and each takes a block out of use.
    faults = [dice.randrange(steps) for _ in range(2)]
    timers: list[threading.Timer] = []
    for step in range(steps):
        if step in faults:
            engine.mover.fail_window(dice.choice(list(Direction)), dice.randrange(10))
        idle = not engine.scheduler.has_requests() and not engine._scheduled
        if dice.random() < (0.8 if idle else 0.06):
            arrive(engine, dice)
        if dice.random() < 0.05 and (opened := list(engine.open())):
            engine.abort(engine.asked[dice.choice(opened)])
        if dice.random() < 0.3:
            engine.try_to_reset()
        if dice.random() < 0.005:
            engine.scheduler.reset_connector_cache()
        if dice.random() < 0.06:
            timers.append(stop_for_a_while(engine, dice))
        if dice.random() < 0.02:
            engine.half._mode_file._mode = Mode(dice.choice(["b0", "b3", "b4", "b4"]))
        engine.step()
        check_counts(engine)
        watched.check_books()
        watched.check_device()
        watched.check_host()
    engine.half._mode_file._mode = Mode.LOOK_AHEAD
    for timer in timers:
        timer.join()


def check_counts(engine: ToyEngine) -> None:
    """None goes down, and what has an outcome has one."""
    stats, tokens = engine.half.stats(), engine.half.books.tally.prompt_tokens
    assert min(*tokens.values(), *stats.misses.values(), *stats.sources.values()) >= 0
    assert sum(stats.misses.values()) == stats.sources[Source.RECOMPUTED]
    ledger = engine.half._ledger
    ended = sum(ledger.outcomes.values()) - ledger.outcomes[PrefetchOutcome.REFUSED]
    assert ledger.planned_bytes == ended + ledger.open_bytes


def arrive(engine: ToyEngine, dice: random.Random) -> None:
    """One or several requests, of which many repeat or go on with what was there."""
    hint = {"hint": {"eta_s": dice.choice([0.0, 0.01, 0.05]), "expiry_s": 0.1}}
    wishes = [None] * 8 + [{"no_save": True}, {"no_cache": True}, hint]
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        asked = dice.choice(wishes)
        most = 1 if asked is hint else dice.randrange(1, 30)
        prompt = next_prompt(engine, dice)
        params = None if asked is None else {"forebay": asked}
        engine.ask(prompt, most, priority=dice.randrange(3), params=params)
        if dice.random() < 0.3:
            engine.ask([*prompt, 1, 2], dice.randrange(1, 30), priority=dice.randrange(3))


def next_prompt(engine: ToyEngine, dice: random.Random) -> list[int]:
    before = [asked for asked in engine.asked.values() if asked.ended == "finished"]
    if before and dice.random() < 0.6:
        earlier = dice.choice(before[-8:])
        said = earlier.prompt + earlier.given
        more = [dice.randrange(251) for _ in range(dice.randrange(1, 40))]
        prompt = dice.choice([earlier.prompt, said[: 16 * dice.randrange(1, 19)], said + more])
    else:
        # One in two is of whole blocks.
        length = 16 * dice.randrange(1, 19) if dice.random() < 0.5 else dice.randrange(1, 300)
        prompt = prompt_of(dice.randrange(4), length)
    window = engine.half.settings.window_bytes // BLOCK_BYTES
    most = (engine.pool.num_gpu_blocks - 2 - 2 * window) * 16
    return prompt[: min(most, 400) - 40] or [1]


def stop_for_a_while(engine: ToyEngine, dice: random.Random) -> threading.Timer:
    """One lane of the last worker stands still until the timer has run."""
    direction = dice.choice([Direction.LOAD, Direction.LOAD, Direction.SAVE])
    held = direction, dice.choice(LANES)
    engine.mover.hold_lane(*held)
    pause_s = dice.choice([0.002, 0.01, 0.03, 0.08])
    timer = threading.Timer(pause_s, engine.mover.release_lane, held)
    timer.start()
    return timer
