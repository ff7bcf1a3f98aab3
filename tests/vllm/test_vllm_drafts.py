"""Speculative decoding: guesses that are right or wrong, over vLLM's real scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

from test_vllm_idle_lives import live, settings
from vllm_toy import VOCAB, answers, assert_nothing_left, prompt_of, wrong_answers
from vllm_toy_bytes import Watched
from vllm_toy_drafts import WITH_LAYERS, DraftingEngine, DraftPass

from forebay.core.ledger import MissReason, Source
from forebay.core.rates import Rates
from forebay.core.requests import Waiting
from forebay.core.waiting import WaitingLine
from forebay.vllm.adapter import Step
from forebay.vllm.scheduler.pool import VllmDevicePool
from forebay.vllm.scheduler.roster import Roster
from forebay.vllm.worker import WorkerHalf

METHODS = ("ngram", "suffix", *WITH_LAYERS)
WHOLE = 12 * 16

MakeDrafting = Callable[..., DraftingEngine]


@pytest.fixture
def drafting(tiny_llama: Path):
    """Makes engines that guess, and closes them."""
    engines: list[DraftingEngine] = []

    def make(**options: Any) -> DraftingEngine:
        engines.append(DraftingEngine(tiny_llama, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lag", [0, 1])
def test_what_left_the_device_comes_back(drafting: MakeDrafting, method: str, lag: int):
    engine = drafting(method=method, lag=lag)
    first = engine.ask(prompt_of(1, 200), 60)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.ask(first.prompt + first.given, 60)
    engine.run()
    assert not wrong_answers(engine)
    assert engine.guessed > engine.right > 20
    assert engine.half.stats().sources[Source.HOST] >= 15 - 1
    assert_nothing_left(engine)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(4))
def test_random_lives(drafting: MakeDrafting, method: str, seed: int):
    dice = random.Random(seed + 100 * METHODS.index(method))
    options = settings(dice) | {"early": dice.random() < 0.5}
    if method in WITH_LAYERS:
        options["ranks"] = 1
    engine = drafting(method=method, seed=seed, **options)
    live(engine, dice, steps=200)
    engine.run()
    assert not wrong_answers(engine)
    assert engine.right > 20
    assert_nothing_left(engine)


def computed(engine: DraftingEngine) -> int:
    """Tokens of prompts that were computed so far."""
    return engine.half.books.tally.prompt_tokens[Source.RECOMPUTED]


@pytest.mark.parametrize("length", [WHOLE, WHOLE + 8])
@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle"])
def test_what_comes_from_host_memory_is_used_as_what_is_there(
    drafting: MakeDrafting, method: str, length: int
):
    """By EAGLE vLLM computes the last block that it finds once more."""
    engine = drafting(method=method)
    counts: list[int] = []
    for where in ("nowhere", "device", "host"):
        if where == "host":
            assert engine.scheduler.reset_prefix_cache()
        before = computed(engine)
        engine.ask(prompt_of(1, length), 8)
        engine.run()
        counts.append(computed(engine) - before)
    again = (16 if method == "eagle" else 0) + length % 16
    if length == WHOLE:
        # All but the last block is looked up, and that one copied where all before it was found.
        again = 2 * 16 if method == "eagle" else 1
    assert counts == [length, again, again]
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


DROPPED = {"ngram": 0, "draft_model": 0, "eagle": 1, "eagle3": 1, "mtp": 1}
"""Blocks of what it finds, from the last, that vLLM computes once more."""


@pytest.mark.parametrize("length", [WHOLE, WHOLE + 8])
@pytest.mark.parametrize(
    ("method", "rule"),
    [*((each, "kept") for each in DROPPED), ("eagle", "broken"), ("mtp", "broken")],
)
def test_what_is_computed_once_more_is_no_false_miss_and_no_waste(
    drafting: MakeDrafting, monkeypatch: pytest.MonkeyPatch, method: str, rule: str, length: int
):
    """By it those before are found. A block that ends its prompt is not even looked up."""
    dropped = DROPPED[method]
    if rule == "broken":
        monkeypatch.setattr("forebay.vllm.connector.dropped_blocks", lambda config: 0)
    engine = drafting(method=method, most_running=1)
    engine.ask(prompt_of(1, length), 1)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    # It waits while this one runs, and so its blocks are prefetched.
    engine.ask(prompt_of(2, 20), 60)
    engine.step()
    before = engine.half.stats()
    engine.ask(prompt_of(1, length), 1)
    engine.run()
    after = engine.half.stats()
    misses = {why: after.misses[why] - before.misses[why] for why in MissReason}
    looked_up = (length - dropped) // 16
    last = length // 16 - looked_up + dropped
    seen = (misses, after.loaded_bytes - before.loaded_bytes, after.prefetch_bytes["used"])
    loaded = looked_up * engine.half.settings.block_bytes
    right = (dict.fromkeys(MissReason, 0) | {MissReason.LAST: last}, loaded, loaded)
    assert (seen == right) == (rule == "kept"), seen
    assert_nothing_left(engine)


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_a_match_of_which_nothing_is_read_is_not_loaded(drafting: MakeDrafting, method: str):
    engine = drafting(method=method, min_load_tokens=1)
    for length in (1, 2):
        before = engine.half.stats()
        for _ in range(2):
            assert engine.scheduler.reset_prefix_cache()
            engine.ask(prompt_of(length, length * 16 + 8), 1)
            engine.run()
        after = engine.half.stats()
        reads = length > DROPPED[method]
        loaded = (after.loaded_bytes - before.loaded_bytes) // engine.half.settings.block_bytes
        assert loaded == reads * length
        assert after.misses[MissReason.SHORT] - before.misses[MissReason.SHORT] == (not reads)
        given = after.misses[MissReason.LAST] - before.misses[MissReason.LAST]
        assert given == (DROPPED[method] if reads else 0)


@pytest.mark.parametrize("rule", ["kept", "broken"])
def test_by_eagle_the_last_block_that_is_found_shows_that_the_others_are_right(
    drafting: MakeDrafting, monkeypatch: pytest.MonkeyPatch, rule: str
):
    """So it is loaded, though nothing reads it: without it vLLM computes one more."""
    if rule == "broken":
        match = WaitingLine._match

        def one_less(self: WaitingLine, entry: Waiting) -> None:
            entry.usable = min(entry.usable, 11)
            match(self, entry)

        monkeypatch.setattr(WaitingLine, "_match", one_less)
    engine = drafting(method="eagle")
    engine.ask(prompt_of(1, WHOLE + 8), 8)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    before = computed(engine)
    engine.ask(prompt_of(1, WHOLE + 8), 8)
    engine.run()
    assert computed(engine) - before == (16 + 8 if rule == "kept" else 2 * 16 + 8)


@pytest.mark.parametrize("rule", ["kept", "broken"])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_the_last_block_is_not_the_one_behind_it_that_is_for_drafts(
    drafting: MakeDrafting, monkeypatch: pytest.MonkeyPatch, method: str, rule: str
):
    """Where others decode vLLM makes room for drafts at once, of which there are none yet."""
    if rule == "broken":
        monkeypatch.setattr(
            "forebay.vllm.connector.last_block", lambda blocks, *_: blocks.blocks[0][-1].block_id
        )
    engine = drafting(method=method)
    engine.ask(prompt_of(1, WHOLE), 1)
    engine.run()
    decodes = engine.ask(prompt_of(2, 20), 60)
    while not decodes.given:
        engine.step()
    again = engine.ask(prompt_of(1, WHOLE), 8)
    engine.run()
    assert (again.given == answers(again.prompt, 8)) == (rule == "kept")
    assert_nothing_left(engine)


@pytest.mark.parametrize("rule", ["kept", "broken"])
@pytest.mark.parametrize("early", [False, True])
def test_a_step_counts_as_launched_behind_its_drafts(
    drafting: MakeDrafting, monkeypatch: pytest.MonkeyPatch, early: bool, rule: str
):
    """vLLM's first model runner asks what is new before it: a save could read the layer then."""
    engine = drafting(method="draft_model", early=early)
    worker: WorkerHalf = engine.worker.worker_half
    launched: list[bool] = []
    through, step_over = DraftPass.through_own, WorkerHalf.step_over

    def watched(self: DraftPass, content: Any, drafts: list[int]) -> None:
        launched.append(worker._launched)
        through(self, content, drafts)

    def at_once(self: WorkerHalf) -> None:
        self.launched()
        step_over(self)

    monkeypatch.setattr(DraftPass, "through_own", watched)
    if rule == "broken":
        monkeypatch.setattr(WorkerHalf, "step_over", at_once)
    engine.ask(prompt_of(1, 100), 20)
    engine.run()
    assert any(launched) == (early and rule == "broken")


