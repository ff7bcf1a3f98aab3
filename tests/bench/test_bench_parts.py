"""The parts of the benchmarks that need no GPU: who dominates whom, loads by a cache, rates."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest

from forebay.bench.cached import CachedLoads, LoadShape
from forebay.bench.goals import OVERLAP_GOALS, TRANSFER_GOALS, about_goals
from forebay.bench.rival_movers import Job
from forebay.bench.rivals import Standing, dominance, side_by_side
from forebay.bench.textbook import LOAD_BYTES, Exposed
from forebay.bench.waits import foreign_figure
from forebay.errors import LinkTimeoutError
from forebay.measure.copies import ratios_to
from forebay.measure.link import Flow, Link, sampled_rates
from forebay.measure.repeat import repeated
from forebay.measure.report import Figure
from forebay.transfer.messages import WINDOW_DTYPE, Direction, TransferClass

KIB = 1 << 10
SHAPE = LoadShape(requests=3, blocks=8, sets=3, block_bytes=4 * KIB)


@pytest.fixture
def link():
    made = Link("cpu", 128 * 4 * KIB)
    yield made
    made.close()


def test_one_is_dominated_only_where_it_is_nowhere_better():
    ours = Standing(50.0, 300.0, 0.5)
    assert Standing(50.0, 299.0, 0.5).dominates(ours)
    assert not Standing(50.0, 300.0, 0.5).dominates(ours)
    assert not Standing(60.0, 200.0, 0.6).dominates(ours)
    slower_loop = Standing(10.0, 300.0, 0.5)
    better = Standing(51.0, 100.0, 0.1)
    count, loop = dominance("64k", {"forebay": ours, "copy_loop": slower_loop, "other": better})
    assert (count.value, count.settings["which"]) == (1, ["other"])
    assert loop.value == 1
    assert {count.id, loop.id} <= set(TRANSFER_GOALS)
    count, loop = dominance("2m", {"forebay": ours, "copy_loop": Standing(10.0, 30.0, 0.5)})
    assert (count.value, loop.value) == (0, 0)


def test_rivals_stand_side_by_side_by_layout():
    axes = {"gb_per_s": 50.0, "foreign_p99_us": 300.0, "decode_ms_per_gb": 0.5}
    figures = [
        Figure(f"rival_{layout}_{name}_{axis}", value, "")
        for layout in ("64k", "2m")
        for name in ("forebay", "copy_loop")
        for axis, value in axes.items()
    ]
    lines = side_by_side(figures).splitlines()
    assert [line.split()[0] for line in lines] == ["fragments", "forebay", "copy_loop"] * 2
    assert lines[1].split()[1:] == ["50", "300", "0.5"]
    assert side_by_side([Figure("other", 1.0, "")]) == ""


def test_the_excess_of_a_wait_is_what_goes_beyond_the_link():
    rate = LOAD_BYTES / 12e-3  # the load takes 12 ms
    assert Exposed(led_ms=3.0, waited_ms=9.5).excess_ms(rate) == pytest.approx(0.5)
    assert Exposed(led_ms=25.0, waited_ms=0.1).excess_ms(rate) == pytest.approx(0.1)


def test_a_foreign_figure_keeps_every_wait():
    figure = foreign_figure(
        "foreign_p99_8_us", [float(n) for n in range(1, 101)], {"window_mib": 8}
    )
    assert figure.value == pytest.approx(99.01)
    assert len(figure.samples) == 100
    assert figure.settings["max_us"] == 100.0


def test_ratios_set_a_run_against_what_was_before_and_behind_it():
    floor = iter([1.0, 1.0, 2.0, 4.0, 1.0, 1.0])
    runs = iter([9.0, 3.0, 0.5])
    assert ratios_to(lambda: next(floor), lambda: next(runs), 2) == [1.0, 0.5]


def test_goals_of_another_gpu_are_said_to_be():
    assert about_goals([]) == ""
    assert about_goals(["NVIDIA H200"]) == ""
    assert "NVIDIA L4" in about_goals(["NVIDIA L4"])


def test_every_goal_has_one_bound():
    for goal in [*TRANSFER_GOALS.values(), *OVERLAP_GOALS.values()]:
        assert (goal.at_most is None) != (goal.at_least is None)


def test_rates_are_sampled_from_windows():
    windows = np.zeros(3, WINDOW_DTYPE)
    windows["start_s"], windows["end_s"] = [10.0, 10.0, 11.0], [12.0, 11.0, 12.0]
    windows["bytes"] = [200, 50, 150]
    assert sampled_rates(windows, 1.0).tolist() == [150.0, 250.0]
    assert not len(sampled_rates(windows[:0], 1.0))


@pytest.mark.parametrize("sets", [2, 3])
def test_a_cache_brings_every_set_whole_whatever_went_before(link: Link, sets: int):
    shape = LoadShape(requests=3, blocks=8, sets=sets, block_bytes=4 * KIB)
    with link.carrier(shape.block_bytes, window_bytes=16 * KIB) as carrier:
        loads = CachedLoads(carrier.mover, shape, 16 * KIB, stream=0)
        rates = [loads.bytes_per_s() for _ in range(2 * sets + 1)]
        stats = loads.cache.stats()
    assert all(rate > 0 for rate in rates)
    assert stats.loaded_bytes == len(rates) * shape.set_blocks * shape.block_bytes
    assert stats.saved_bytes == sets * shape.set_blocks * shape.block_bytes
    assert not stats.failed_loads + stats.dropped_dirty_blocks


def test_blocks_that_a_cache_brings_are_scattered(link: Link):
    with link.carrier(SHAPE.block_bytes, window_bytes=16 * KIB) as carrier:
        loads = CachedLoads(carrier.mover, SHAPE, 16 * KIB, stream=0)
        seen: list[np.ndarray] = []
        submit = carrier.mover.submit
        carrier.mover.submit = lambda transfers: (  # pyright: ignore[reportAttributeAccessIssue]
            seen.extend(t.sources for t in transfers if t.direction is Direction.LOAD),
            submit(transfers),
        )
        loads.bytes_per_s()
    neighbours = sum(int((np.diff(sources) == 1).sum()) for sources in seen)
    assert sum(map(len, seen)) == SHAPE.set_blocks
    assert neighbours < SHAPE.set_blocks / 2


@pytest.mark.parametrize("fragment", [64 * KIB, 2048 * KIB])
def test_what_rivals_copy_is_what_a_mover_would(fragment: int):
    block = 2048 * KIB
    link = Link("cpu", 16 * block)
    parts = block // fragment
    ids = 1 + np.arange(16 * parts, dtype=np.int32)
    link.host.bytes.view(np.int32).reshape(16 * parts, -1)[:] = ids[:, None]
    device = link.device.view(np.int32).reshape(parts, 16, fragment // 4)
    with link.carrier(block, fragment) as carrier:
        job = Job(link, carrier, fragment, 6)
    for source, destination in zip(job.sources, job.destinations, strict=True):
        ctypes.memmove(int(destination), int(source), fragment)
    # Untouched device memory has 1 in every byte.
    came = device[:, :, 0] != 0x01010101
    assert came.sum() == len(job.sources) == 6 * parts
    assert (came == came[:1]).all()
    assert (device == device[:, :, :1]).all()
    blocks, layers = np.divmod(device[:, :, 0] - 1, parts)
    assert (layers[came] == np.nonzero(came)[0]).all()
    assert (blocks[:, came[0]] == blocks[:1, came[0]]).all()
    assert len(set(blocks[0, came[0]].tolist())) == 6
    link.close()


def test_a_carrier_moves_scattered_blocks_both_ways(link: Link):
    with link.carrier(4 * KIB, 1 * KIB, window_bytes=8 * KIB) as carrier:
        assert carrier.bytes_per_s(32, Direction.LOAD, Direction.SAVE) > 0
        load = carrier.transfer(8)
        urgent = carrier.transfer(8, transfer_class=TransferClass.DEMAND)
        assert load.destinations.max() < carrier.most_blocks <= urgent.destinations.min()
        assert len(set(load.sources.tolist())) == 8


def test_what_is_repeated_goes_on_until_the_block_is_left():
    turns = iter(range(10_000_000))
    with repeated(lambda: next(turns)) as seen:
        while len(seen) < 3:
            time.sleep(1e-3)
    count = len(seen)
    assert seen == list(range(count))
    time.sleep(0.01)
    assert len(seen) == count


def test_what_ends_a_repetition_is_raised():
    def fail() -> None:
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"), repeated(fail):
        time.sleep(0.01)
    with pytest.raises(ValueError, match="no more"), repeated(fail) as seen:
        seen[0]  # an error that only follows from the other


def test_what_runs_in_the_background_ends_with_its_block(link: Link):
    with link.carrier(4 * KIB, window_bytes=8 * KIB, link_bytes_per_s=1e6) as carrier:
        with carrier.running(Direction.LOAD, Direction.SAVE, most_s=1e-4) as flow:
            _, rate = carrier.rate_during(lambda: carrier.mover.wait_news(0.1))
        assert rate >= 0
        assert set(flow.ids) <= set(carrier.ended)
        flow.check()
        with carrier.running(most_s=1.0) as idle:
            pass
        assert idle.ids == []
    with pytest.raises(LinkTimeoutError, match="ran out of work"):
        Flow([1], ran_dry=True).check()
