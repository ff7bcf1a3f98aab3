"""What every mover must do: in this process on both backends, and in another process."""

from __future__ import annotations

import time

import numpy as np
import pytest
from transfer_rig import BLOCK, MakeRig, Rig

from forebay.errors import LinkTimeoutError, NotIssuedError, ProtocolError, SettingsError
from forebay.transfer.messages import Direction, Outcome, Transfer, TransferClass
from forebay.transfer.mover import TransferFailedError


@pytest.mark.parametrize("window_bytes", [97, 1013, BLOCK - 1, BLOCK, 4 * BLOCK + 7, 1 << 20])
def test_blocks_arrive_whole_wherever_windows_cut(make_rig: MakeRig, window_bytes: int) -> None:
    rig = make_rig(window_bytes=window_bytes)
    sources = [3, 4, 5, 9, 0, 23, 22, 21]
    destinations = [3, 4, 6, 7, 23, 0, 1, 2]
    wanted = {to: rig.host[at].copy() for at, to in zip(sources, destinations, strict=True)}
    kept = rig.device_block(10)
    assert rig.ended(rig.load(sources, destinations))
    for slot, block in wanted.items():
        np.testing.assert_array_equal(rig.device_block(slot), block)
    np.testing.assert_array_equal(rig.device_block(10), kept)


def test_round_trip_through_the_other_pool(rig: Rig) -> None:
    before = rig.device_block(2)
    rig.save([2], [17])
    last = rig.load([17], [5])
    assert rig.ended(last)
    np.testing.assert_array_equal(rig.device_block(5), before)
    done = rig.completions[last]
    assert (done.outcome, done.blocks_done, done.blocks_touched) == (Outcome.DONE, 1, 1)
    assert done.bytes == BLOCK
    assert done.error == ""
    assert 0 < done.started_s <= done.finished_s <= time.monotonic()


def test_an_issued_transfer_may_be_waited_for(rig: Rig) -> None:
    rig.hold(Direction.LOAD)
    id_ = rig.load([1], [1])
    with pytest.raises(NotIssuedError):
        rig.mover.wait([id_ + 1])
    if rig.is_issued(id_, 0.2):
        with pytest.raises(LinkTimeoutError):
            rig.mover.wait([id_], 0, 0.05)
    rig.release(Direction.LOAD)
    assert rig.is_issued(id_)
    rig.mover.wait([id_], 0, 10.0)
    np.testing.assert_array_equal(rig.device_block(1), rig.host[1])
    assert rig.ended(id_)
    rig.mover.wait([id_])


def test_an_unissued_transfer_may_not(rig: Rig) -> None:
    id_ = rig.load([1, 2], [1, 2], after=[0, 1])
    assert not rig.is_issued(id_, 0.05)
    with pytest.raises(NotIssuedError):
        rig.mover.wait([id_])
    rig.mover.step_launched(1)
    assert rig.is_issued(id_)
    rig.mover.wait([id_])


def test_copies_begin_as_their_steps_complete(rig: Rig) -> None:
    id_ = rig.save([0, 1, 2], [0, 1, 2], after=[0, 2, 3])
    rig.mover.step_launched(2)
    rig.mover.step_abandoned(3)
    assert not rig.ended(id_, 0.05)
    assert rig.completed_step == 0
    rig.device[:, :, 1] = 7
    rig.mover.step_launched(1)
    assert rig.ended(id_)
    assert rig.until(lambda: rig.completed_step == 3)
    assert (rig.host[1] == 7).all()


def test_a_step_is_numbered_once(rig: Rig) -> None:
    rig.mover.step_launched(1)
    with pytest.raises(ProtocolError):
        rig.mover.step_launched(1)
    with pytest.raises(ProtocolError):
        rig.mover.step_abandoned(1)


