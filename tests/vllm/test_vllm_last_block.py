"""Prompts that are found whole: one token is computed, on a copy of the last block."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

from vllm_toy import (
    BLOCK_BYTES,
    MakeEngine,
    ToyEngine,
    answers,
    assert_nothing_left,
    prompt_of,
    wrong_answers,
)

from forebay.core.ledger import MissReason, Source
from forebay.transfer.messages import Direction
from forebay.vllm.messages import Orders
from forebay.vllm.scheduler.last_block import LastBlocks
from forebay.vllm.scheduler.pool import VllmDevicePool
from forebay.vllm.worker import WorkerHalf

WHOLE = 12 * 16


def computed(engine: ToyEngine) -> int:
    """Tokens of prompts that were computed so far."""
    return engine.half.books.tally.prompt_tokens[Source.RECOMPUTED]


@pytest.mark.parametrize("rule", ["kept", "broken"])
@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_token_is_computed(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, where: str, rule: str, ranks: int
):
    engine = toy(ranks=ranks)
    engine.ask(prompt_of(1, WHOLE), 1)
    engine.run()
    if where == "host":
        assert engine.scheduler.reset_prefix_cache()
    if rule == "broken":
        begin = WorkerHalf.begin
        monkeypatch.setattr(
            WorkerHalf,
            "begin",
            lambda self, orders: begin(self, replace(orders, copies=())),
        )
    before = computed(engine)
    again = engine.ask(prompt_of(1, WHOLE), 8)
    engine.run()
    assert computed(engine) - before == 1
    assert (again.given == answers(again.prompt, 8)) == (rule == "kept")
    stats = engine.half.stats()
    assert stats.sources[Source(where)] == 12
    assert stats.misses[MissReason.LAST] == 0
    assert_nothing_left(engine)


def test_what_the_same_step_fills_is_not_copied(toy: MakeEngine):
    engine = toy(step_tokens=1000)
    first, second = (engine.ask(prompt_of(1, WHOLE), 8) for _ in range(2))
    engine.run()
    # Both started in the first step, and vLLM shared all blocks but the last.
    assert first.given == second.given == answers(first.prompt, 8)
    assert computed(engine) == WHOLE + 16
    assert_nothing_left(engine)


def test_a_request_that_goes_on_after_preemption_has_its_last_block_copied(toy: MakeEngine):
    engine = toy(blocks=30, most_running=4)
    asked = [engine.ask(prompt_of(seed, 112), 65) for seed in range(4)]
    engine.run()
    assert engine.preempted > 0
    assert all(each.ended == "finished" for each in asked)
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


@pytest.mark.parametrize("rule", ["kept", "broken"])
def test_what_is_copied_from_is_not_filled_meanwhile(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, rule: str
):
    """A load goes to free blocks at once, and the step with the copy may be far from run."""
    if rule == "broken":
        monkeypatch.setattr(LastBlocks, "_hold", lambda self, block: None)
    engine = toy(lag=2, blocks=30, most_running=2, prefetch_share=1.0, reserve_share=0.0)
    for seed in (1, 2):
        engine.ask(prompt_of(seed, WHOLE), 1)
        engine.run()
    held: list[int] = []
    monkeypatch.setattr(WorkerHalf, "begin", _noting(held, engine, WorkerHalf.begin))
    engine.ask(prompt_of(2, WHOLE), 4)
    engine.run()
    assert held == [1 if rule == "kept" else 0]
    assert_nothing_left(engine)


@pytest.mark.parametrize("rule", ["kept", "broken"])
def test_what_vllm_handed_out_while_it_was_saved_is_not_copied_from(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, rule: str
):
    """The block is in the books until its save has ended, of which the next steps do not know."""
    if rule == "broken":
        monkeypatch.setattr(VllmDevicePool, "given_up", lambda self, blocks: False)
    engine = toy(lag=1, step_tokens=512, window_bytes=BLOCK_BYTES)
    for lane in (0, 1):
        engine.mover.hold_lane(Direction.SAVE, lane)
    first = engine.ask(prompt_of(1, WHOLE), 1)
    # It ends later, and leaves blocks behind those of the first one.
    other = engine.ask(prompt_of(2, 96), 6)
    while not (first.ended and other.ended):
        engine.step()
    for _ in range(3):
        engine.step()
    release = threading.Timer(
        0.5, lambda: [engine.mover.release_lane(Direction.SAVE, lane) for lane in (0, 1)]
    )
    release.start()
    free = [block.block_id for block in engine.pool.free_block_queue.get_all_free_blocks()]
    # All blocks up to the last one of the first.
    takes = engine.ask(prompt_of(3, 16 * (free.index(first.table[-1]) + 1) - 3), 2)
    engine.step()
    again = engine.ask(prompt_of(1, WHOLE), 8)
    engine.run()
    release.join()
    assert takes.table[-1] == first.table[-1]
    assert again.table[:11] == first.table[:11]
    assert (again.given == answers(again.prompt, 8)) == (rule == "kept")
    assert_nothing_left(engine)


def _noting(
    held: list[int], engine: ToyEngine, begin: Callable[[WorkerHalf, Orders], None]
) -> Callable[[WorkerHalf, Orders], None]:
    def noted(self: WorkerHalf, orders: Orders) -> None:
        held.extend(engine.pool.blocks[each.source].ref_cnt for each in orders.copies)
        begin(self, orders)

    return noted


@pytest.mark.parametrize("rule", ["kept", "broken"])
def test_what_lies_in_two_slots_is_there_while_one_is(
    toy: MakeEngine, monkeypatch: pytest.MonkeyPatch, rule: str
):
    """The last block of a prompt, computed twice."""
    monkeypatch.setattr(LastBlocks, "tokens", lambda self, record, entry: 0)
    if rule == "broken":
        monkeypatch.setattr(VllmDevicePool, "note_twins", lambda self, blocks: None)
    engine = toy()
    first = engine.ask(prompt_of(1, WHOLE), 1)
    engine.run()
    again = engine.ask(prompt_of(1, WHOLE), 1)
    engine.run()
    store, device = engine.half._store, engine.half._device
    keys = b"".join(first.request.block_hashes)
    last = store.match(engine.half._roster.namespace, keys).ids[-1:]
    assert device.slot_of(last).tolist() == first.table[-1:] != again.table[-1:]
    # Of what is free the older one of both is next, behind all that was never used.
    engine.half._lately.drop_all()
    free = [block.block_id for block in engine.pool.free_block_queue.get_all_free_blocks()]
    takes = free.index(first.table[-1]) + 1
    engine.ask(prompt_of(2, takes * 16 - 1), 1)
    engine.run()
    there = device.slot_of(last).tolist()
    assert there == (again.table[-1:] if rule == "kept" else [-1])
    assert not wrong_answers(engine)
