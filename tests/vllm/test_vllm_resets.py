"""Resets of vLLM's cache and of host memory, in vLLM's real scheduler."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

from vllm.v1.core.sched.interface import PauseState
from vllm_toy import LANES, MakeEngine, answers, assert_nothing_left, prompt_of

from forebay.core.ledger import Source
from forebay.transfer.messages import Direction
from forebay.vllm.scheduler.near import NearLoads


def test_a_reset_of_the_connector_forgets_what_was_saved(toy: MakeEngine):
    engine = toy()
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    assert engine.half.stats().loaded_bytes == 0


def test_what_is_on_its_way_when_the_connector_is_reset_is_not_found(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(NearLoads, "approach", lambda *_: None)
    engine = toy()
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    for lane in LANES:
        engine.mover.hold_lane(Direction.LOAD, lane)
    engine.ask(prompt_of(1, 200), 1)
    engine.step()
    assert engine.half._flights.load_blocks
    engine.scheduler.reset_connector_cache()
    for lane in LANES:
        engine.mover.release_lane(Direction.LOAD, lane)
    engine.run()
    assert engine.half.stats().loaded_bytes
    assert engine.half.stats().sources[Source.HOST] == 0
    assert engine.half.stats().sources[Source.DEVICE] == 0
    assert_nothing_left(engine)


def test_a_pause_waits_for_loads_before_it_resets(toy: MakeEngine, monkeypatch: pytest.MonkeyPatch):
    """As vLLM's engine pauses: it goes on stepping while the scheduler has anything to do."""
    monkeypatch.setattr(NearLoads, "approach", lambda *_: None)
    engine = toy(lag=1)
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    for lane in LANES:
        engine.mover.hold_lane(Direction.LOAD, lane)
    waits = engine.ask(prompt_of(1, 200), 4)
    engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for _ in range(5):
        engine.step()
    assert engine.scheduler.has_requests(), "of which none can go on"
    assert not engine.scheduler.reset_prefix_cache()
    for lane in LANES:
        engine.mover.release_lane(Direction.LOAD, lane)
    engine.run()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert not waits.given
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert waits.given == answers(waits.prompt, 4)
    assert engine.half.stats().sources[Source.HOST] == 0
    assert_nothing_left(engine)