def test_class_then_deadline_then_id(rig: Rig) -> None:
    prefetch = TransferClass.PREFETCH
    late = rig.load([0], [0], after=[1], transfer_class=prefetch, deadline_s=9)
    soon = rig.load([1], [1], after=[1], transfer_class=prefetch, deadline_s=5)
    same = rig.load([2], [2], after=[1], transfer_class=prefetch, deadline_s=5)
    raised = rig.load([3], [3], after=[1], transfer_class=prefetch, deadline_s=99)
    demand = rig.load([4], [4], after=[1], deadline_s=100)
    between = rig.load([5], [5], after=[1], transfer_class=prefetch, deadline_s=99)
    rig.mover.expedite([raised, 999], TransferClass.DEMAND, 1.0)
    rig.mover.expedite([between], prefetch, 7.0)
    rig.mover.expedite([soon], TransferClass.SAVE, 0.0)
    rig.mover.step_launched(1)
    assert all(rig.ended(id_) for id_ in (late, soon, same, raised, demand, between))
    assert list(dict.fromkeys(rig.order())) == [raised, demand, soon, same, between, late]


def test_an_urgent_block_goes_before_what_is_queued(make_rig: MakeRig) -> None:
    rig = make_rig(window_bytes=BLOCK)
    rig.hold(Direction.LOAD)
    slots = list(range(20))
    long = rig.load(slots, slots, transfer_class=TransferClass.PREFETCH)
    urgent = rig.load([22], [22])
    assert not rig.ended(urgent, 0.05)
    rig.release(Direction.LOAD)
    assert rig.ended(long)
    assert rig.ended(urgent)
    windows = np.sort(rig.mover.windows(), order="start_s")
    assert urgent in windows["transfer"][:3]


@pytest.mark.parametrize("state", ["waiting", "in flight", "handed over", "ended", "unknown"])
def test_cancel_in_every_state(make_rig: MakeRig, state: str) -> None:
    rig = make_rig(window_bytes=BLOCK)
    if state in ("in flight", "handed over"):
        rig.hold(Direction.LOAD)
    blocks = {"handed over": 2}.get(state, 5)
    slots = list(range(blocks))
    id_ = rig.load(slots, slots, after=[1 if state == "waiting" else 0] * blocks)
    if state == "ended":
        assert rig.ended(id_)
    elif state == "handed over":
        assert rig.is_issued(id_)
    elif state == "in flight":
        assert not rig.ended(id_, 0.1)
    rig.mover.cancel([999] if state == "unknown" else [id_, id_])
    if state == "in flight":
        assert not rig.ended(id_, 0.05)
    rig.release(Direction.LOAD)
    assert rig.ended(id_)
    end = rig.completions[id_]
    done, outcome = {
        "waiting": (0, Outcome.CANCELLED),
        "in flight": (2, Outcome.CANCELLED),
    }.get(state, (blocks, Outcome.DONE))
    assert (end.blocks_done, end.blocks_touched, end.outcome) == (done, done, outcome)
    for slot in range(done):
        np.testing.assert_array_equal(rig.device_block(slot), rig.host[slot])
    if outcome is Outcome.CANCELLED:
        with pytest.raises(NotIssuedError):
            rig.mover.wait([id_])


def test_a_cancelled_load_frees_its_slots(rig: Rig) -> None:
    first = rig.load([0], [3], after=[9])
    second = rig.load([1], [3])
    assert not rig.ended(second, 0.05)
    rig.mover.cancel([first])
    assert rig.ended(second)
    np.testing.assert_array_equal(rig.device_block(3), rig.host[1])


def test_a_fault_ends_its_transfer_and_no_other(make_rig: MakeRig) -> None:
    rig = make_rig(lanes=1, window_bytes=BLOCK)
    rig.hook("fail_window", Direction.LOAD, 2)
    bad = rig.load([0, 1, 2, 3], [0, 1, 2, 3])
    good = rig.load([5], [5])
    assert rig.ended(bad)
    assert rig.ended(good)
    end = rig.completions[bad]
    assert (end.outcome, end.blocks_done, end.blocks_touched) == (Outcome.FAILED, 2, 3)
    assert end.error == "injected fault"
    assert rig.completions[good].outcome is Outcome.DONE
    with pytest.raises(TransferFailedError):
        rig.mover.wait([bad])


