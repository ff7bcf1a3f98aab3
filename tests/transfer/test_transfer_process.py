"""What only a mover in another process can do wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transfer_rig import BLOCK, PART, PATIENCE_S, Rig

from forebay.errors import ProtocolError, SettingsError
from forebay.transfer import process
from forebay.transfer.arena import HostArena
from forebay.transfer.messages import Completion, Direction, Outcome, Report, TransferClass
from forebay.transfer.mover import TransferFailedError
from forebay.transfer.pool import Pool
from forebay.transfer.process import ProcessMover


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig("process", reply_timeout_s=1.0)
    yield made
    made.close()


def mover(rig: Rig) -> ProcessMover:
    assert isinstance(rig.mover, ProcessMover)
    return rig.mover


def test_reports_come_one_poll_late(rig: Rig) -> None:
    id_ = rig.load([0], [0])
    assert rig.mover.wait_news(10.0)
    time.sleep(0.2)
    assert rig.mover.poll().completions == ()
    assert rig.mover.wait_news(0.0)
    assert [each.id for each in rig.mover.poll().completions] == [id_]


def test_a_stopped_child_is_closed_within_its_bound() -> None:
    rig = Rig("process", reply_timeout_s=1000.0)
    held = rig.load([1, 2], [1, 2], after=[1, 1])
    os.kill(mover(rig).pid, signal.SIGSTOP)
    rig.mover.close(0.05)
    assert rig.ended(held)
    end = rig.completions[held]
    assert (end.outcome, end.blocks_touched) == (Outcome.FAILED, 2)
    assert mover(rig)._connection.closed
    assert mover(rig)._child.returncode is not None
    rig.close()


class Broken:
    """A connection whose other end is gone, as `recv` finds out."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def send(self, _: object) -> None: ...

    def poll(self, _: float) -> bool:
        return True

    def recv(self) -> object:
        raise self._error

    def close(self) -> None: ...


