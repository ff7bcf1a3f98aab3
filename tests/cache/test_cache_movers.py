"""The cache over real movers: in this process, and in another whose reports come one poll late."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
from invariants import check, nothing_left
from real_machine import RealMachine
from world import BLOCK_BYTES, BLOCK_TOKENS, World

from forebay.config import BatchSettings, CacheSettings, SaveMode
from forebay.core.modes import Mode

MakeWorld = Callable[..., World]


@pytest.fixture(params=["native", "process"])
def make_world(request: pytest.FixtureRequest) -> Iterator[MakeWorld]:
    made: list[World] = []

    def make(seed: int, **changes: object) -> World:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cache = CacheSettings(
                **{
                    "block_tokens": BLOCK_TOKENS,
                    "block_bytes": BLOCK_BYTES,
                    "device_slots": 20,
                    "host_slots": 60,
                    "window_bytes": BLOCK_BYTES,
                    "min_load_tokens": 0,
                    "min_shared_tokens": 8,
                    "link_bytes_per_s": 2e6,
                    "band_bytes": BLOCK_BYTES // 2,
                    **changes,
                }
            )
        machine = RealMachine(
            request.param, BLOCK_TOKENS, cache.device_slots, cache.host_slots, seed
        )
        world = World(
            cache, BatchSettings(step_tokens=32, max_running=2), seed=seed, machine=machine
        )
        made.append(world)
        return world

    yield make
    for world in made:
        world.cache.close()


def live(world: World, turns: int) -> None:
    """Arrivals, steps and aborts, while copies run on their own."""
    for _ in range(turns):
        if len(world.batcher.sequences) < 8 and world.rng.random() < 0.5:
            world.arrive()
        if world.rng.random() < 0.03:
            world.abort_one()
        world.tick(abandon=world.rng.random() < 0.03)
        check(world.cache)
        if world.rng.random() < 0.5:
            world.machine.make_progress(3)


@pytest.mark.parametrize("mode", [Mode.SYNCHRONOUS, Mode.ASYNCHRONOUS, Mode.LOOK_AHEAD])
@pytest.mark.parametrize("save", list(SaveMode))
def test_every_token_read_is_the_one_written(
    make_world: MakeWorld, mode: Mode, save: SaveMode
) -> None:
    loaded = 0
    for seed in range(2):
        world = make_world(seed, mode=mode, save_mode=save)
        live(world, 150)
        world.drain()
        check(world.cache)
        nothing_left(world.cache)
        assert world.finished > 10
        assert world.machine.blocks_read > 50
        loaded += world.cache.stats().loaded_bytes
    assert loaded > 0


def test_look_ahead_has_blocks_there_before_their_turn(make_world: MakeWorld) -> None:
    used = 0
    for seed in range(4):
        world = make_world(10 + seed, mode=Mode.LOOK_AHEAD)
        live(world, 150)
        world.drain()
        used += world.cache.stats().prefetch_bytes["used"]
    assert used > 0


def test_closing_in_the_middle_leaves_no_transfer(make_world: MakeWorld) -> None:
    world = make_world(3, mode=Mode.LOOK_AHEAD)
    live(world, 40)
    world.cache.close()
    assert not world.machine.flying
    assert not len(world.cache._flights)
