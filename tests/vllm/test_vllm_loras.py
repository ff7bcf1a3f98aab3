"""LoRAs over vLLM's real scheduler: no KV of one for another, nor of one that was replaced."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

from vllm.distributed.kv_events import BlockStored
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState
from vllm_toy import (
    BLOCK_BYTES,
    LANES,
    Asked,
    MakeEngine,
    ToyEngine,
    answers,
    assert_nothing_left,
    prompt_of,
    wrong_answers,
)
from vllm_toy_bytes import Watched

from forebay.core.ledger import Source
from forebay.transfer.messages import Direction
from forebay.vllm.scheduler.hints import HintOutcome
from forebay.vllm.scheduler.near import NearLoads

BLOCKS = 200 // 16


def lora(name: str, number: int, path: str = "somewhere", *, in_place: bool = False) -> LoRARequest:
    return LoRARequest(name, number, path, load_inplace=in_place)


A, B = lora("a", 1), lora("b", 2)
REPLACED = [
    pytest.param(lora("a", 3), id="loaded again"),
    pytest.param(lora("a", 1, "elsewhere"), id="from another path"),
    pytest.param(lora("a", 1, in_place=True), id="in place"),
]


def ask(engine: ToyEngine, adapter: LoRARequest | None, length: int = 200, **more: Any) -> Asked:
    """Everybody asks the same."""
    return engine.ask(prompt_of(1, length), 1, lora_request=adapter, **more)


def loaded(engine: ToyEngine, adapter: LoRARequest | None) -> int:
    """How many blocks one finds in host memory that comes after all that was computed has left."""
    engine.try_to_reset()
    before = engine.half.stats().sources[Source.HOST]
    ask(engine, adapter)
    engine.run()
    assert not wrong_answers(engine)
    return engine.half.stats().sources[Source.HOST] - before


def loaded_right(engine: ToyEngine, adapter: LoRARequest) -> int:
    """The same, where vLLM itself may have answered others wrongly."""
    engine.try_to_reset()
    before = engine.half.stats().sources[Source.HOST]
    asked = ask(engine, adapter)
    engine.run()
    assert asked.given == answers(asked.prompt, 1, asked.first)
    return engine.half.stats().sources[Source.HOST] - before


def test_one_prompt_is_another_for_each_of_them(toy: MakeEngine):
    engine = toy()
    first = [loaded(engine, each) for each in (None, A, B)]
    again = [loaded(engine, each) for each in (None, A, B)]
    assert (first, again) == ([0] * 3, [BLOCKS] * 3)
    assert_nothing_left(engine)


@pytest.mark.parametrize("keys", ["with names", "without"])
@pytest.mark.parametrize("lag", [0, 2])
def test_random_lives_of_several(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, keys: str, lag: int
):
    if keys == "without":
        monkeypatch.setattr(
            "vllm.v1.core.kv_cache_utils._gen_lora_extra_hash_keys", lambda request: []
        )
    dice = random.Random(lag)
    engine = toy(lag=lag, most_running=2, min_load_tokens=0)
    for _ in range(400):
        if dice.random() < 0.2 and len(list(engine.open())) < 8:
            hint = {"forebay": {"hint": {"eta_s": 100.0}}} if dice.random() < 0.2 else None
            engine.ask(
                prompt_of(dice.randrange(3), dice.randrange(100, 300)),
                1 if hint else dice.randrange(1, 20),
                lora_request=dice.choice([None, A, B]),
                params=hint,
            )
        if dice.random() < 0.05:
            engine.try_to_reset()
        engine.step()
    engine.run()
    assert engine.half.stats().sources[Source.HOST] > 50
    assert bool(wrong_answers(engine)) == (keys == "without")


@pytest.mark.parametrize("new", REPLACED)
def test_what_was_replaced_is_kept_out_until_all_is_reset(
    toy: MakeEngine, caplog: pytest.LogCaptureFixture, new: LoRARequest
):
    engine = toy()
    for each in (A, B):
        loaded(engine, each)
    saved = engine.half.stats().saved_bytes
    with caplog.at_level(logging.WARNING, "forebay.vllm"):
        assert [loaded(engine, new), loaded(engine, new), loaded(engine, A)] == [0, 0, 0]
    said = [each.getMessage() for each in caplog.records if each.name == "forebay.vllm"]
    assert [each.split(":")[0] for each in said] == ["LoRA 'a' was loaded anew"]
    assert engine.half.stats().saved_bytes == saved
    assert loaded(engine, B) == BLOCKS, "the others are not concerned"
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    if not new.load_inplace:
        assert [loaded(engine, new), loaded(engine, new)] == [0, BLOCKS]
    assert_nothing_left(engine)


def test_what_was_brought_for_one_that_is_replaced_is_let_go(toy: MakeEngine):
    """Of a hint, and of a request that waits: it is computed."""
    engine = toy(blocks=80, most_running=1, hint_share=0.5, prefetch_share=0.9)
    loaded(engine, A)
    engine.try_to_reset()
    word = ask(engine, A, params={"forebay": {"hint": {"eta_s": 1000.0}}})
    engine.run()
    assert word.ended
    assert engine.half.stats().prefetch_open_bytes == BLOCKS * BLOCK_BYTES
    engine.ask(prompt_of(2, 100), 60)
    waits = ask(engine, A, 230)
    for _ in range(20):
        engine.step()
    assert not waits.request.num_computed_tokens
    ask(engine, lora("a", 3))
    assert engine.half._hints.outcomes[HintOutcome.DROPPED] == 1
    assert engine.half._device.prefetch_leased == 0
    engine.run()
    assert engine.half.stats().sources[Source.HOST] == 0
    refused = ask(engine, A, params={"forebay": {"hint": {}}})
    engine.run()
    assert refused.told == {
        "forebay": {
            "hint": {
                "refused": "it is kept out of host memory, for its LoRA, salt, images or session"
            }
        }
    }
    assert_nothing_left(engine)


@pytest.mark.parametrize("when", ["on its way", "near", "there"])
def test_nobody_finds_what_was_brought_for_one_that_is_replaced(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, when: str
):
    """vLLM alone would have it no more."""
    if when == "near":
        monkeypatch.setattr("forebay.vllm.scheduler.near._STEP_S", 10.0)
    else:
        monkeypatch.setattr(NearLoads, "approach", lambda *_: None)
    engine = toy(blocks=80, hint_share=0.5)
    watched = Watched(engine)
    loaded(engine, A)
    engine.try_to_reset()
    if when == "there":
        ask(engine, A, params={"forebay": {"hint": {"eta_s": 1000.0}}})
        engine.run()
        assert engine.half.stats().loaded_bytes
        new = ask(engine, lora("a", 3))
    else:
        for lane in LANES:
            engine.mover.hold_lane(Direction.LOAD, lane)
        gone = ask(engine, A)
        if when == "on its way":
            engine.step()
        assert engine.half._flights.load_blocks
        assert bool(engine.half._device._found_ahead) == (when == "near")
        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        new = ask(engine, lora("a", 3))
        engine.abort(gone)
        for lane in LANES:
            engine.mover.release_lane(Direction.LOAD, lane)
        while engine.half._flights.load_blocks:
            engine.step()
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert new.given == answers(new.prompt, 1, new.first)
    watched.check_books()
    assert_nothing_left(engine)


def test_a_name_is_kept_out_while_vllm_has_what_the_replaced_one_computed(toy: MakeEngine):
    engine = toy()
    loaded(engine, A)
    runs = engine.ask(prompt_of(2, 40), 60)
    for _ in range(3):
        engine.step()
    new = lora("a", 3)
    ask(engine, new)
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True), "blocks are in use"
    again = ask(engine, new)
    assert engine.half._roster.find(again.request).wishes.keeps_out
    engine.run()
    assert runs.ended
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert [loaded_right(engine, new), loaded_right(engine, new)] == [0, BLOCKS]


@pytest.mark.parametrize("when", ["runs", "waits", "hinted", "ended"])
def test_what_is_computed_after_hosts_own_reset_is_known_by_its_lora(toy: MakeEngine, when: str):
    """vLLM's cache was not reset with it, or what goes on computes for that LoRA still."""
    engine = toy(most_running=1, hint_share=0.5)
    first = engine.ask(prompt_of(2, 40), 20)
    hint = {"forebay": {"hint": {"eta_s": 1000.0}}}
    old = ask(engine, A, params=hint if when == "hinted" else None)
    while not (old.request.num_computed_tokens or (when == "waits" and first.given)):
        engine.step()
    if when in ("hinted", "ended"):
        engine.run()
    if when in ("hinted", "waits"):
        engine.try_to_reset()
    if when == "hinted":
        ask(engine, None)  # with whose steps the hint's loads go
        engine.run()
        assert engine.half.stats().sources[Source.HOST] == 0
        assert engine.half.stats().loaded_bytes
    engine.scheduler.reset_connector_cache()
    if when in ("hinted", "ended"):
        ask(engine, lora("a", 3))  # which vLLM itself may answer wrongly
    engine.run()
    assert loaded_right(engine, lora("a", 3)) == 0
    assert_nothing_left(engine)