@pytest.mark.parametrize("error", [EOFError(), ConnectionResetError()])
def test_a_child_that_is_gone_before_its_answer_fails_its_transfers(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    id_ = rig.load([1], [1], after=[1])
    mover(rig)._connection.close()
    monkeypatch.setattr(rig.mover, "_connection", Broken(error))
    assert rig.ended(id_)
    assert rig.completions[id_].outcome is Outcome.FAILED


@pytest.mark.parametrize(
    "held",
    [
        Report((1,), (), 0),
        Report((), (Completion(1, Outcome.DONE, 1, 1, 1, 0.0, 1.0, ""),), 0),
        Report((), (), 1),
        Report((), (), 0, ((1, 1),)),
    ],
    ids=["issued", "ended", "step", "bands"],
)
def test_what_was_fetched_is_news_until_it_is_told(rig: Rig, held: Report) -> None:
    assert not rig.mover.wait_news(0.0)
    mover(rig)._held = held
    assert rig.mover.wait_news(0.0)
    assert rig.mover.poll() is held
    assert not rig.mover.wait_news(0.0)


def test_a_step_that_ended_is_news_until_it_was_told(rig: Rig) -> None:
    rig.mover.step_launched(1)
    while not mover(rig)._held.completed_step:
        assert rig.mover.wait_news(PATIENCE_S)
        assert rig.mover.poll().completed_step == 0
    assert rig.mover.wait_news(0.0)
    assert rig.mover.poll().completed_step == 1
    assert not rig.mover.wait_news(0.0)


@pytest.mark.parametrize("what", ["wait", "wait_news"])
def test_the_child_is_asked_again_as_long_as_a_wait_may_last(
    rig: Rig, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait for a child that is asked: it never is for long."""
    rig.hold(Direction.LOAD)
    id_ = rig.load([1], [1])
    assert rig.is_issued(id_)
    while rig.mover.wait_news(0.0):
        rig.poll()
    call, asked = mover(rig)._call, list[float]()

    def ask(method: str, *arguments: object, **more: object) -> object:
        if method == what:
            timeout_s = arguments[2 if what == "wait" else 0]
            assert isinstance(timeout_s, float)
            asked.append(timeout_s)
            if len(asked) == 3:
                rig.release(Direction.LOAD)
        return call(method, *arguments, **more)

    monkeypatch.setattr(rig.mover, "_call", ask)
    if what == "wait":
        rig.mover.wait([id_], 0, PATIENCE_S)
    else:
        assert rig.mover.wait_news(PATIENCE_S)
    assert len(asked) >= 3
    assert max(asked) <= process._SLICE_S


def test_what_was_fetched_before_the_child_died_is_told(rig: Rig) -> None:
    rig.mover.step_launched(1)
    assert rig.until(lambda: rig.completed_step == 1)
    id_ = rig.load([0], [0])
    while not mover(rig)._held.completions:
        rig.poll()
        assert id_ not in rig.completions
    os.kill(mover(rig).pid, signal.SIGKILL)
    for _ in range(3):
        rig.poll()
    assert rig.completions[id_].outcome is Outcome.DONE
    assert rig.issued == [id_]


def test_what_nobody_fetched_before_it_was_closed_is_told(rig: Rig) -> None:
    id_ = rig.load([0], [0], after=[1])
    rig.mover.use_bands([id_], [PART, BLOCK])
    rig.mover.step_launched(1)
    landed = 0
    while landed < BLOCK:
        landed += int(rig.mover.windows()["bytes"].sum())
    rig.mover.close(PATIENCE_S)
    rig.poll()
    assert (rig.issued, rig.bands, rig.completed_step) == ([id_], {id_: 2}, 1)
    assert rig.completions[id_].outcome is Outcome.DONE


def test_what_was_refused_is_not_among_what_a_dead_child_leaves(rig: Rig) -> None:
    bad = rig.transfer(Direction.LOAD, [0], [rig.slots])
    with pytest.raises(ProtocolError, match="slot"):
        rig.mover.submit([bad])
    good = rig.load([0], [0], after=[1])
    os.kill(mover(rig).pid, signal.SIGKILL)
    assert rig.ended(good)
    for _ in range(2):
        rig.poll()
    assert list(rig.completions) == [good]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stopped_child_fails_its_transfers(rig: Rig, how: signal.Signals) -> None:
    done = rig.load([0], [0])
    assert rig.ended(done)
    rig.hold(Direction.LOAD)
    held = rig.load([1, 2], [1, 2])
    os.kill(mover(rig).pid, how)
    start_s = time.monotonic()
    later = rig.load([3], [3])
    assert rig.ended(held)
    assert rig.ended(later)
    assert time.monotonic() - start_s < 5
    assert rig.completions[held].outcome is Outcome.FAILED
    assert rig.completions[held].blocks_touched == 2
    assert rig.completions[later].outcome is Outcome.FAILED
    last = rig.load([4], [4])
    assert rig.ended(last)
    assert rig.completions[last].blocks_touched == 0
    with pytest.raises(TransferFailedError):
        rig.mover.wait([held])
    rig.mover.cancel([held])
    rig.mover.expedite([held], TransferClass.DEMAND, 0.0)
    rig.mover.step_launched(1)
    assert len(rig.mover.windows()) == 0


def test_a_child_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SettingsError, match="did not start"):
        Rig("process")


def test_a_child_that_refuses_its_settings_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = process._start, list[subprocess.Popen[bytes]]()

    def noting(*arguments: Any) -> Any:
        child, connection = start(*arguments)
        started.append(child)
        return child, connection

    monkeypatch.setattr(process, "_start", noting)
    with pytest.raises(SettingsError, match="window_bytes"):
        Rig("process", window_bytes=0)
    assert [child.returncode is not None for child in started] == [True]


def test_its_start_may_take_longer_than_an_answer() -> None:
    Rig("process", reply_timeout_s=0.01).close()


def test_only_stream_0_is_known(rig: Rig) -> None:
    with pytest.raises(ProtocolError, match="stream"):
        rig.mover.step_launched(1, stream=7)
    with pytest.raises(ProtocolError, match="stream"):
        rig.mover.wait([], stream=7)


def test_a_pool_outside_its_arena_is_refused() -> None:
    with HostArena(4096, shared=True) as arena, HostArena(4096) as plain:
        inside = Pool.of([arena.blocks(4, 1024)])
        elsewhere = Pool.of([np.zeros((4, 1024), np.uint8)])
        with pytest.raises(SettingsError, match="arena"):
            ProcessMover(elsewhere, inside, arena, arena)
        longer = Pool(arena.address, 5, inside.fragments)
        with pytest.raises(SettingsError, match="arena"):
            ProcessMover(longer, inside, arena, arena)
        own = Pool.of([plain.blocks(4, 1024)])
        with pytest.raises(ProtocolError, match="shared"):
            ProcessMover(own, inside, plain, arena)
        del inside, own


def test_the_child_ends_with_its_parent() -> None:
    script = (
        "from transfer_rig import Rig\n"
        "rig = Rig('process')\n"
        "rig.hold(0)\n"
        "rig.load([0], [0])\n"
        "print(rig.mover.pid, flush=True)\n"
        "import os; os._exit(1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    pid = int(done.stdout)
    end_s = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end_s:
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