def test_a_copy_that_never_ends_fails_its_transfer(make_rig: MakeRig) -> None:
    rig = make_rig(window_timeout_s=0.2, window_bytes=BLOCK)
    rig.hold(Direction.LOAD)
    id_ = rig.load([0, 1, 2], [0, 1, 2])
    assert rig.ended(id_)
    end = rig.completions[id_]
    assert (end.outcome, end.blocks_done, end.blocks_touched) == (Outcome.FAILED, 0, 2)


def test_close_ends_everything_within_its_bound(rig: Rig) -> None:
    rig.hold(Direction.SAVE)
    waiting = rig.load([0], [0], after=[5])
    hung = rig.save([1], [1])
    assert not rig.ended(hung, 0.1)
    start_s = time.monotonic()
    rig.mover.close(0.3)
    assert time.monotonic() - start_s < 1.5
    assert rig.ended(waiting, 0.5)
    assert rig.ended(hung, 0.5)
    assert rig.completions[waiting].outcome is Outcome.CANCELLED
    assert rig.completions[hung].outcome is Outcome.FAILED
    assert rig.completions[hung].blocks_touched == 1
    with pytest.raises(ProtocolError):
        rig.load([1], [1])
    rig.mover.cancel([hung])
    rig.mover.close(0.3)
    assert rig.mover.wait_news(0.0)


def test_bad_submissions_change_nothing(rig: Rig) -> None:
    good = rig.transfer(Direction.LOAD, [0], [0])
    outside = rig.transfer(Direction.LOAD, [0], [24])
    with pytest.raises(ProtocolError, match="slot"):
        rig.mover.submit([good, outside])
    with pytest.raises(ProtocolError, match="one source, destination and step"):
        rig.mover.submit([rig.transfer(Direction.LOAD, [0, 1], [1, 2], after=[0])])
    wrong_type = Transfer(
        9, Direction.LOAD, TransferClass.DEMAND, 0.0,
        np.zeros(1, np.int64), np.zeros(1, np.int32), np.zeros(1, np.int64),  # type: ignore[arg-type]
    )  # fmt: skip
    with pytest.raises(ProtocolError, match="sources must be"):
        rig.mover.submit([wrong_type])
    with pytest.raises(ProtocolError, match="deadline"):
        rig.mover.submit([rig.transfer(Direction.LOAD, [0], [0], deadline_s=float("nan"))])
    rig.mover.submit([good])
    assert rig.ended(good.id)
    with pytest.raises(ProtocolError, match="increase"):
        rig.mover.submit([good])
    assert not rig.until(lambda: len(rig.completions) > 1, 0.05)


def test_too_many_transfers_not_polled_are_refused(make_rig: MakeRig) -> None:
    rig = make_rig(most_transfers=3)
    for _ in range(3):
        rig.load([0], [0], after=[1])
    with pytest.raises(ProtocolError, match="poll"):
        rig.load([0], [0], after=[1])


def test_settings_that_cannot_work_are_refused(make_rig: MakeRig) -> None:
    with pytest.raises(SettingsError, match="window_bytes"):
        make_rig(window_bytes=0)
    with pytest.raises(SettingsError, match="lanes"):
        make_rig(lanes=0)
    with pytest.raises(SettingsError, match="backend"):
        make_rig(backend="none")


def test_windows_are_recorded_and_bounded(make_rig: MakeRig) -> None:
    rig = make_rig(window_bytes=BLOCK, window_records=4)
    id_ = rig.load(list(range(10)), list(range(10)))
    assert rig.ended(id_)
    windows = rig.mover.windows()
    assert len(windows) == 4
    assert rig.mover.windows_dropped == 6
    assert (windows["bytes"] == BLOCK).all()
    assert (windows["transfer"] == id_).all()
    assert (windows["start_s"] <= windows["end_s"]).all()
    assert set(windows["lane"]) <= {0, 1}
    assert len(rig.mover.windows()) == 0


def test_random_transfers_leave_what_one_after_the_other_would(rig: Rig) -> None:
    rig.random_moves(np.random.default_rng(11), 60)
