"""Random lives of a cache: everything that must never happen, checked after every step.

The real cache, planner, batching rules and bookkeeping run over a machine made of lists, on which
copies and steps end late and in any order, transfers fail, and reports may come one poll late. What
a step reads is compared with what was written (a swapped, overwritten, torn or foreign block shows
there); `invariants.check` looks at leases, slots, ids, the directory and the eviction orders.
"""

from __future__ import annotations

import warnings
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from invariants import check, nothing_left
from world import BLOCK_BYTES, BLOCK_TOKENS, World

from forebay.config import BatchSettings, CacheSettings, SaveMode
from forebay.core.modes import Mode

SEEDS = st.integers(0, 2**31 - 1)
EXAMPLES, STEPS = 160, 110


class CacheMachine(RuleBasedStateMachine):
    """Arrivals, steps, copies, faults and aborts in any order."""

    mode: ClassVar[Mode]
    steps_run: ClassVar[int] = 0
    seen: ClassVar[dict[str, int]] = {}

    @initialize(
        device=st.integers(10, 30),
        host=st.sampled_from([0, 4, 20, 60]),
        save=st.sampled_from(list(SaveMode)),
        min_load=st.sampled_from([0, 8]),
        min_shared=st.sampled_from([4, 12]),
        share=st.sampled_from([0.3, 0.5, 0.9]),
        link=st.sampled_from([1e4, 1e6]),
        step_tokens=st.sampled_from([8, 16, 64]),
        running=st.sampled_from([1, 2, 4]),
        late=st.booleans(),
        slowly=st.booleans(),
        on_host=st.booleans(),
        prefill=st.sampled_from([20.0, 1000.0]),
        seed=SEEDS,
    )
    def start(
        self,
        device: int,
        host: int,
        save: SaveMode,
        min_load: int,
        min_shared: int,
        share: float,
        link: float,
        step_tokens: int,
        running: int,
        late: bool,
        slowly: bool,
        on_host: bool,
        prefill: float,
        seed: int,
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cache = CacheSettings(
                block_tokens=BLOCK_TOKENS,
                block_bytes=BLOCK_BYTES,
                device_slots=device,
                host_slots=host,
                mode=self.mode,
                save_mode=save,
                window_bytes=BLOCK_BYTES,
                min_load_tokens=min_load,
                min_shared_tokens=min_shared,
                prefetch_share=share,
                link_bytes_per_s=link,
                waits_on_host=on_host,
                band_bytes=BLOCK_BYTES // 2,
            )
        batch = BatchSettings(step_tokens=step_tokens, max_running=running)
        self.world = World(cache, batch, seed=seed, late=late, slowly=slowly)
        self.world.cache.rates.prefill_tokens_per_s.value = prefill

    @rule(seed=SEEDS, priority=st.sampled_from([0, 0, 0, 1]), odd=st.integers(0, 19))
    def arrive(self, seed: int, priority: int, odd: int) -> None:
        if len(self.world.batcher.sequences) < 10:
            self.world.rng.seed(seed)
            self.world.arrive(priority=priority, no_save=odd == 0, no_cache=odd == 1)

    @rule(seed=SEEDS)
    def turn(self, seed: int) -> None:
        self.world.rng.seed(seed)
        self.world.tick()

    @rule(seed=SEEDS, turns=st.integers(1, 6))
    def busy_time(self, seed: int, turns: int) -> None:
        """Arrivals, turns, steps and copies in close order: where most of a cache's life passes."""
        self.world.rng.seed(seed)
        for _ in range(turns):
            if len(self.world.batcher.sequences) < 8:
                self.world.arrive()
            self.world.tick()
            self.world.machine.make_progress(2)
            self.world.tick()
            self.world.machine.run_step()
            self.world.machine.make_progress(2)

    @rule(seed=SEEDS, ends=st.integers(0, 2))
    def one_comes_alone(self, seed: int, ends: int) -> None:
        """Sometimes everything ends, and then a request comes with nothing beside it."""
        self.world.rng.seed(seed)
        if ends == 0:
            self.world.drain()
            self.world.arrive()
            for _ in range(3):
                self.world.tick()

    @rule()
    def abandon_a_step(self) -> None:
        self.world.tick(abandon=True)

    @rule()
    def run_a_step(self) -> None:
        self.world.machine.run_step()

    @rule(seed=SEEDS, rounds=st.integers(1, 6))
    def copies_go_on(self, seed: int, rounds: int) -> None:
        self.world.rng.seed(seed)
        self.world.machine.make_progress(rounds)

    @rule(seed=SEEDS)
    def abort(self, seed: int) -> None:
        self.world.rng.seed(seed)
        self.world.abort_one()

    @rule(seed=SEEDS)
    def fault(self, seed: int) -> None:
        self.world.rng.seed(seed)
        self.world.tick()
        self.world.machine.fail_something()

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.clock.now_s += seconds

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            check(self.world.cache)
            type(self).steps_run += 1

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.drain()
        check(world.cache)
        nothing_left(world.cache)
        _outcomes_add_up(world)
        self._note(world)

    def _note(self, world: World) -> None:
        stats = world.cache.stats()
        seen = type(self).seen
        for name, count in {
            "finished": world.finished,
            "preempted": world.preempted,
            "blocks read": world.machine.blocks_read,
            "loaded": stats.loaded_bytes,
            "started by layer": stats.layered_starts,
            "torn steps": world.torn_steps,
            "prefetch used": stats.prefetch_bytes["used"],
            "failed": stats.prefetch_bytes["failed"] + stats.quarantined_blocks,
        }.items():
            seen[name] = seen.get(name, 0) + count


def _outcomes_add_up(world: World) -> None:
    """Every planned byte has one outcome or is still open; every block asked has one source."""
    stats = world.cache.stats()
    planned = world.cache._ledger.planned_bytes
    refused = stats.prefetch_bytes["refused"]
    assert sum(stats.prefetch_bytes.values()) - refused + stats.prefetch_open_bytes == planned
    assert sum(stats.misses.values()) == stats.sources["recomputed"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", [Mode.RECOMPUTE, Mode.SYNCHRONOUS, Mode.ASYNCHRONOUS])
def test_modes_without_look_ahead(mode: Mode) -> None:
    machine = _machine(mode)
    _run(machine, EXAMPLES)
    assert machine.seen["finished"] > EXAMPLES
    assert machine.seen["blocks read"] > EXAMPLES
    assert (machine.seen["loaded"] > 0) == (mode is not Mode.RECOMPUTE)
    assert (machine.seen["started by layer"] > 0) == (mode is Mode.ASYNCHRONOUS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(3))
def test_look_ahead(part: int) -> None:
    machine = _machine(Mode.LOOK_AHEAD)
    _run(machine, EXAMPLES)
    for what in machine.seen.keys() - {"torn steps"}:
        assert machine.seen[what] > 0, f"no run had any {what}: the test shows nothing of it"
    assert machine.steps_run > EXAMPLES * STEPS * 0.8


def _machine(mode: Mode) -> type[CacheMachine]:
    return type(f"Machine_{mode.value}", (CacheMachine,), {"mode": mode, "seen": {}})


def _run(machine: type[CacheMachine], examples: int) -> None:
    machine.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    case = machine.TestCase()
    case.runTest()