@pytest.mark.parametrize(("method", "waits"), [("ngram", False), ("draft_model", True)])
def test_a_load_waits_for_layers_that_may_write_behind_the_tokens_of_their_step(
    drafting: MakeDrafting, monkeypatch: pytest.MonkeyPatch, method: str, waits: bool
):
    """The tokens of a step are known, and what it used is free, before its drafts are made."""
    engine = drafting(method=method)
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    stamps: list[int] = []
    settle = VllmDevicePool._allocate_for_load

    def watched(self: VllmDevicePool, blocks: Any, protected: bool) -> Any:
        lost = settle(self, blocks, protected)
        stamps.extend(np.asarray(self.stamps(blocks)).tolist())
        return lost

    monkeypatch.setattr(VllmDevicePool, "_allocate_for_load", watched)
    steps = engine.half._store.newest_step
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    assert stamps
    assert {stamp >= steps for stamp in stamps} == {waits}


@pytest.mark.parametrize("rule", ["kept", "broken"])
def test_room_is_left_for_the_drafts_of_the_next_step(
    drafting: MakeDrafting, monkeypatch: pytest.MonkeyPatch, rule: str
):
    if rule == "broken":
        monkeypatch.setattr("forebay.vllm.connector.draft_slots", lambda config: 0)
    engine = drafting(method="draft_model", most=20, step_tokens=200, blocks=80)
    guarded: list[int] = []
    monkeypatch.setattr(VllmDevicePool, "guard", lambda self, count: guarded.append(count))
    lack: list[int] = []
    for answer in (1, 60):
        engine.run()
        # So many that there is no room for who comes, and the second time nothing to compute.
        for seed in range(12):
            engine.ask(prompt_of(seed, 32), answer)
    schedule = engine.scheduler.schedule

    def watched() -> Any:
        before, most = engine.pool.get_num_free_blocks(), guarded[-1:]
        output = schedule()
        taken = before - engine.pool.get_num_free_blocks()
        lack.extend(taken - each for each in most)
        return output

    engine.scheduler.schedule = watched
    while sum(1 for _ in engine.open()) > 8:  # 4 wait
        engine.step()
    assert (max(lack) > 0) == (rule == "broken")
    engine.run()
    assert not wrong_answers(engine)


