"""What stands behind the live page: rings of what ran, and the last minute by tenths."""

from __future__ import annotations

import numpy as np
import pytest

from forebay.engine.view import Doing, RequestView
from forebay.server.lanes import TENTHS, Lanes
from forebay.server.live_wire import request_wire
from forebay.timeline import recent
from forebay.timeline.recent import Both, Mark, Recent, timeline_of
from forebay.timeline.record import Kind, Timeline
from forebay.transfer.messages import WINDOW_DTYPE, Direction, TransferClass

START_S = 5000.0


def windows(*rows):
    """Windows of (transfer, direction, class, lane, bytes, start, end), from START_S on."""
    made = np.zeros(len(rows), WINDOW_DTYPE)
    names = ("transfer", "direction", "transfer_class", "lane", "bytes", "start_s", "end_s")
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        made[name] = column
    made["start_s"] += START_S
    made["end_s"] += START_S
    return made


def load(transfer, lane, start_s, end_s, size=1000, of=TransferClass.PREFETCH):
    return (transfer, Direction.LOAD, of, lane, size, start_s, end_s)


def save(transfer, start_s, end_s, size=1000):
    return (transfer, Direction.SAVE, TransferClass.SAVE, 0, size, start_s, end_s)


# -- what ran --------------------------------------------------------------------------------------


def test_a_part_is_what_came_since_its_mark():
    kept = Recent()
    for number in range(3):
        kept.step(number, START_S + number, START_S + number + 0.5, decode_tokens=2)
    first = kept.since(Mark())
    assert first.steps["step"].tolist() == [0, 1, 2]
    kept.step(3, START_S + 3, START_S + 3.5, prefill_tokens=7)
    kept.wait(START_S, START_S + 0.1)
    second = kept.since(first.mark)
    assert second.steps["step"].tolist() == [3]
    assert second.steps["prefill_tokens"].tolist() == [7]
    assert len(second.waits) == 1
    nothing = kept.since(second.mark)
    assert not any(map(len, (nothing.steps, nothing.copies, nothing.waits)))
    assert len(kept.since(Mark()).steps) == 4, "a reader takes nothing away from others"


def test_rings_keep_the_newest_and_no_more(monkeypatch):
    monkeypatch.setattr(recent, "_STEPS", 8)
    monkeypatch.setattr(recent, "_COPIES", 8)
    kept = Recent()
    for number in range(21):
        kept.step(number, START_S, START_S + 1)
        kept.windows(windows(load(number, 0, 0, 1), save(100 + number, 0, 1), load(200, 1, 0, 1)))
    part = kept.since(Mark())
    assert part.steps["step"].tolist() == list(range(13, 21))
    assert len(part.copies) == 8
    assert set(part.copies["transfer"][-3:].tolist()) == {20, 120, 200}
    kept.windows(windows(*(load(number, 0, number, number + 0.5) for number in range(30))))
    assert kept.since(part.mark).copies["transfer"].tolist() == list(range(22, 30))


def test_windows_of_one_transfer_in_a_row_on_a_lane_are_one_copy():
    kept = Recent()
    kept.windows(
        windows(
            load(1, 0, 0.0, 0.1),
            load(1, 1, 0.05, 0.15),
            load(1, 0, 0.1, 0.2),
            load(1, 0, 0.5, 0.6),
            load(2, 0, 0.6, 0.7),
            save(3, 0.1, 0.2),
        )
    )
    copies = kept.since(Mark()).copies
    found = {
        (c["transfer"], c["lane"], round(c["start_s"] - START_S, 3), round(c["end_s"] - START_S, 3))
        for c in copies
    }
    assert found == {
        (1, 0, 0, 0.2),
        (1, 1, 0.05, 0.15),
        (1, 0, 0.5, 0.6),
        (2, 0, 0.6, 0.7),
        (3, 0, 0.1, 0.2),
    }
    assert copies["bytes"].sum() == 6000


def test_the_last_minute_becomes_a_timeline():
    kept = Recent()
    kept.step(1, START_S, START_S + 1, decode_tokens=1)
    kept.step(2, START_S + 50, START_S + 51, decode_tokens=1)
    kept.windows(windows(load(1, 0, 50, 51)))
    kept.wait(START_S + 50, START_S + 50.5)
    kept.request("request 1", Kind.DECODE, START_S, START_S + 51)
    kept.request("request 0", Kind.DECODE, START_S - 9, START_S - 8)
    timeline = timeline_of(kept.since(Mark()), kept.requests(), START_S + 10)
    assert {(span.kind, span.start_s - START_S) for span in timeline} == {
        (Kind.DECODE_STEP, 50),
        (Kind.PREFETCH, 50),
        (Kind.WAIT, 50),
        (Kind.DECODE, 10),
    }
    assert not len(timeline_of(Recent().since(Mark()), [], START_S))


