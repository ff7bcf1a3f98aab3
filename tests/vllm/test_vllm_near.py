"""Requests that are scheduled while the last of their loads land."""

from __future__ import annotations

import threading

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

from forebay.core.ledger import Source
from forebay.core.requests import Waiting
from forebay.transfer.messages import Direction
from forebay.vllm import connector, worker
from forebay.vllm.scheduler import near
from forebay.vllm.worker import WorkerHalf

_copy = WorkerHalf._copy_here
RULES = pytest.mark.parametrize("rule", ["kept", "broken"])


def saved_and_gone(engine: ToyEngine, length: int = 200) -> None:
    """The prompt is in host memory, and nothing is on the device but other content."""
    engine.ask(prompt_of(1, length), 1)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.kv.zero_()


def hold(engine: ToyEngine) -> None:
    for lane in LANES:
        engine.mover.hold_lane(Direction.LOAD, lane)


def let_go(engine: ToyEngine) -> None:
    for lane in LANES:
        engine.mover.release_lane(Direction.LOAD, lane)


@RULES
@pytest.mark.parametrize("length", [200, 12 * 16])  # the last block of the latter is copied
@pytest.mark.parametrize("lag", [0, 1])
def test_its_step_is_held_until_they_have_landed(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, lag: int, length: int, rule: str
):
    if rule == "broken":
        monkeypatch.setattr(WorkerHalf, "expect", lambda self, loads: True)
    engine = toy(lag=lag)
    saved_and_gone(engine, length)
    hold(engine)
    again = engine.ask(prompt_of(1, length), 8)
    release = threading.Timer(0.2, let_go, [engine])
    release.start()
    engine.step()
    assert again.request.num_computed_tokens >= 12 * 16 - 1, "the first step is its own"
    engine.run()
    release.join()
    assert (again.given == answers(again.prompt, 8)) == (rule == "kept")
    assert engine.half.stats().sources[Source.HOST] == 12
    stalled_s = engine.worker.worker_half.counters()["forebay:stall_seconds"][""]
    assert (stalled_s > 0.0) == (rule == "kept"), "nothing ran meanwhile, and only a load lacked"
    assert_nothing_left(engine)


@RULES
def test_vllm_is_told_that_its_forward_pass_comes_behind_them(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, rule: str
):
    """0.32 starts loads behind the forward pass where it knows of none that it waits for."""
    if rule == "broken":
        monkeypatch.setattr(connector, "loads_come_first", lambda output: None)
    engine = toy()
    saved_and_gone(engine)
    hold(engine)
    again = engine.ask(prompt_of(1, 200), 8)
    release = threading.Timer(0.2, let_go, [engine])
    release.start()
    engine.run()
    release.join()
    late = rule == "broken" and hasattr(engine.scheduler.schedule(), "has_sync_kv_loads")
    assert (again.given == answers(again.prompt, 8)) != late


@RULES
@pytest.mark.parametrize("fault", ["fails", "stands still"])
def test_what_a_copy_does_not_bring_is_copied_without_it(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, fault: str, rule: str
):
    if rule == "broken":
        monkeypatch.setattr(
            WorkerHalf, "_copy_here", lambda self, load: self._expected.discard(load.id)
        )
    monkeypatch.setattr(worker, "_AWAIT_S", 0.1)
    engine = toy(window_bytes=BLOCK_BYTES)
    saved_and_gone(engine)
    drained: list[bool] = []
    if fault == "fails":
        engine.mover.fail_window(Direction.LOAD, 5)
        half = engine.worker.worker_half
        half._drain = lambda: drained.append(bool(half._expected))
    else:
        hold(engine)
    again = engine.ask(prompt_of(1, 200), 8)
    engine.step()
    let_go(engine)
    engine.run()
    assert (again.given == answers(again.prompt, 8)) == (rule == "kept")
    assert drained == [True] * (fault == "fails"), "before it is copied, if its copies may go on"
    other = engine.ask(prompt_of(1, 200), 8)
    engine.run()
    assert other.given == answers(other.prompt, 8) or rule == "broken"
    assert_nothing_left(engine)


@RULES
def test_they_go_on_when_nobody_waits_for_them_any_more(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, rule: str
):
    """vLLM finds them already."""
    engine = toy(window_bytes=BLOCK_BYTES)
    saved_and_gone(engine)
    hold(engine)
    gone = engine.ask(prompt_of(1, 200), 8)
    if rule == "broken":
        for flight in engine.half._flights._flights.values():
            monkeypatch.setattr(flight, "near", False)
    engine.abort(gone)
    release = threading.Timer(0.2, let_go, [engine])
    release.start()
    engine.run()
    release.join()
    assert (engine.half.stats().loaded_bytes == 12 * BLOCK_BYTES) == (rule == "kept")
    again = engine.ask(prompt_of(1, 200), 8)
    engine.run()
    assert not wrong_answers(engine)
    assert again.ended == "finished"


