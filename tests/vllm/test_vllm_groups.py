"""Models of several groups of layers, over vLLM's real scheduler and block pool."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

import test_vllm_idle_lives as idle
from test_vllm_schedules import live, random_settings
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm_toy import BLOCK_BYTES, MakeEngine, assert_nothing_left, prompt_of, wrong_answers
from vllm_toy_bytes import Watched, content_of

from forebay.core.ledger import Source
from forebay.transfer.messages import Direction
from forebay.vllm import worker
from forebay.vllm.adapter import cached_blocks
from forebay.vllm.scheduler.near import NearLoads

TWO, SEVERAL = (0, 40), (70, 0, 24, 0, 40)


@pytest.mark.parametrize("windows", [TWO, SEVERAL])
def test_what_left_the_device_comes_back_from_host_memory(
    groups: MakeEngine, windows: tuple[int, ...]
):
    engine = groups(windows=windows, blocks=100)
    engine.ask(prompt_of(1, 200), 8)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.ask(prompt_of(1, 200), 8)
    engine.run()
    assert not wrong_answers(engine)
    assert engine.half.stats().sources[Source.HOST] == 200 // 16
    assert_nothing_left(engine)


@pytest.mark.parametrize("lag", [0, 2])
def test_of_a_window_the_last_blocks_alone_are_saved(groups: MakeEngine, lag: int):
    """At the end of the prompt, and of what was computed: not the window of each position."""
    engine = groups(windows=TWO, blocks=100, lag=lag)
    engine.ask(prompt_of(1, 300), 40)
    engine.run()
    path, window = 338 // 16, -(-39 // 16)
    saved = engine.half.stats().saved_bytes // BLOCK_BYTES
    assert saved == path + 2 * window
    assert engine.scheduler.reset_prefix_cache()
    engine.ask(prompt_of(1, 300), 1)
    engine.run()
    # The first end brings its own window, and no other.
    assert engine.half.stats().loaded_bytes // BLOCK_BYTES == 299 // 16 + window
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


def test_where_two_prompts_part_the_third_one_finds_them(groups: MakeEngine):
    """Nobody knows before the second one comes that a hit could end there."""
    engine = groups(windows=TWO, blocks=100)
    found: list[int] = []
    for seed in (2, 3, 4):
        engine.ask(prompt_of(1, 160) + prompt_of(seed, 60), 1)
        engine.run()
        found.append(engine.half.stats().sources[Source.HOST])
        assert engine.scheduler.reset_prefix_cache()
    assert found == [0, 0, 10]
    assert not wrong_answers(engine)


def test_a_conversation_goes_on_behind_its_last_answer(groups: MakeEngine):
    engine = groups(windows=SEVERAL, blocks=200)
    first = engine.ask(prompt_of(1, 100), 60)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.ask([*first.prompt, *first.given, *prompt_of(2, 30)], 4)
    engine.run()
    # The last token of an answer is never computed.
    assert engine.half.stats().sources[Source.HOST] == 159 // 16
    assert not wrong_answers(engine)


def test_a_window_that_is_not_all_there_is_no_end(
    groups: MakeEngine, monkeypatch: pytest.MonkeyPatch
):
    """vLLM frees what a window has passed, and gives it away. It is a miss then."""
    engine = groups(windows=TWO, blocks=100)
    monkeypatch.setattr("forebay.vllm.scheduler.beside.cached_blocks", but_the_first)
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    assert engine.half.stats().saved_bytes // BLOCK_BYTES == 200 // 16
    assert engine.scheduler.reset_prefix_cache()
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    assert engine.half.stats().loaded_bytes == 0
    assert not wrong_answers(engine)


def but_the_first(pool: Any, contents: Iterable[bytes], group: int) -> list[Any]:
    return [None, *cached_blocks(pool, contents, group)[1:]]


def test_a_window_that_is_lost_is_no_end(groups: MakeEngine):
    """An earlier one is, whose window is there still."""
    engine = groups(windows=TWO, blocks=100)
    for length in (100, 200):
        engine.ask(prompt_of(1, length), 1)
        engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.half._catch_up()
    waits = engine.ask([*prompt_of(1, 200), 1], 1)
    line = engine.half._line
    (entry,) = line
    assert (entry.length, entry.beside) == (12, 3)
    engine.half._store.unpublish(int(entry.blocks[-1]))
    line.refresh(entry)
    assert (entry.length, entry.beside) == (6, 3)
    engine.abort(waits)
    engine.run()
    assert_nothing_left(engine)


def test_blocks_whose_load_failed_are_not_loaded_again(
    groups: MakeEngine, monkeypatch: pytest.MonkeyPatch
):
    """While others wait for them too, and hold them."""
    monkeypatch.setattr(NearLoads, "approach", lambda *_: None)
    engine = groups(windows=TWO, blocks=100, window_bytes=BLOCK_BYTES, most_running=1)
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    # The second one of the window's three.
    engine.mover.fail_window(Direction.LOAD, 13)
    for last in (1, 2, 3):
        engine.ask([*prompt_of(1, 200), last], 1)
    engine.run()
    stats = engine.half.stats()
    assert stats.failed_loads == 1
    assert stats.loaded_bytes // BLOCK_BYTES <= 12 + 2
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


def test_what_vllm_computed_again_is_not_loaded(groups: MakeEngine):
    """Its window neither, which host memory had alone."""
    engine = groups(windows=TWO, blocks=100, min_load_tokens=0)
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.ask(prompt_of(1, 200), 1, params={"forebay": {"no_cache": True}})
    engine.run()
    engine.ask([*prompt_of(1, 200), 1], 1)
    engine.run()
    assert engine.half.stats().loaded_bytes == 0
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


def test_vllm_may_find_more_than_is_known_here(groups: MakeEngine):
    """Of what is not saved nobody here knows: nothing is waited for that is less."""
    engine = groups(windows=TWO, blocks=100, mode="b3", min_load_tokens=0)
    engine.ask(prompt_of(1, 100), 1)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.half._catch_up()
    alone = {"forebay": {"no_save": True, "no_cache": True}}
    engine.ask(prompt_of(1, 200), 1, params=alone)
    engine.run()
    busy = engine.ask(prompt_of(9, 30), 20)
    while not busy.given:
        engine.step()
    engine.ask([*prompt_of(1, 200), 1], 1)
    engine.run()
    assert engine.half.stats().loaded_bytes == 0
    assert not wrong_answers(engine)


def test_who_waits_hears_of_an_end_that_comes_later(groups: MakeEngine):
    """Of one behind blocks that it knew before."""
    engine = groups(windows=TWO, blocks=100, most_running=1)
    first = engine.ask(prompt_of(1, 200), 30)
    engine.ask([*first.prompt, *engine.answer_to(first, 30), 1], 1)
    line = engine.half._line
    entry = list(line)[1]
    ends: list[int] = []
    while not first.ended:
        engine.step()
        line.refresh(entry)
        ends.append(entry.length)
    assert sorted(set(ends)) == [0, 12, 229 // 16]
    engine.run()
    assert not wrong_answers(engine)


def test_what_a_preempted_request_leaves_is_found_again(groups: MakeEngine):
    engine = groups(windows=TWO, blocks=50, most_running=2, step_tokens=200, min_load_tokens=0)
    both = [engine.ask(prompt_of(seed, 200), 200) for seed in (1, 2)]
    while not engine.preempted:
        engine.step()
    assert not any(asked.ended for asked in both)
    engine.run()
    # Nothing but the prompts: what it had answered neither.
    assert engine.half.stats().sources[Source.RECOMPUTED] == 2 * (200 // 16)
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


def test_what_ended_lately_is_kept_with_its_windows(groups: MakeEngine):
    engine = groups(windows=TWO, blocks=100)
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    (ended,) = engine.half._lately._ended
    contents = [content_of(engine.half._device, block) for block in ended.blocks.tolist()]
    assert [group for _, group in contents] == [0] * 12 + [1] * 3
    engine.ask([*prompt_of(1, 200), 1], 1)
    assert ended.back


def test_hints_take_room_for_windows_too(groups: MakeEngine):
    """Of 100 blocks 14 are one of 11 with a window of 3."""
    engine = groups(windows=TWO, blocks=101, hint_share=0.14)
    refused: list[str] = []
    for length in (176, 192):
        asked = engine.ask(prompt_of(1, length), 1, params={"forebay": {"hint": {}}})
        refused.append(engine.half._roster.find(asked.request).hint_refused)
        engine.abort(asked)
    assert refused == ["", "hints may keep 14 blocks, and 0 are spoken for"]


def test_events_of_host_memory_tell_the_group(groups: MakeEngine):
    engine = groups(windows=(40, 0), blocks=100, kv_events=True)
    asked = engine.ask(prompt_of(1, 200), 1)
    engine.run()
    there = [each for each in engine.events if isinstance(each, BlockStored)]
    stored = [each for each in there if each.medium == "CPU"]
    hashes = [maybe_convert_block_hash(each) for each in asked.request.block_hashes]
    of_window, of_path = ([one for one in stored if one.group_idx == each] for each in (0, 1))
    assert [one for each in of_path for one in each.block_hashes] == hashes
    assert {each.kv_cache_spec_kind for each in of_path} == {"full_attention"}
    assert [one for each in of_window for one in each.block_hashes] == hashes[9:]
    for each in of_window:
        place = hashes.index(each.block_hashes[0])
        assert each.parent_block_hash == hashes[place - 1]
        assert each.token_ids == asked.prompt[16 * place : 16 * place + 16]
        assert each.kv_cache_spec_kind == "sliding_window"
        assert each.kv_cache_spec_sliding_window == 40
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.ask([5], 1)
    engine.run()
    gone = [each for each in engine.events if isinstance(each, BlockRemoved)]
    here = [each for each in gone if each.medium == "CPU" and each.group_idx == 0]
    assert {one for each in here for one in each.block_hashes} == set(hashes[9:])


@pytest.mark.parametrize("windows", [TWO, SEVERAL])
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("seed", range(6))
def test_random_lives(groups: MakeEngine, seed: int, lag: int, windows: tuple[int, ...]):
    dice = random.Random(seed)
    settings = random_settings(dice)
    for each in ("blocks", "host_bytes"):
        settings[each] *= len(windows)
    engine = groups(windows=windows, lag=lag, **settings)
    for _ in range(2):
        engine.mover.fail_window(dice.choice([Direction.LOAD, Direction.SAVE]), dice.randrange(60))
        live(engine, dice, steps=150)
    engine.run()
    assert not wrong_answers(engine)
    assert sum(asked.ended == "finished" for asked in engine.asked.values()) > 10
    assert_nothing_left(engine)


@pytest.mark.parametrize("windows", [TWO, SEVERAL])
@pytest.mark.parametrize("seed", range(8))
def test_random_lives_of_an_engine_that_is_idle_at_times(
    groups: MakeEngine, monkeypatch: pytest.MonkeyPatch, seed: int, windows: tuple[int, ...]
):
    """After each step the books are vLLM's, and every block has the right bytes in both tiers."""
    monkeypatch.setattr(worker, "_AWAIT_S", 0.05)
    dice = random.Random(seed)
    settings = idle.settings(dice)
    for each in ("blocks", "host_bytes"):
        settings[each] *= len(windows)
    engine = groups(windows=windows, **settings)
    engine.scheduler.use_v2_model_runner = dice.random() < 0.3
    idle.live(engine, dice, steps=300)
    engine.run()
    engine.half._hints.drop_all()
    assert not wrong_answers(engine)
    assert sum(asked.ended == "finished" for asked in engine.asked.values()) > 10
    assert_nothing_left(engine)


