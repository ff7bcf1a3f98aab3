"""Copies that hang: the engine goes on, and nothing of them is used."""

from __future__ import annotations

import functools
import time

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

from vllm_toy import BLOCK_BYTES, LANES, MakeEngine, answers, prompt_of

from forebay.transfer.messages import Direction
from forebay.vllm import worker
from forebay.vllm.scheduler import pool


@pytest.mark.parametrize("rule", ["kept", "broken"])
def test_a_save_that_hangs_holds_one_step_and_no_more(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, rule: str
):
    """Each step that takes some of what it reads would wait for it anew."""
    monkeypatch.setattr(worker, "_SETTLE_S", 0.05)
    engine = toy(blocks=14, step_tokens=512, min_load_tokens=0)
    for lane in LANES:
        engine.mover.hold_lane(Direction.SAVE, lane)
    engine.ask(prompt_of(1, 200), 1)
    while list(engine.open()):
        engine.step()
    half, waited = engine.worker.worker_half, list[int]()
    settle = half._settle

    def settled(saves: set[int]) -> None:
        if rule == "broken":
            half._torn.clear()
        cancel = half._mover.cancel
        with monkeypatch.context() as patch:
            patch.setattr(half._mover, "cancel", lambda ids: waited.extend(ids) or cancel(ids))
            settle(saves)

    monkeypatch.setattr(half, "_settle", settled)
    engine.ask(prompt_of(2, 10), 120)  # a block of it at a time
    while list(engine.open()):
        engine.step()
    assert waited
    assert (len(waited) == len(set(waited))) == (rule == "kept")
    for lane in LANES:
        engine.mover.release_lane(Direction.SAVE, lane)
    engine.run()
    again = engine.ask(prompt_of(1, 200), 4)
    engine.run()
    assert again.given == answers(again.prompt, 4) or rule == "broken"


@pytest.mark.parametrize("rule", ["kept", "broken"])
def test_what_a_lost_copy_may_write_yet_is_not_found(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, rule: str
):
    """A step waited for it, and ran when it was copied without it: so vLLM knows its block."""
    mover = functools.partial(worker.NativeMover, window_timeout_s=0.3)
    monkeypatch.setattr(worker, "NativeMover", mover)
    monkeypatch.setattr(worker, "_AWAIT_S", 0.05)
    if rule == "broken":
        monkeypatch.setattr(pool, "uncache", lambda pool, slots: None)
    engine = toy(blocks=100, host_bytes=13 * BLOCK_BYTES, window_bytes=BLOCK_BYTES)
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    for lane in LANES:
        engine.mover.hold_lane(Direction.LOAD, lane)
    found = engine.ask(prompt_of(1, 200), 8)
    engine.run()
    assert found.given == answers(found.prompt, 8)
    assert engine.half.stats().failed_loads == 1
    # Something else comes to where the lost copy reads.
    engine.ask(prompt_of(2, 200), 1)
    engine.run()
    for lane in LANES:
        engine.mover.release_lane(Direction.LOAD, lane)
    time.sleep(0.2)
    again = engine.ask(prompt_of(1, 200), 8)
    engine.run()
    assert (again.given == answers(again.prompt, 8)) == (rule == "kept")