def save_reads_what_a_load_takes(engine: ToyEngine) -> threading.Timer:
    """The prompt's next load goes into slots that a save reads. Returns what ends that."""
    saved_and_gone(engine)
    engine.ask(prompt_of(2, 200), 1)
    engine.run()
    for lane in LANES:
        engine.mover.hold_lane(Direction.SAVE, lane)
    other = engine.ask(prompt_of(2, 250), 1)
    while not other.ended:
        engine.step()
    engine.half._lately.drop_all()
    return threading.Timer(0.2, lambda: [engine.mover.release_lane(1, lane) for lane in LANES])


def is_right_afterwards(engine: ToyEngine, release: threading.Timer) -> bool:
    release.start()
    engine.run()
    release.join()
    assert engine.scheduler.reset_prefix_cache() or engine.half._device.quarantined
    loaded = engine.half.stats().sources[Source.HOST]
    engine.ask(prompt_of(2, 250), 8)
    engine.run()
    assert engine.half.stats().sources[Source.HOST] > loaded
    return not wrong_answers(engine)


@RULES
def test_a_load_that_was_stopped_is_not_near(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, rule: str
):
    engine = toy(blocks=20, window_bytes=BLOCK_BYTES, min_load_tokens=0)
    release = save_reads_what_a_load_takes(engine)
    copied: list[int] = []
    monkeypatch.setattr(
        WorkerHalf, "_copy_here", lambda self, load: copied.append(load.id) or _copy(self, load)
    )
    monkeypatch.setattr(near, "_STEP_S", -1.0)
    engine.abort(engine.ask(prompt_of(1, 200), 8))
    monkeypatch.setattr(near, "_STEP_S", 1.0)
    (load,) = (each for each in engine.half._flights._flights.values() if each.is_load)
    assert load.cancelled
    load.cancelled = rule == "kept"
    engine.ask(prompt_of(1, 200), 8)
    assert is_right_afterwards(engine, release)
    assert (copied == []) == (rule == "kept")


@RULES
def test_a_copy_made_without_a_load_waits_for_the_saves_that_it_would_write_under(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, rule: str
):
    engine = toy(blocks=20, window_bytes=BLOCK_BYTES, min_load_tokens=0)
    release = save_reads_what_a_load_takes(engine)
    # Its first block is for a slot that no save reads.
    engine.mover.fail_window(Direction.LOAD, 0)
    engine.ask(prompt_of(1, 200), 8)
    if rule == "broken":
        monkeypatch.setattr(WorkerHalf, "_saves_reading", lambda self, slots: set())
    assert is_right_afterwards(engine, release) == (rule == "kept")


def flying(toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, **params: object) -> ToyEngine:
    """An idle engine with a request whose loads would be near, but for who waits for them."""
    engine = toy(hints=1)
    saved_and_gone(engine)
    hold(engine)
    monkeypatch.setattr(near, "_STEP_S", -1.0)
    engine.ask(prompt_of(1, 200), 1, **params)
    engine.step()
    assert engine.half._flights.load_blocks == 12
    monkeypatch.setattr(near, "_STEP_S", 1.0)
    return engine


def let_go_soon(engine: ToyEngine) -> threading.Timer:
    release = threading.Timer(0.2, let_go, [engine])
    release.start()
    return release


def test_its_request_is_looked_up_at_the_very_next_step(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch
):
    engine = flying(toy, monkeypatch)
    (asked,) = (each for each in engine.asked.values() if not each.ended)
    assert asked.request.skip_reading_prefix_cache
    engine.half.look()
    release = let_go_soon(engine)
    engine.step()
    assert asked.given, "in one step, of what was found"
    release.join()
    engine.run()
    assert not wrong_answers(engine)


def test_others_that_lack_loads_are_not_looked_up(toy: MakeEngine, monkeypatch: pytest.MonkeyPatch):
    engine = toy(blocks=60)
    engine.ask(prompt_of(2, 200), 1)
    engine.run()
    saved_and_gone(engine)
    hold(engine)
    monkeypatch.setattr(near, "_STEP_S", -1.0)
    first, other = (engine.ask(prompt_of(seed, 200), 1) for seed in (1, 2))
    engine.step()
    monkeypatch.setattr(near, "_STEP_S", 1.0)
    engine.half.look()
    marked = [each.request.skip_reading_prefix_cache for each in (first, other)]
    assert marked == [False, True]
    let_go(engine)
    engine.run()
    assert not wrong_answers(engine)


