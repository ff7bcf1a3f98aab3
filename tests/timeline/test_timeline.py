"""The timeline: bounded, a trace that a viewer can open, a picture with something in it."""

from __future__ import annotations

import gzip
import itertools
import json
import tracemalloc

import matplotlib.image
import numpy as np
import pytest

from forebay.errors import SettingsError
from forebay.timeline.picture import draw
from forebay.timeline.record import LINK, REQUESTS, Kind, Timeline
from forebay.timeline.trace import write_trace
from forebay.transfer.messages import WINDOW_DTYPE, Direction, TransferClass

START_S = 5000.0


def windows(*rows):
    """Windows of (transfer, direction, class, lane, bytes, start, end), from START_S on."""
    made = np.zeros(len(rows), dtype=WINDOW_DTYPE)
    names = ("transfer", "direction", "transfer_class", "lane", "bytes", "start_s", "end_s")
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        made[name] = column
    made["start_s"] += START_S
    made["end_s"] += START_S
    return made


@pytest.fixture
def timeline():
    timeline = Timeline()
    timeline.request("user 1", Kind.QUEUED, START_S, START_S + 0.1, transfers=[7])
    timeline.step(1, START_S, START_S + 0.1, decode_tokens=3)
    timeline.wait(START_S + 0.1, START_S + 0.12, request="user 1")
    timeline.step(2, START_S + 0.12, START_S + 0.3, decode_tokens=3, prefill_tokens=40)
    timeline.request("user 1", Kind.PREFILL, START_S + 0.12, START_S + 0.3)
    timeline.windows(
        windows(
            (7, Direction.LOAD, TransferClass.PREFETCH, 0, 1 << 20, 0.02, 0.05),
            (7, Direction.LOAD, TransferClass.PREFETCH, 1, 1 << 20, 0.03, 0.06),
            (8, Direction.LOAD, TransferClass.DEMAND, 0, 1 << 20, 0.05, 0.12),
            (9, Direction.SAVE, TransferClass.SAVE, 1, 1 << 19, 0.30, 0.31),
        )
    )
    timeline.occupancy(START_S, device=4, host=9)
    timeline.occupancy(START_S + 0.2, device=6, host=9)
    return timeline


def traced(timeline, path):
    write_trace(timeline, path)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def named_rows(events):
    processes = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    return {
        (event["pid"], event["tid"]): (processes[event["pid"]], event["args"]["name"])
        for event in events
        if event["name"] == "thread_name"
    }


@pytest.mark.parametrize("name", ["trace.json", "deeper/trace.json.gz"])
def test_every_span_becomes_a_complete_event_on_a_named_row(timeline, tmp_path, name):
    events = traced(timeline, tmp_path / name)
    rows = named_rows(events)
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(timeline)
    assert {rows[event["pid"], event["tid"]] for event in complete} == {
        ("compute", "steps"),
        ("compute", "exposed wait"),
        ("link", "load lane 0"),
        ("link", "load lane 1"),
        ("link", "save lane 1"),
        ("requests", "user 1"),
    }
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in complete)
    demand = next(event for event in complete if event["name"] == "demand")
    assert demand["cat"] == "copy"
    assert (demand["ts"], demand["dur"]) == (50_000.0, 70_000.0)
    assert demand["args"] == {"transfer": 8, "bytes": 1 << 20, "GB/s": 0.015}


def test_events_of_one_row_never_overlap_by_rounding(tmp_path):
    timeline = Timeline()
    cuts = START_S + np.cumsum(np.random.default_rng(1).uniform(1e-7, 1e-3, 2000))
    for number, (start_s, end_s) in enumerate(itertools.pairwise(cuts), start=1):
        timeline.step(number, float(start_s), float(end_s), decode_tokens=1)
    steps = [event for event in traced(timeline, tmp_path / "t.json") if event["ph"] == "X"]
    for earlier, later in itertools.pairwise(steps):
        assert round(earlier["ts"] + earlier["dur"], 3) <= later["ts"]


def test_occupancy_becomes_one_counter_a_tier(timeline, tmp_path):
    counters = [event for event in traced(timeline, tmp_path / "t.json") if event["ph"] == "C"]
    assert [(e["name"], e["ts"], e["args"]) for e in counters] == [
        ("device blocks", 0.0, {"blocks": 4}),
        ("host blocks", 0.0, {"blocks": 9}),
        ("device blocks", 200_000.0, {"blocks": 6}),
        ("host blocks", 200_000.0, {"blocks": 9}),
    ]