def test_a_few_blocks_of_a_window_are_worth_a_load_that_all_of_the_path_hangs_on(
    groups: MakeEngine,
):
    """Three blocks are fewer than `min_load_tokens`, and without them nothing is found."""
    engine = groups(windows=(0, 40), blocks=100)
    engine.ask(prompt_of(1, 400), 1)
    engine.run()
    cached = [block for block in engine.pool.blocks if block.block_hash is not None]
    engine.pool.evict_blocks({block.block_id for block in cached if block.block_hash[-1] == 1})
    engine.ask([*prompt_of(1, 400), 1], 1)
    engine.run()
    assert engine.half.stats().loaded_bytes == 3 * BLOCK_BYTES
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


@pytest.mark.parametrize("windows", [TWO, (40, 0)])
@pytest.mark.parametrize("filled", ["in whole", "begun"])
def test_nobody_finds_what_a_request_was_to_fill_that_is_preempted_out_of_its_step(
    groups: MakeEngine, filled: str, windows: tuple[int, ...]
):
    """Of any group; and what others fill in that step is found."""
    engine = groups(windows=windows, blocks=26, step_tokens=80, policy="priority")
    watched = Watched(engine)
    tokens = 64 if filled == "in whole" else 60
    engine.scheduler.scheduler_config.long_prefill_token_threshold = tokens
    low = engine.ask(prompt_of(1, 250), 4, priority=5)
    engine.step()
    high = engine.ask(prompt_of(2, 15), 6, priority=0)
    while not (low.ended and high.ended):
        engine.step()
        watched.check_books()
        watched.check_device()
        watched.check_host()
    engine.run()
    assert engine.preempted > 0
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


@pytest.mark.parametrize(
    ("blocks", "length", "delay"),
    [(41, 13, 3), (42, 14, 4), (42, 13, 3), (45, 13, 4), (46, 13, 4)],
)
def test_nobody_finds_what_was_to_be_filled_where_another_has_the_same(
    groups: MakeEngine, blocks: int, length: int, delay: int
):
    """Two compute one prompt, and one of them is preempted out of its step."""
    engine = groups(
        windows=(0, 40), blocks=blocks, step_tokens=200, policy="priority", most_running=4
    )
    watched = Watched(engine)
    engine.scheduler.scheduler_config.long_prefill_token_threshold = 27
    asked = [engine.ask(prompt_of(1, 250), 4, priority=5)]
    asked.append(engine.ask(prompt_of(1, 250), 4, priority=6, reads=False))
    for _ in range(delay):
        engine.step()
    asked.append(engine.ask(prompt_of(2, length), 6, priority=0))
    while not all(each.ended for each in asked):
        engine.step()
        watched.check_books()
        watched.check_device()
        watched.check_host()
    engine.run()
    assert not wrong_answers(engine)
    assert_nothing_left(engine)