def test_no_step_is_held_for_a_hint(toy: MakeEngine, monkeypatch: pytest.MonkeyPatch):
    engine = flying(toy, monkeypatch, params={"forebay": {"hint": {"eta_s": 60.0}}})
    engine.half.look()
    assert not engine.half._near.under_way
    other = engine.ask(prompt_of(2, 50), 1)
    engine.step()
    assert other.given
    let_go(engine)
    engine.run()


def test_no_step_is_held_where_the_link_stands_still(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch
):
    engine = flying(toy, monkeypatch)
    clock = engine.half._clock
    monkeypatch.setattr(engine.half, "_clock", lambda: clock() + 5.0)
    engine.half.look()
    assert not engine.half._near.under_way
    let_go(engine)
    engine.run()


def test_no_step_is_held_for_a_load_that_nobody_waits_for_again(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch
):
    engine = flying(toy, monkeypatch)
    (load,) = engine.half._flights._flights.values()
    load.overdue = True
    engine.half.look()
    assert not engine.half._near.under_way
    load.overdue = False
    let_go(engine)
    engine.run()


def test_the_more_blocks_vllm_looks_up_the_sooner_it_begins(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch
):
    engine = flying(toy, monkeypatch)
    monkeypatch.setattr(near, "_STEP_S", -1.0)
    engine.half.look()
    assert not engine.half._near.under_way
    monkeypatch.setattr(near, "_BLOCK_S", 1.0)
    engine.half.look()
    assert engine.half._near.under_way
    release = let_go_soon(engine)
    engine.run()
    release.join()
    assert not wrong_answers(engine)


def test_who_waits_for_what_cannot_be_found_ahead_goes_on_waiting(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch
):
    engine = flying(toy, monkeypatch)
    (asked,) = (each for each in engine.asked.values() if not each.ended)
    with monkeypatch.context() as patch:
        patch.setattr(engine.half._device, "find_ahead", lambda blocks: False)
        engine.half.look()
        engine.step()
    assert not asked.request.num_computed_tokens
    let_go(engine)
    engine.run()
    assert engine.half.stats().sources[Source.HOST] == 12
    assert not wrong_answers(engine)


def test_a_link_that_stands_still_holds_one_step_and_no_more(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch
):
    """What comes later waits as for any load, and is computed once its bound is over."""
    monkeypatch.setattr(worker, "_AWAIT_S", 0.1)
    engine = toy(blocks=60)
    engine.ask(prompt_of(2, 200), 1)
    engine.run()
    saved_and_gone(engine)
    hold(engine)
    held = engine.ask(prompt_of(1, 200), 4)
    while not held.ended:
        engine.step()
    stalled_s = engine.worker.worker_half.counters()["forebay:stall_seconds"][""]
    clock = engine.half._clock
    monkeypatch.setattr(engine.half, "_clock", lambda: clock() + 5.0)
    other = engine.ask(prompt_of(2, 200), 4)
    engine.step()
    assert not other.request.num_computed_tokens
    while not other.ended:
        engine.step()
    assert engine.worker.worker_half.counters()["forebay:stall_seconds"][""] == stalled_s
    let_go(engine)
    engine.run()
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


@pytest.mark.parametrize("lacks", ["a load", "room for it"])
def test_no_step_is_held_for_loads_that_are_not_all_that_is_lacked(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, lacks: str
):
    engine = flying(toy, monkeypatch)
    (entry,) = engine.half._line.head(1)

    def refreshed(entry: Waiting) -> None:
        """What was saved meanwhile can be loaded too, what was computed is on the device."""
        entry.to_load, entry.here = (1, 0) if lacks == "a load" else (0, 1)

    with monkeypatch.context() as patch:
        patch.setattr(engine.half._line, "refresh", refreshed)
        engine.half.look()
    assert not engine.half._near.under_way
    entry.to_load = entry.here = 0
    let_go(engine)
    engine.run()
    assert not wrong_answers(engine)


def test_several_workers_hold_no_step(toy: MakeEngine):
    engine = toy(ranks=2)
    saved_and_gone(engine)
    hold(engine)
    again = engine.ask(prompt_of(1, 200), 8)
    for _ in range(5):
        engine.step()
    assert not again.request.num_computed_tokens
    assert not engine.half._near.under_way
    let_go(engine)
    engine.run()
    assert not wrong_answers(engine)
