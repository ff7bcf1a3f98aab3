"""Starts by layer, move by move: what is handed over, what is waited for, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from fakes import LAYERS, FlyingCopy, LaunchedStep
from invariants import check, nothing_left
from world import BLOCK_BYTES, BLOCK_TOKENS, ToySequence, World

from forebay.cache.by_layer import LayerStarts, cut_bands
from forebay.config import BatchSettings, CacheSettings
from forebay.core.modes import Mode
from forebay.core.requests import Ticket
from forebay.errors import ProtocolError, SettingsError
from forebay.transfer.mover import TransferFailedError

BLOCKS = 6
PROMPT = [i % 4 for i in range(BLOCKS * BLOCK_TOKENS)]
LINK = 1e5


def make_world(**changes: object) -> World:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = CacheSettings(
            **{
                "block_tokens": BLOCK_TOKENS,
                "block_bytes": BLOCK_BYTES,
                "device_slots": 9,
                "host_slots": 40,
                "mode": Mode.ASYNCHRONOUS,
                "window_bytes": BLOCK_BYTES,
                "min_load_tokens": 0,
                "band_bytes": BLOCK_BYTES // 2,
                **changes,
            }
        )
    world = World(settings, BatchSettings(step_tokens=64, max_running=2), seed=3)
    for other in (0, 3, 2):  # the first loses its place to the others
        ask(world, [token ^ other for token in PROMPT])
        world.drain()
    rates = world.cache.rates
    for average, value in ((rates.link_bytes_per_s, LINK), (rates.prefill_tokens_per_s, 10.0)):
        average.value, average.weight = value, 0.0
    return world


@pytest.fixture
def world() -> Iterator[World]:
    made = make_world()
    yield made
    made.drain()
    check(made.cache)
    nothing_left(made.cache)


def ask(world: World, prompt: list[int], answer: int = 2) -> ToySequence:
    made = ToySequence(world.next_id, b"a", [*prompt, 1], answer, world.clock.now_s)
    world.next_id += 1
    world.batcher.sequences[made.id] = made
    world.cache.enqueue(made.renew())
    return made


def ask_again(world: World) -> tuple[ToySequence, Ticket, FlyingCopy]:
    """The first prompt again, which is in host memory: as it starts by layer."""
    again = ask(world, PROMPT)
    world.cache.poll()
    batch = world.batcher.schedule()
    assert [item.sequence for item in batch.work] == [again]
    ticket = again.ticket
    assert ticket is not None
    (copy,) = world.machine.flying.values()
    return again, ticket, copy


def hand_over(world: World, copy: FlyingCopy, parts: int) -> None:
    world.machine._hand_over(copy, parts)
    world.cache._take_report()


def test_it_starts_with_nothing_in_place_and_reads_each_layer_once_that_is(world: World) -> None:
    again, ticket, copy = ask_again(world)
    assert ticket.band_of_layer == (0, 1)
    assert copy.handed == 0
    work = world.batcher.schedule().work
    step = world.cache.begin_step([(ticket, work[0].start, work[0].tokens)])
    assert world.cache.ready([ticket]) == []
    assert copy.handed == 0
    hand_over(world, copy, BLOCKS)
    world.cache.layer(ticket, 0)
    assert copy.landed == 0  # the stream waits, not the caller
    assert ticket.bands_waited == 1
    assert copy.handed == BLOCKS
    world.cache.layer(ticket, 0)
    hand_over(world, copy, BLOCKS)
    assert world.cache.stats().layered_hidden_s == 0.0
    world.clock.now_s += 0.25
    world.cache.layer(ticket, 1)
    assert world.cache.stats().layered_hidden_s == 0.25
    world._launch(step, work, by_layer=True)
    assert world.machine.run_step()
    assert again.known_tokens == len(PROMPT) + 2
    assert world.cache.stats().layered_starts == 1
    assert not ticket.band_of_layer


def test_what_has_arrived_whole_is_hidden_by_no_computing(world: World) -> None:
    _, ticket, copy = ask_again(world)
    hand_over(world, copy, LAYERS * BLOCKS)
    world.cache.layer(ticket, 0)
    world.machine._land_all(copy)
    world.cache._take_report()
    world.clock.now_s += 0.25
    world.cache.layer(ticket, 1)
    assert world.cache.stats().layered_hidden_s == 0.0
    world.batcher.preempt(world.batcher.sequences[ticket.request.id])


def test_a_layer_that_does_not_wait_is_seen() -> None:
    """The mutant: the second layer says that it waits, and nothing of it is on its way."""
    world = make_world()
    _, ticket, copy = ask_again(world)
    work = world.batcher.schedule().work
    step = world.cache.begin_step([(ticket, work[0].start, work[0].tokens)])
    hand_over(world, copy, BLOCKS)
    world.cache.layer(ticket, 0)
    ticket.bands_waited = LAYERS
    world._launch(step, work, by_layer=True)
    with pytest.raises(AssertionError, match="token 2 in slot"):
        world.machine.run_step()


def test_a_step_whose_layers_did_not_wait_may_not_be_launched(world: World) -> None:
    _, ticket, copy = ask_again(world)
    work = world.batcher.schedule().work
    step = world.cache.begin_step([(ticket, work[0].start, work[0].tokens)])
    hand_over(world, copy, BLOCKS)
    world.cache.layer(ticket, 0)
    with pytest.raises(ProtocolError, match="before all layers had waited"):
        world.cache.step_launched(step)


@pytest.mark.parametrize("band", range(LAYERS))
def test_a_load_that_fails_in_a_band_is_a_miss_with_a_reason(world: World, band: int) -> None:
    _, ticket, copy = ask_again(world)
    hand_over(world, copy, band * BLOCKS)
    for layer in range(band):
        world.cache.layer(ticket, layer)
    world.machine._land_all(copy)
    hand_over(world, copy, 2)
    copy.fault = True
    world.machine._fail(copy)
    with pytest.raises(TransferFailedError, match="preempt it"):
        world.cache.layer(ticket, band)
    assert ticket.lost
    world.batcher.preempt(world.batcher.sequences[ticket.request.id])
    check(world.cache)
    # Two blocks were being written; the others' slots are as good as before.
    assert world.cache.stats().quarantined_blocks == 2
    world.drain()
    stats = world.cache.stats()
    assert stats.misses["failed"] > 0
    assert stats.failed_loads == 1


def test_a_failure_that_is_known_only_after_the_preemption_is_its_reason(world: World) -> None:
    """The wait of a layer says that the load failed; the report that tells of it comes later."""
    _, ticket, copy = ask_again(world)
    hand_over(world, copy, BLOCKS)
    world.machine._land(copy, BLOCKS - 1)
    copy.fault = True
    world.machine.late_reports = True
    with pytest.raises(TransferFailedError, match="preempt it"):
        world.cache.layer(ticket, 0)
    world.batcher.preempt(world.batcher.sequences[ticket.request.id])
    (entry,) = world.cache._line
    assert len(entry.blocks) == BLOCKS
    world.drain()
    world.machine.late_reports = False
    assert world.cache.stats().misses["failed"] == 1, "of the last block a part was lost"
    assert world.cache.stats().quarantined_blocks == 1


def test_what_had_landed_of_a_load_that_failed_counts_as_loaded() -> None:
    world = make_world(band_bytes=0)
    again = ask(world, PROMPT)
    world.cache.poll()
    world.batcher.schedule()
    (copy,) = world.machine.flying.values()
    hand_over(world, copy, BLOCKS)
    world.batcher.schedule()
    ticket = again.ticket
    assert ticket is not None
    assert ticket.sources["host"] == BLOCKS
    world.machine._land(copy, BLOCKS - 1)
    copy.fault = True
    assert world.cache.ready([ticket]) == [ticket]
    world.batcher.preempt(again)
    world.cache.poll()
    world.batcher.schedule()
    assert again.ticket is not None
    assert again.ticket.misses["failed"] == 1
    assert again.ticket.sources["host"] == BLOCKS - 1
    assert again.ticket.sources["device"] == 0
    world.drain()


def test_the_slots_of_a_step_that_broke_off_are_free_once_it_has_run(world: World) -> None:
    broken = ask(world, [token ^ 1 for token in PROMPT])
    world.cache.poll()
    (item,) = world.batcher.schedule().work
    assert item.sequence is broken
    ticket = broken.ticket
    assert ticket is not None
    step = world.cache.begin_step([(ticket, item.start, item.tokens)])
    world.machine.steps.append(LaunchedStep(step, [], []))
    world.cache.step_launched(step, whole=False)
    world.cache.commit(ticket, broken.keys())
    assert ticket.published == 0
    world.cache.abort(broken.id)
    world.batcher.remove(broken)
    ask(world, PROMPT)
    world.cache.poll()
    world.batcher.schedule()
    (copy,) = world.machine.flying.values()
    assert step in copy.transfer.after_steps
    hand_over(world, copy, BLOCKS)
    assert copy.handed < BLOCKS
    assert world.machine.run_step()
    hand_over(world, copy, BLOCKS)
    assert copy.handed == BLOCKS


def test_a_load_that_does_not_come_is_a_miss_with_a_reason(world: World) -> None:
    _, ticket, copy = ask_again(world)
    hand_over(world, copy, BLOCKS)
    world.cache.layer(ticket, 0)
    world.machine.make_progress = lambda rounds=1: None
    with pytest.raises(TransferFailedError):
        world.cache.layer(ticket, 1)
    world.batcher.preempt(world.batcher.sequences[ticket.request.id])
    check(world.cache)
    del world.machine.make_progress
    assert world.cache.stats().link_stopped
    world.drain()
    assert world.cache.stats().misses["late"] == BLOCKS


def test_it_starts_no_earlier_than_computing_can_hide_the_rest() -> None:
    """Two layers' parts of six blocks take 61 ms. Ten tokens a millisecond take less than the
    second part alone, so that both must be under way; ten a second take more than both."""
    world = make_world()
    world.cache.rates.step_s.value = 0.0
    world.cache.rates.prefill_tokens_per_s.value = 100.0
    again = ask(world, PROMPT)
    world.cache.poll()
    assert not world.batcher.schedule().work
    (copy,) = world.machine.flying.values()
    assert copy.parts[0] == (0, 0)  # it goes by bands all the same
    hand_over(world, copy, BLOCKS)
    world.cache.poll()
    assert not world.batcher.schedule().work
    world.cache.rates.prefill_tokens_per_s.value = 50.0
    assert [item.sequence for item in world.batcher.schedule().work] == [again]
    world.batcher.preempt(again)
    world.drain()


def test_nobody_starts_by_layer_beside_others(world: World) -> None:
    other = ask(world, [2], answer=6)
    while not other.ticket:
        world.tick()
    again = ask(world, PROMPT)
    for _ in range(4):
        world.tick()
    assert again.ticket is None
    assert world.machine.flying, "it waits for its load, and for nothing else"
    assert world.cache.stats().layered_starts == 0


@pytest.mark.parametrize(
    "changes",
    [{"band_bytes": 0}, {"band_bytes": BLOCK_BYTES}, {"mode": Mode.SYNCHRONOUS}],
    ids=["off", "one band", "steps that stall"],
)
def test_where_it_is_not_to_be(changes: dict[str, object]) -> None:
    world = make_world(**changes)
    ask(world, PROMPT)
    world.drain()
    assert world.cache.stats().layered_starts == 0
    assert world.cache.stats().loaded_bytes > 0


def test_a_short_rest_and_a_hopeless_one_are_waited_for_whole() -> None:
    for link in (BLOCKS * BLOCK_BYTES / 1e-3, 1.0):
        world = make_world()
        world.cache.rates.link_bytes_per_s.value = link
        ask(world, PROMPT)
        world.cache.poll()
        assert not world.batcher.schedule().work
        (copy,) = world.machine.flying.values()
        assert copy.parts[0] == (0, None)
        world.drain()


def test_bands_are_as_many_as_have_enough_of_a_block() -> None:
    ends = [100, 200, 300, 400, 500, 600, 700]
    assert cut_bands(ends, 100) == (tuple(ends), [0, 1, 2, 3, 4, 5, 6])
    assert cut_bands(ends, 101) == ((200, 400, 700), [0, 0, 1, 1, 2, 2, 2])
    assert cut_bands(ends, 300) == ((300, 700), [0, 0, 0, 1, 1, 1, 1])
    assert cut_bands(ends, 701) == ((700,), [0] * 7)
    uneven = np.cumsum([10, 90, 5, 300]).tolist()
    assert cut_bands(uneven, 100) == ((100, 405), [0, 0, 1, 1])


def test_layers_that_are_not_those_of_a_block_are_refused(world: World) -> None:
    cache = world.cache
    with pytest.raises(SettingsError, match="the end of each layer"):
        LayerStarts(cache.settings, [100, 200], cache._flights, cache.rates, world.machine)
