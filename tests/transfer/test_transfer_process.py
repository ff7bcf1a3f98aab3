"""What only a mover in another process can do wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transfer_rig import Rig

from forebay.errors import ProtocolError, SettingsError
from forebay.transfer.arena import HostArena
from forebay.transfer.messages import Direction, Outcome, TransferClass
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