@pytest.mark.parametrize(
    ("version", "loras", "found"),
    [("0.26.0", True, 0), ("0.26.0", False, BLOCKS), ("0.32.0", True, BLOCKS)],
)
def test_salts_are_kept_out_where_vllm_takes_them_for_loras(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, version: str, loras: bool, found: int
):
    monkeypatch.setattr("forebay.vllm.connector.__version__", version)
    engine = toy(loras=loras)
    for expected in (0, found):
        engine.try_to_reset()
        before = engine.half.stats().sources[Source.HOST]
        ask(engine, None, cache_salt="a")
        engine.run()
        assert engine.half.stats().sources[Source.HOST] - before == expected
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


def test_vllm_takes_salts_for_loras_where_that_is_believed(toy: MakeEngine):
    engine = toy(loras=True)
    salted = ask(engine, None, cache_salt="a").request.block_hashes
    adapted = ask(engine, A).request.block_hashes
    engine.run()
    assert (salted[0] == adapted[0]) == engine.half._misnamed._salts


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("lag", [0, 1])
def test_no_more_run_than_vllm_takes_while_it_leaves_some_out(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, lag: int, reads: bool
):
    """One that cannot go on before a load has landed is in no step until then."""
    monkeypatch.setattr(NearLoads, "approach", lambda *_: None)
    engine = toy(lag=lag, loras=True, blocks=30, prefetch_share=0.9, reserve_share=0.0)
    assert engine.scheduler.lora_config.max_loras == 1
    ask(engine, None)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    for lane in LANES:
        engine.mover.hold_lane(Direction.LOAD, lane)
    grows = engine.ask(prompt_of(2, 380), 5, lora_request=A)
    engine.step()
    ask(engine, None)
    other = engine.ask(prompt_of(3, 10), 50, lora_request=B, reads=reads)
    for _ in range(12):
        engine.step()
    assert engine.half._flights.load_blocks
    for lane in LANES:
        engine.mover.release_lane(Direction.LOAD, lane)
    engine.run()
    assert grows.ended == other.ended == "finished"
    assert other.request.skip_reading_prefix_cache is not reads
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


def test_events_name_the_lora_of_blocks(toy: MakeEngine):
    engine = toy(kv_events=True)
    for each in (A, None):
        ask(engine, each)
        engine.run()
    stored = [
        (each.medium, each.lora_id, each.lora_name)
        for each in engine.events
        if isinstance(each, BlockStored)
    ]
    kinds = [(medium, *of) for of in ((1, "a"), (None, None)) for medium in ("GPU", "CPU")]
    assert sorted(set(stored), key=str) == sorted(kinds, key=str)