@pytest.mark.parametrize("lag", [0, 1])
def test_drafts_are_no_prompt(drafting: MakeDrafting, monkeypatch: pytest.MonkeyPatch, lag: int):
    """They would make a step look as one that computes a prompt, slowly."""
    engine = drafting(lag=lag)
    steps: list[tuple[int, int]] = []
    monkeypatch.setattr(Rates, "stepped", lambda self, *told: steps.append(told[:2]))
    engine.ask(prompt_of(1, 60), 40)
    engine.run()
    assert engine.right > 10
    assert steps[0] == (60, 0)
    assert set(steps[1:]) == {(0, 1)}


@pytest.mark.parametrize("rule", ["kept", "broken"])
def test_nobody_finds_a_block_that_ends_with_a_wrong_draft(
    drafting: MakeDrafting, monkeypatch: pytest.MonkeyPatch, rule: str
):
    """vLLM named it for a step, and took its request out of that again."""
    if rule == "broken":
        follow = Roster.follow

        def drafts_too(self: Roster, step: Step, preempted: Any) -> Any:
            filled = follow(self, step, preempted)
            for part in step.scheduled:
                self._here[part.request].computed = part.start + part.tokens
            return filled

        monkeypatch.setattr(Roster, "follow", drafts_too)
    engine = drafting(blocks=5, policy="priority")
    watched = Watched(engine)
    low = engine.ask(prompt_of(1, 24), 20, priority=5)
    monkeypatch.setattr(engine, "_guess", lambda asked: [VOCAB] if asked is low else [])
    engine.step()
    # Both begin a block in the same step, in which there is one.
    high = engine.ask(prompt_of(2, 10), 20, priority=0)
    while not engine.preempted:
        engine.step()
        watched.check_books()
    assert (len(low.given), len(high.given)) == (32 - 24, 17 - 10 + 1)
    if rule == "broken":
        with pytest.raises(AssertionError):
            watched.check_device()
        return
    watched.check_device()
    engine.run()
    assert not wrong_answers(engine)
    assert_nothing_left(engine)
