"""Copies that hang: the engine goes on, and nothing of them is used."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

from vllm_toy import LANES, MakeEngine, answers, prompt_of

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
