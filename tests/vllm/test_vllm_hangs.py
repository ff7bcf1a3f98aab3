"""Copies that hang: the engine goes on, and nothing of them is used."""

from __future__ import annotations

import functools
import time

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

from vllm_toy import BLOCK_BYTES, LANES, Asked, MakeEngine, ToyEngine, answers, prompt_of

from forebay.core.arrays import Ids
from forebay.core.store import Store
from forebay.transfer.messages import Direction
from forebay.vllm import worker


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


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch):
    """A copy that does not end counts as lost soon, and a step does not wait for it for long."""
    mover = functools.partial(worker.NativeMover, window_timeout_s=0.3)
    monkeypatch.setattr(worker, "NativeMover", mover)
    monkeypatch.setattr(worker, "_AWAIT_S", 0.05)


def asked_again_over_loads_that_hang(toy: MakeEngine, answer: int) -> tuple[ToyEngine, Asked]:
    engine = toy(blocks=100, host_bytes=13 * BLOCK_BYTES, window_bytes=BLOCK_BYTES)
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    for lane in LANES:
        engine.mover.hold_lane(Direction.LOAD, lane)
    return engine, engine.ask(prompt_of(1, 200), answer)


def let_go(engine: ToyEngine) -> None:
    """And they go on, at once."""
    for lane in LANES:
        engine.mover.release_lane(Direction.LOAD, lane)
    time.sleep(0.2)


@pytest.fixture(params=[True, False], ids=["kept", "broken"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether nothing else comes to where a copy that never completed reads, as it is to be."""
    if request.param:
        return True
    never_came = Store._never_came

    def ended(self: Store, missing: Ids, torn: Ids) -> None:
        never_came(self, missing, torn)
        self.host.unhold(torn, on_device=False)

    monkeypatch.setattr(Store, "_never_came", ended)
    return False


def test_what_is_found_where_a_lost_copy_writes_later_stays_the_same(
    toy: MakeEngine, impatient: None, kept: bool
):
    """A step waited for it, and ran when it was copied without it: so vLLM knows its block."""
    engine, found = asked_again_over_loads_that_hang(toy, 8)
    engine.run()
    assert found.given == answers(found.prompt, 8)
    assert engine.half.stats().failed_loads == 1
    engine.ask(prompt_of(2, 200), 1)
    engine.run()
    let_go(engine)
    again = engine.ask(prompt_of(1, 200), 8)
    engine.run()
    assert (again.given == answers(again.prompt, 8)) == kept


def test_what_runs_where_a_lost_copy_writes_meanwhile_goes_on_over_the_same(
    toy: MakeEngine, impatient: None, kept: bool
):
    engine, found = asked_again_over_loads_that_hang(toy, 200)
    engine.step()
    time.sleep(0.5)
    while not engine.half.stats().failed_loads:
        engine.step()
        time.sleep(2e-3)
    other = engine.ask(prompt_of(2, 200), 1)
    while other.ended != "finished" or len(engine.half._flights):
        engine.step()
        time.sleep(2e-3)
    assert len(found.given) < 150
    let_go(engine)
    engine.run()
    assert (found.given == answers(found.prompt, 200)) == kept