def test_an_empty_timeline_still_writes_a_trace_that_opens(tmp_path):
    events = traced(Timeline(), tmp_path / "t.json")
    assert {event["ph"] for event in events} == {"M"}


def test_it_keeps_the_newest_and_counts_what_it_forgot():
    timeline = Timeline(capacity=3)
    for number in range(1, 6):
        timeline.step(number, START_S + number, START_S + number + 1)
        timeline.occupancy(START_S + number, device=number)
    assert [span.details["step"] for span in timeline] == [3, 4, 5]
    assert [sample.blocks["device"] for sample in timeline.occupancy_samples] == [3, 4, 5]
    assert timeline.dropped == 4
    assert timeline.extent() == (START_S + 3, START_S + 6)


def test_memory_stays_bounded_however_much_is_recorded():
    timeline = Timeline(capacity=500)
    many = windows(*[(i, 0, 1, i % 2, 4096, i * 1e-3, (i + 1) * 1e-3) for i in range(500)])
    timeline.windows(many)
    tracemalloc.start()
    try:
        for _ in range(20):
            timeline.windows(many)
            timeline.occupancy(START_S, device=1)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(timeline) == 500
    assert grown < 500 * 1000


def test_rows_stand_in_the_order_a_reader_looks_for(timeline):
    timeline.request("user 0", Kind.QUEUED, START_S + 0.05, START_S + 0.2)
    assert timeline.rows(LINK) == ("load lane 0", "load lane 1", "save lane 1")
    assert timeline.rows(REQUESTS) == ("user 1", "user 0")


def test_the_busiest_window_is_where_the_loads_are():
    timeline = Timeline()
    timeline.step(1, START_S, START_S + 100)
    timeline.windows(
        windows(*[(1, 0, 1, 0, 1, 60 + i, 61 + i) for i in range(5)], (2, 0, 1, 0, 1, 3, 4))
    )
    begin_s, end_s = timeline.busiest(10)
    assert end_s - begin_s == pytest.approx(10)
    assert begin_s <= START_S + 60
    assert end_s >= START_S + 65
    assert timeline.busiest(1000) == timeline.extent()


@pytest.mark.parametrize("window", [None, (START_S, START_S + 0.15), (START_S + 0.11, START_S + 2)])
def test_the_picture_shows_steps_loads_and_the_wait_in_red(timeline, tmp_path, window):
    path = tmp_path / "pictures" / "t.png"
    draw(timeline, path, window, title="Title", subtitle="Subtitle", dpi=80)
    pixels = matplotlib.image.imread(path)[..., :3]
    height, width, _ = pixels.shape
    assert width == 960
    assert height > 200
    for colour in ((0xD7, 0x26, 0x3D), (0xF0, 0x8A, 0x24), (0x7F, 0xA6, 0xD6)):
        alike = np.abs(pixels * 255 - np.array(colour)).max(axis=-1) < 3
        assert alike.sum() > 50, f"no area in {colour}"


def test_many_requests_are_cut_to_what_fits(timeline, tmp_path):
    for user in range(40):
        timeline.request(f"user {user}", Kind.DECODE, START_S, START_S + 0.3)
    draw(timeline, tmp_path / "t.png", dpi=50)
    assert matplotlib.image.imread(tmp_path / "t.png").shape[0] < 50 * 9


def test_what_cannot_be_is_refused_with_the_reason(timeline, tmp_path):
    with pytest.raises(SettingsError, match="at least one span"):
        Timeline(capacity=0)
    with pytest.raises(SettingsError, match="QUEUED, PREFILL, DECODE"):
        timeline.request("user 1", Kind.SAVE, 0.0, 1.0)
    with pytest.raises(SettingsError, match="choose another window"):
        draw(timeline, tmp_path / "t.png", (START_S + 50, START_S + 60))
    with pytest.raises(SettingsError, match="choose another window"):
        draw(timeline, tmp_path / "t.png", (START_S + 0.2, START_S + 0.1))


def test_a_cleared_timeline_has_nothing(timeline):
    timeline.clear()
    assert len(timeline) == 0
    assert timeline.occupancy_samples == ()
    assert timeline.extent() == (0.0, 0.0)
    timeline.step(3, START_S, START_S + 0.1)
    assert [span.details["step"] for span in timeline] == [3]
