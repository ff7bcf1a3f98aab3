"""What users of such connectors ran into, by rows: public issues and requests of vLLM.

Each row of `ROWS` has at least one test, here or in another file of this folder, named by its
number (`test_pitfall_07_...`); `NOT_HERE` says which have none, and why.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm_toy import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    LANES,
    Asked,
    MakeEngine,
    ToyEngine,
    answers,
    assert_nothing_left,
    prompt_of,
    wrong_answers,
)

from forebay.core.ledger import MissReason, Source
from forebay.errors import SettingsError
from forebay.machine.memory import Memory
from forebay.transfer import host
from forebay.transfer.host import HostMemory
from forebay.transfer.messages import Direction

ROWS = {
    1: "41784: waiting requests are not looked at while running ones use the budget up",
    2: "42086, 42044, 44731, 42321, 55724: prefetching without bound or order",
    3: "49902: what was loaded is evicted by what is loaded next",
    4: "42371, 42568, 29877: loads that nothing bounds and nothing can take back",
    5: "44560, 45388, 57104: loads and requests that wait for each other's blocks",
    6: "vllm-ascend 16315: preempted over and over while blocks come back",
    7: "44294, 44295: many behind one load",
    8: "47282, 45704: a copy and a step that touch the same block at once",
    9: "53498: saved and never found, or never saved",
    10: "43946: host memory that only mirrors the GPU",
    11: "35259: what nobody asks for again is saved",
    12: "51428, 52113, 53421, 57103, 37003, 8333, 23083, 27046: hints",
    13: "48504, 54777: disks that the GPU reads by itself",
    14: "52784, 54327, 54779: a disk tier that grows without bound",
    15: "50031, 57106: loads stand behind saves",
    16: "42632, 54578, 54792: nothing is served until all memory is pinned",
    17: "53042, 48436, 55428: more memory than was asked for",
    18: "49250, 52268: wrong tokens after a load that failed",
    19: "32604, 26329, 42348, 39702: what was found is gone when it is taken",
}
NOT_HERE = {
    13: "the connector has no disk tier",
    14: "the connector has no disk tier",
}


def test_every_row_has_a_test():
    text = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    tested = {
        int(number) for number in re.findall(r"^def test_pitfall_(\d\d)_", text, re.MULTILINE)
    }
    assert tested | set(NOT_HERE) == set(ROWS)
    assert not tested & set(NOT_HERE)


def saved_and_gone(engine: ToyEngine, *seeds: int, length: int = 200) -> None:
    """Prompts of these seeds are in host memory, and nothing is on the device."""
    for seed in seeds:
        engine.ask(prompt_of(seed, length), 1)
        engine.run()
    assert engine.scheduler.reset_prefix_cache()


def busy(engine: ToyEngine, tokens: int = 200) -> Asked:
    """The one run slot is taken by a long answer, which has begun."""
    runs = engine.ask([9], tokens)
    while not runs.given:
        engine.step()
    return runs


def found_here(engine: ToyEngine, asked: Asked) -> int:
    """Tokens of a waiting request that vLLM would find."""
    return engine.scheduler.kv_cache_manager.get_computed_blocks(asked.request)[1]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_pitfall_02_look_ahead_is_bounded_and_goes_by_the_queue(toy: MakeEngine, policy: str):
    share = 0.4
    engine = toy(most_running=1, blocks=61, policy=policy, prefetch_share=share)
    saved_and_gone(engine, 1, 2, 3, 4)
    runs = busy(engine, 400)
    # By priority the last one is first.
    queue = [engine.ask(prompt_of(seed, 200), 1, priority=10 - seed) for seed in (1, 2, 3, 4)]
    first = queue[0] if policy == "fcfs" else queue[-1]
    found: dict[str, int] = {}
    while found.get(first.request.request_id, 0) < 192:
        assert not runs.ended, found
        # A copy takes its time, whatever else this machine does.
        time.sleep(0.001)
        engine.step()
        assert engine.half._device.prefetch_leased <= share * 60
        found = {each.request.request_id: found_here(engine, each) for each in queue}
    assert sum(found.values()) <= share * 60 * BLOCK_TOKENS
    engine.run()
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


def test_pitfall_04_who_runs_takes_prefetched_blocks_at_once(toy: MakeEngine):
    engine = toy(most_running=1, blocks=31, prefetch_share=0.9)
    saved_and_gone(engine, 1, 2)
    runs = busy(engine, 440)
    for seed in (1, 2):
        engine.ask(prompt_of(seed, 200), 1)
    leased: list[int] = []
    while not runs.ended:
        engine.step()
        leased.append(engine.half._device.prefetch_leased)
    assert len(runs.given) == 440, "28 of 30 blocks"
    taken = max(leased) - leased[-1]
    assert max(leased) == 24
    assert taken >= 22
    assert engine.preempted == 0
    engine.run()
    stats = engine.half.stats()
    assert stats.prefetch_bytes["wasted"] >= taken * BLOCK_BYTES, "brought, and gone unread"
    assert not wrong_answers(engine)


@pytest.mark.parametrize("lag", [0, 2])
def test_pitfall_05_a_pool_for_one_serves_all_that_want_loads(toy: MakeEngine, lag: int):
    engine = toy(blocks=18, most_running=4, lag=lag, prefetch_share=0.9, window_bytes=BLOCK_BYTES)
    saved_and_gone(engine, 1, 2, 3, 4)
    for seed in (1, 2, 3, 4, 1, 2):
        engine.ask(prompt_of(seed, 220), 20)
    engine.run()
    assert engine.half.stats().sources[Source.HOST] > 0
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


def test_pitfall_06_nothing_is_preempted_while_a_load_gives_blocks_back(toy: MakeEngine):
    """Nor does vLLM wait for ever for a load that hangs."""
    if not hasattr(KVConnectorBase_V1, "has_pending_block_frees"):
        pytest.skip("this vLLM asks no connector before it preempts")
    engine = toy(blocks=20, most_running=2, prefetch_share=0.9, window_bytes=BLOCK_BYTES)
    saved_and_gone(engine, 1)
    clock_s = [engine.half._clock()]
    engine.half._clock = lambda: clock_s[0]
    for lane in LANES:
        engine.mover.hold_lane(Direction.LOAD, lane)
    engine.ask(prompt_of(1, 200), 1)
    engine.step()
    assert engine.half._flights.load_blocks == 12
    runs = [engine.ask([seed], 80) for seed in (5, 6)]
    for _ in range(60):
        engine.step()
    assert engine.half.gives_back_soon
    assert engine.preempted == 0
    clock_s[0] += 1000.0
    assert not engine.half.gives_back_soon
    for lane in LANES:
        engine.mover.release_lane(Direction.LOAD, lane)
    engine.run()
    assert [len(each.given) for each in runs] == [80, 80]
    assert not wrong_answers(engine)


def test_pitfall_09_all_that_was_computed_is_found_again(toy: MakeEngine):
    """Of prompts in several chunks and of answers, too: up to the last token, which is computed."""
    engine = toy(blocks=120, step_tokens=48)
    first = [engine.ask(prompt_of(seed, 150 + 17 * seed), 60) for seed in range(1, 6)]
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    before = engine.half.stats()
    more = [engine.ask(asked.prompt + asked.given + [7], 1) for asked in first]
    engine.run()
    # The last token of an answer was never computed, and no block with it is full before that.
    whole = sum((len(asked.prompt) - 2) // BLOCK_TOKENS for asked in more)
    after = engine.half.stats()
    assert after.sources[Source.HOST] - before.sources[Source.HOST] == whole
    assert not wrong_answers(engine)


def test_pitfall_10_host_memory_need_not_mirror_the_device(toy: MakeEngine):
    engine = toy(blocks=121, step_tokens=512, save_mode="on_evict")
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    assert engine.half.stats().saved_bytes == 0, "there is room on the device"
    for seed in range(2, 25):
        engine.ask(prompt_of(seed, 200), 1)
        engine.run()
    assert 0 < engine.half.stats().saved_bytes < 24 * 12 * BLOCK_BYTES
    # Among what is wanted that which ended last goes first: it has to be saved by then.
    assert engine.half.stats().evicted_blocks > 100
    assert engine.half.stats().dropped_dirty_blocks == 0
    for seed in range(1, 25):
        engine.ask(prompt_of(seed, 200), 1)
        engine.run()
    assert engine.half.stats().sources[Source.HOST] > 0
    assert not wrong_answers(engine)


def test_pitfall_11_what_is_too_short_to_come_back_is_not_saved(toy: MakeEngine):
    engine = toy(min_save_tokens=150)
    engine.ask(prompt_of(1, 100), 1)
    engine.run()
    assert engine.half.stats().saved_bytes == 0
    engine.ask(prompt_of(2, 200), 1)
    engine.run()
    assert engine.half.stats().saved_bytes == 12 * BLOCK_BYTES


def test_pitfall_15_loads_do_not_stand_behind_saves(toy: MakeEngine):
    engine = toy(blocks=60, window_bytes=BLOCK_BYTES)
    saved_and_gone(engine, 1)
    for lane in LANES:
        engine.mover.hold_lane(Direction.SAVE, lane)
    other = engine.ask(prompt_of(2, 300), 1)
    while not other.ended:
        engine.step()
    again = engine.ask(prompt_of(1, 200), 4)
    while not again.ended:
        engine.step()
    assert engine.half._flights.save_blocks, "saves have stood still all the time"
    for lane in LANES:
        engine.mover.release_lane(Direction.SAVE, lane)
    engine.run()
    assert again.given == answers(again.prompt, 4)
    assert engine.half.stats().sources[Source.HOST] > 0


def test_pitfall_16_what_is_pinned_so_far_is_used(toy: MakeEngine, monkeypatch: pytest.MonkeyPatch):
    ready = [0]
    monkeypatch.setattr(HostMemory, "ready_slots", lambda self: ready[0])
    engine = toy(blocks=80)
    for slots, seed in ((0, 1), (5, 2), (100, 3)):
        ready[0] = slots
        engine.ask([8], 1)
        engine.run()
        engine.ask(prompt_of(seed, 200), 1)
        engine.run()
        assert engine.half.stats().saved_bytes <= slots * BLOCK_BYTES
    engine.run()
    assert engine.half.stats().saved_bytes > 5 * BLOCK_BYTES
    assert engine.scheduler.reset_prefix_cache()
    engine.ask(prompt_of(3, 200), 4)
    engine.run()
    assert engine.half.stats().sources[Source.HOST] == 12
    assert not wrong_answers(engine)


def test_pitfall_17_no_more_memory_than_was_asked_for(toy: MakeEngine):
    asked = 333 * BLOCK_BYTES + 5
    arena: Any = toy(host_bytes=asked).worker.worker_half._host._arena
    assert arena.size_bytes == 333 * BLOCK_BYTES


def test_what_all_workers_take_together_has_to_fit_the_machine(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch
):
    """The kernel gives it to each, and kills who fills it."""
    room = Memory(1 << 40, 3 * 400 * BLOCK_BYTES, 0, None, [])
    monkeypatch.setattr(host, "read_memory", lambda tree: room)
    toy(ranks=3)
    with pytest.raises(SettingsError, match="does not fit"):
        toy(ranks=4)


def test_pitfall_19_to_look_up_takes_nothing_and_what_was_found_may_go(toy: MakeEngine):
    engine = toy(most_running=1, blocks=60)
    saved_and_gone(engine, 1)
    busy(engine, 400)
    waits = engine.ask(prompt_of(1, 200), 4)
    while found_here(engine, waits) < 192:
        assert waits.request.num_computed_tokens == 0, "its turn came first"
        time.sleep(0.001)
        engine.step()
    before = (engine.pool.get_num_free_blocks(), engine.half._device.prefetch_leased)
    told = {engine.half.asked(waits.request, 192) for _ in range(5)}
    after = (engine.pool.get_num_free_blocks(), engine.half._device.prefetch_leased)
    assert before == after
    assert len(told) == 1
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.run()
    assert engine.half.stats().misses[MissReason.ABSENT] > 0
    assert not wrong_answers(engine)
    assert_nothing_left(engine)
