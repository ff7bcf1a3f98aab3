"""Hints inside vLLM's real scheduler: what they bring, what it costs others, and how they end."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

from vllm_toy import (
    BLOCK_BYTES,
    LANES,
    Asked,
    MakeEngine,
    ToyEngine,
    assert_nothing_left,
    prompt_of,
    wrong_answers,
)

from forebay.core.ledger import Source
from forebay.core.modes import Mode
from forebay.transfer.messages import Direction
from forebay.vllm.scheduler.hints import HintOutcome

FAR = 1000.0
"""Seconds: nothing of these tests is so slow."""


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self, engine: ToyEngine) -> None:
        self.now_s = engine.half._clock()
        engine.half._clock = lambda: self.now_s


def hint(engine: ToyEngine, prompt: list[int], **times: Any) -> Asked:
    return engine.ask(prompt, 1, params={"forebay": {"hint": times}})


def saved_and_gone(engine: ToyEngine, *seeds: int, length: int = 200) -> None:
    """Prompts of these seeds are in host memory, and nothing is on the device."""
    for seed in seeds:
        engine.ask(prompt_of(seed, length), 1)
        engine.run()
    assert engine.scheduler.reset_prefix_cache()


def outcomes(engine: ToyEngine) -> dict[str, int]:
    return {each.value: count for each, count in engine.half._hints.outcomes.items() if count}


def test_a_hint_brings_what_its_session_then_finds(toy: MakeEngine):
    engine = toy(hint_share=0.5)
    saved_and_gone(engine, 1)
    word = hint(engine, prompt_of(1, 200), eta_s=FAR)
    engine.run()
    assert word.ended == "finished"
    assert word.told == {"forebay": {"hint": {"found_tokens": 192, "expiry_s": 60.0}}}
    assert engine.half.stats().prefetch_open_bytes == 12 * BLOCK_BYTES, "its own reading is no use"
    came = engine.ask(prompt_of(1, 230), 4)
    engine.step()
    assert came.request.num_computed_tokens >= 192, "a hit at the first step"
    assert engine.half.stats().prefetch_bytes["used"] == 12 * BLOCK_BYTES
    engine.run()
    assert outcomes(engine) == {"claimed": 1}
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


@pytest.mark.parametrize("begun", [0, 96])
def test_a_hint_of_what_was_not_there_is_claimed_too(toy: MakeEngine, begun: int):
    engine = toy(hint_share=0.5)
    if begun:
        saved_and_gone(engine, 1, length=begun)
    word = hint(engine, prompt_of(1, 200), eta_s=FAR)
    engine.run()
    assert word.ended == "finished"
    other = engine.ask(prompt_of(2, 230), 4)
    engine.run()
    assert outcomes(engine) == {}, "another's session"
    came = engine.ask(prompt_of(1, 230), 4)
    engine.run()
    assert other.ended == came.ended == "finished"
    assert outcomes(engine) == {"claimed": 1}


@pytest.mark.parametrize("rule", ["kept", "broken"])
@pytest.mark.parametrize("begun", [0, 96])
def test_a_session_that_comes_before_its_hint_was_answered_claims_it(
    toy: MakeEngine, begun: int, rule: str, monkeypatch: pytest.MonkeyPatch
):
    engine = toy(hint_share=0.5, blocks=80)
    if begun:
        saved_and_gone(engine, 1, length=begun)
    if rule == "broken":
        monkeypatch.setattr(engine.half._hints, "came", lambda *_: None)
    clock = Clock(engine)
    word = hint(engine, prompt_of(1, 200), eta_s=0.05, expiry_s=20.0)
    for _ in range(20):
        engine.step()
    shared = engine.ask(prompt_of(1, 96) + prompt_of(2, 120), 4)
    while not shared.ended:
        engine.step()
    assert outcomes(engine) == {}, "another's session, on the same first blocks"
    came = engine.ask(prompt_of(1, 230), 150)
    while not came.given:
        engine.step()
    assert outcomes(engine) == ({"claimed": 1} if rule == "kept" else {})
    clock.now_s += 2.0
    for _ in range(5):
        engine.step()
    assert bool(word.request.num_computed_tokens) == (rule == "broken")
    clock.now_s += 18.1
    for _ in range(5):
        engine.step()
    assert word.ended == "finished", "at its expiry"
    assert not came.ended
    engine.run()
    assert outcomes(engine) == {"claimed" if rule == "kept" else "expired": 1}
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


def test_a_session_whose_prompt_ends_its_past_in_another_way_claims_its_hint(toy: MakeEngine):
    engine = toy(hint_share=0.5)
    saved_and_gone(engine, 1)
    hint(engine, prompt_of(1, 200), eta_s=FAR)
    engine.run()
    engine.ask(prompt_of(1, 170) + prompt_of(2, 60), 4)
    engine.run()
    assert outcomes(engine) == {}
    engine.ask(prompt_of(1, 185) + prompt_of(2, 60), 4)
    engine.run()
    assert outcomes(engine) == {"claimed": 1}
    assert_nothing_left(engine)


def test_an_idle_engine_goes_on_until_the_hint_is_answered(toy: MakeEngine):
    engine = toy(hint_share=0.5, window_bytes=BLOCK_BYTES)
    saved_and_gone(engine, 1)
    for lane in (0, 1):
        engine.mover.hold_lane(0, lane)
    word = hint(engine, prompt_of(1, 200), eta_s=FAR)
    for _ in range(20):
        engine.step()
    assert engine.scheduler.has_requests()
    assert not word.ended
    for lane in (0, 1):
        engine.mover.release_lane(0, lane)
    engine.run()
    assert word.ended == "finished"


def test_its_own_token_is_not_in_the_way_of_the_session(toy: MakeEngine):
    engine = toy(hint_share=0.5)
    saved_and_gone(engine, 1)
    clock = Clock(engine)
    word = hint(engine, prompt_of(1, 200), eta_s=0.05)
    for _ in range(200):
        engine.step()
    assert not word.ended, "it has come by now, and waits"
    came = engine.ask(prompt_of(1, 230), 4)
    while not came.ended:
        engine.step()
        assert not word.request.num_computed_tokens, "nor is it computed beside its answer"
    engine.step()
    assert not word.request.num_computed_tokens, "the answer is on its way"
    clock.now_s += 0.1
    engine.run()
    assert word.ended == "finished"
    assert not wrong_answers(engine)
    alone = hint(engine, prompt_of(1, 200), eta_s=0.05)
    engine.step()
    assert not alone.ended
    clock.now_s += 2.0
    engine.run()
    assert alone.ended == "finished", "nor does it wait for ever"


def test_its_own_token_does_not_wait_for_an_endless_answer(toy: MakeEngine):
    engine = toy(hint_share=0.5, blocks=60)
    saved_and_gone(engine, 1)
    clock = Clock(engine)
    word = hint(engine, prompt_of(1, 200), eta_s=0.05)
    came = engine.ask(prompt_of(1, 230), 200)
    for _ in range(20):
        engine.step()
    assert came.given
    assert not word.request.num_computed_tokens
    clock.now_s += 31.0
    for _ in range(5):
        engine.step()
    assert word.ended == "finished"
    assert not came.ended
    engine.run()
    assert not wrong_answers(engine)


def test_what_a_hint_brought_outlives_what_nobody_wants(toy: MakeEngine):
    engine = toy(hint_share=0.5, blocks=40)
    saved_and_gone(engine, 1)
    hint(engine, prompt_of(1, 200), eta_s=FAR)
    engine.run()
    # Twice as much as is free passes through the pool.
    for seed in (2, 3, 4, 5):
        engine.ask(prompt_of(seed, 240), 1)
        engine.run()
    came = engine.ask(prompt_of(1, 200), 1)
    engine.step()
    assert came.request.num_computed_tokens >= 192
    assert engine.half.stats().loaded_bytes == 12 * BLOCK_BYTES, "once, by the hint"


def test_a_hint_expires_and_keeps_nothing(toy: MakeEngine):
    engine = toy(hint_share=0.5)
    saved_and_gone(engine, 1)
    clock = Clock(engine)
    hint(engine, prompt_of(1, 200), eta_s=FAR, expiry_s=5.0)
    engine.run()
    assert engine.half._device.prefetch_leased == 12
    clock.now_s += FAR + 6.0
    engine.ask(prompt_of(2, 20), 1)
    engine.run()
    assert outcomes(engine) == {"expired": 1}
    assert engine.half._device.prefetch_leased == 0
    clock.now_s += 60.0
    engine.ask(prompt_of(3, 20), 1)
    engine.run()
    assert engine.half.stats().prefetch_bytes["wasted"] == 12 * BLOCK_BYTES
    assert_nothing_left(engine)


def test_whoever_leaves_before_the_answer_takes_the_hint_back(toy: MakeEngine):
    engine = toy(hint_share=0.5, window_bytes=BLOCK_BYTES)
    saved_and_gone(engine, 1)
    word = hint(engine, prompt_of(1, 200), eta_s=FAR)
    engine.step()
    engine.abort(word)
    engine.run()
    assert outcomes(engine) == {"withdrawn": 1}
    assert_nothing_left(engine)


def test_a_later_hint_of_a_session_takes_the_place_of_the_first(toy: MakeEngine):
    """Within the bounds of one: neither its number nor its blocks count twice."""
    engine = toy(blocks=40, hints=1, hint_share=0.4, prefetch_share=0.9)
    saved_and_gone(engine, 1)
    hint(engine, prompt_of(1, 200), eta_s=FAR)
    engine.run()
    again = hint(engine, prompt_of(1, 230), eta_s=2 * FAR)
    engine.run()
    assert again.told == {"forebay": {"hint": {"found_tokens": 192, "expiry_s": 60.0}}}
    assert outcomes(engine) == {"renewed": 1}
    other = hint(engine, prompt_of(2, 200), eta_s=FAR)
    engine.run()
    assert other.told == {"forebay": {"hint": {"refused": "1 hints are open"}}}
    came = engine.ask(prompt_of(1, 260), 4)
    engine.run()
    assert came.ended == "finished"
    assert outcomes(engine) == {"renewed": 1, "refused": 1, "claimed": 1}
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


def test_a_hint_is_renewed_before_its_own_request_was_answered(toy: MakeEngine):
    engine = toy(hints=1, hint_share=0.5, window_bytes=BLOCK_BYTES)
    saved_and_gone(engine, 1)
    for lane in LANES:
        engine.mover.hold_lane(Direction.LOAD, lane)
    words = [hint(engine, prompt_of(1, 200), eta_s=FAR)]
    for _ in range(5):
        engine.step()
    words.append(hint(engine, prompt_of(1, 200), eta_s=FAR))
    for _ in range(5):
        engine.step()
    assert not words[0].request.num_computed_tokens, "it computes what the later one loads"
    for lane in LANES:
        engine.mover.release_lane(Direction.LOAD, lane)
    engine.run()
    assert [word.ended for word in words] == ["finished"] * 2
    assert outcomes(engine) == {"renewed": 1}
    engine.ask(prompt_of(1, 260), 4)
    engine.run()
    assert outcomes(engine) == {"renewed": 1, "claimed": 1}
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"hints": 1}, "1 hints are open"),
        ({"hint_share": 0.5}, "hints may keep 19 blocks, and 12 are spoken for"),
        ({"mode": "b3"}, "the mode does not look ahead"),
    ],
)
def test_pitfall_12_hints_are_bounded_and_refused_ones_counted(
    toy: MakeEngine, options: dict[str, Any], why: str
):
    engine = toy(**{"blocks": 40, "hint_share": 1.0, "prefetch_share": 0.9, **options})
    saved_and_gone(engine, 1, 2)
    words = [hint(engine, prompt_of(seed, 200), eta_s=FAR) for seed in (1, 2)]
    engine.run()
    assert words[1].told == {"forebay": {"hint": {"refused": why}}}
    assert engine.half._hints.outcomes[HintOutcome.REFUSED] >= 1
    assert words[1].ended == "finished", "and is answered like any other request"
    assert not wrong_answers(engine)


def test_pitfall_12_the_expiry_is_cut_to_what_the_operator_allows(toy: MakeEngine):
    engine = toy(hint_share=0.5, hint_expiry_s=7.0)
    word = hint(engine, prompt_of(1, 200), eta_s=FAR, expiry_s=9999.0)
    engine.run()
    assert word.told == {"forebay": {"hint": {"found_tokens": 0, "expiry_s": 7.0}}}


def test_who_waits_comes_before_hints(toy: MakeEngine):
    """A queue full of hints takes no room of a request, whose load displaces theirs."""
    engine = toy(blocks=34, most_running=1, hint_share=1.0, prefetch_share=0.9)
    saved_and_gone(engine, 1, 2, 3)
    for seed in (1, 2):
        hint(engine, prompt_of(seed, 200), eta_s=FAR)
    engine.run()
    came = engine.ask(prompt_of(3, 200), 4)
    engine.run()
    assert engine.half.stats().sources[Source.HOST] == 12
    assert came.request.num_preemptions == 0
    assert not wrong_answers(engine)


def test_a_hint_whose_bounds_are_over_goes_on_as_a_request(toy: MakeEngine):
    engine = toy(hint_share=0.5, window_bytes=BLOCK_BYTES)
    saved_and_gone(engine, 1)
    clock = Clock(engine)
    for lane in (0, 1):
        engine.mover.hold_lane(0, lane)
    word = hint(engine, prompt_of(1, 200), eta_s=0.0, expiry_s=1.0)
    for _ in range(5):
        engine.step()
    clock.now_s += 2.0
    for _ in range(30):
        engine.step()
    for lane in (0, 1):
        engine.mover.release_lane(0, lane)
    engine.run()
    assert word.ended == "finished"
    assert outcomes(engine) == {"expired": 1}
    assert not wrong_answers(engine)


def test_a_reset_of_the_connector_ends_hints(toy: MakeEngine):
    engine = toy(hint_share=0.5)
    saved_and_gone(engine, 1)
    hint(engine, prompt_of(1, 200), eta_s=FAR)
    engine.run()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert outcomes(engine) == {"dropped": 1}
    engine.ask(prompt_of(1, 200), 4)
    engine.run()
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


def test_hints_end_with_look_ahead(toy: MakeEngine):
    """Else their clients would wait for what nobody brings, beside others until they expire."""
    engine = toy(blocks=60, prefetch_share=0.0)
    saved_and_gone(engine, 1)
    engine.ask(prompt_of(2, 20), 200)
    word = hint(engine, prompt_of(1, 200), eta_s=FAR)
    for _ in range(20):
        engine.step()
    assert not word.ended
    engine.half._mode_file._mode = Mode.ASYNCHRONOUS
    for _ in range(20):
        engine.step()
    assert word.ended
    assert outcomes(engine) == {"dropped": 1}
    engine.run()
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


def test_vllms_own_envelope_of_hints_is_read(toy: MakeEngine):
    hints = pytest.importorskip("vllm.v1.kv_hints")
    engine = toy(hint_share=0.5)
    saved_and_gone(engine, 1)
    actions = [
        hints.KvHintAction("a", "retain", "1", {"ttl": 3}),
        hints.KvHintAction("b", "prefetch", "1", {"eta_s": FAR}),
    ]
    engine.ask(prompt_of(1, 200), 1, kv_hints=hints.KvHintsEnvelope("1", "m", actions))
    engine.run()
    assert engine.half._device.prefetch_leased == 12