def test_an_engine_with_a_timeline_of_its_own_tells_both():
    own, kept = Timeline(), Recent()
    both = Both(own, kept)
    both.step(1, START_S, START_S + 1, prefill_tokens=3)
    both.windows(windows(load(1, 0, 0, 1)))
    both.wait(START_S, START_S + 1, request="user 1")
    both.request("user 1", Kind.QUEUED, START_S, START_S + 1)
    assert len(own) == 4
    part = kept.since(Mark())
    assert (len(part.steps), len(part.copies), len(part.waits)) == (1, 1, 1)
    assert kept.requests() == [("user 1", Kind.QUEUED, START_S, START_S + 1)]


# -- the last minute -------------------------------------------------------------------------------


def told(lanes, name, since=0):
    """{tenths since START_S: value} of what is not zero."""
    wire = lanes.since(since)
    origin = round(START_S * 10)
    return {wire.first + i - origin: value for i, value in enumerate(getattr(wire, name)) if value}


def test_shares_of_tenths():
    kept, lanes = Recent(), Lanes()
    kept.step(1, START_S + 0.05, START_S + 0.22, decode_tokens=1)
    kept.step(2, START_S + 0.3, START_S + 0.4, prefill_tokens=9)
    kept.wait(START_S + 0.22, START_S + 0.25)
    kept.windows(windows(load(1, 0, 0.0, 0.05), load(2, 1, 0.0, 0.05, of=TransferClass.DEMAND)))
    kept.windows(windows(save(3, 0.1, 0.3, size=2000)))
    lanes.add(kept.since(Mark()), START_S + 0.5)
    assert told(lanes, "decode") == {0: 50, 1: 100, 2: 20}
    assert told(lanes, "prefill") == {3: 100}
    assert told(lanes, "wait") == {2: 30}
    assert told(lanes, "prefetch") == {0: 50}
    assert told(lanes, "demand") == {0: 50}
    assert told(lanes, "save") == {1: 100, 2: 100}
    assert told(lanes, "load_bytes_per_s") == {0: 20_000}
    assert told(lanes, "save_bytes_per_s") == {1: 10_000, 2: 10_000}


def test_a_reader_gets_what_changed_and_what_is_told_late_changes_the_past():
    kept, lanes = Recent(), Lanes()
    kept.step(1, START_S, START_S + 0.1, decode_tokens=1)
    part = kept.since(Mark())
    lanes.add(part, START_S + 2)
    seen = lanes.changes
    assert len(lanes.since(seen).decode) == 0
    kept.step(2, START_S + 1.5, START_S + 2.5, decode_tokens=1)
    lanes.add(kept.since(part.mark), START_S + 3)
    wire = lanes.since(seen)
    assert wire.first == round(START_S * 10) + 15
    assert wire.decode == [100] * 10 + [0] * 6
    assert told(lanes, "decode") == {0: 100, **dict.fromkeys(range(15, 25), 100)}


def test_lanes_forget_what_is_older_than_a_minute():
    kept, lanes = Recent(), Lanes()
    kept.step(1, START_S, START_S + 1, decode_tokens=1)
    part = kept.since(Mark())
    lanes.add(part, START_S + 1)
    lanes.add(kept.since(part.mark), START_S + 60.5)
    assert len(lanes.since(0).decode) == TENTHS
    assert told(lanes, "decode") == dict.fromkeys(range(6, 10), 100)
    lanes.add(kept.since(part.mark), START_S + 1000)
    assert told(lanes, "decode") == {}
    lanes.add(part, START_S + 1000)
    assert told(lanes, "decode") == {}, "news of long ago is none"


def test_a_copy_without_length_counts_its_bytes_once():
    kept, lanes = Recent(), Lanes()
    kept.windows(windows(load(1, 0, 0.25, 0.25, size=500)))
    lanes.add(kept.since(Mark()), START_S + 1)
    assert told(lanes, "load_bytes_per_s") == {2: pytest.approx(5000, rel=0.01)}


# -- names -----------------------------------------------------------------------------------------


def test_long_and_broken_session_names_are_cut_to_what_can_be_shown():
    view = request_view()
    assert request_wire(view, "x" * 500, START_S).session == "x" * 47 + "\N{HORIZONTAL ELLIPSIS}"
    assert request_wire(view, "\ud800", START_S).session == "?"


def request_view():
    return RequestView(
        id=1,
        doing=Doing.TURN,
        place=1,
        prompt_tokens=10,
        computed_tokens=0,
        found_tokens=0,
        host_tokens=0,
        near_tokens=0,
        flying=False,
        answer_tokens=0,
        most_answer_tokens=4,
        load_wait_s=0.0,
        arrival_s=START_S - 1,
        started_s=None,
        first_token_s=None,
    )
