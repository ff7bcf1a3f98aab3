"""A copy that fails, and a device that breaks: misses with a reason, and a clean end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from oracle import HOST_MODES, TINY_BLOCK_BYTES, Returning, greedy
from tiny_models import build

from forebay.core.modes import Mode
from forebay.core.slots import SlotState
from forebay.engine.models import adopt_model
from forebay.transfer.messages import Direction

BROKEN = """
import faulthandler
import torch
from gpu_rig import GpuRig
from forebay.transfer.messages import Outcome

faulthandler.dump_traceback_later(40, exit=True)
rig = GpuRig(slots=64, parts=1, fragment=1 << 20, window_bytes=1 << 20)
# All that needs a copy of its own comes first: it could wait behind a held lane.
values, beyond = torch.zeros(4, device="cuda"), torch.tensor([1 << 20], device="cuda")
values[beyond % 4]
torch.cuda.synchronize()
for lane in range(2):
    rig.mover.core.hold_lane(0, lane)
slots = [range(8 * i, 8 * i + 8) for i in range(8)]
ids = [rig.load(each, each) for each in slots]
rig.until(lambda: rig.mover.core.events_in_use >= 2)
values[beyond]
try:
    torch.cuda.current_stream().synchronize()
except RuntimeError as error:
    assert "CUDA error" in str(error)
for lane in range(2):
    rig.mover.core.release_lane(0, lane)
ends = [rig.end_of(each) for each in ids]
assert all(end.outcome is Outcome.FAILED for end in ends), ends
assert all("CUDA_ERROR" in end.error for end in ends if end.outcome is Outcome.FAILED), ends
assert sum(end.blocks_touched - end.blocks_done for end in ends) >= 2, "slots under lost copies"
late = rig.end_of(rig.load([0], [0]))
assert late.outcome is Outcome.FAILED and late.error
rig.mover.close(10.0)
rig.arena.close()
print("ended:", late.error)
"""

ENGINE = """
import faulthandler
import torch
from oracle import Rig, greedy, prompt, tiny_settings
from tiny_models import build
from forebay.engine.engine import Engine
from forebay.engine.models import adopt_model

faulthandler.dump_traceback_later(40, exit=True)
engine = Engine(adopt_model(build("llama").cuda(), name="tiny"), tiny_settings(check_blocks=False))
asked = [engine.submit(prompt(40, seed), greedy(30)) for seed in range(6)]
for _ in range(10):
    engine.step()
torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]
try:
    for _ in range(100):
        engine.step()
    print("no step failed")
except RuntimeError as error:
    print("a step failed:", "CUDA error" in str(error))
try:
    engine.close()
except RuntimeError as error:
    print("closed:", "CUDA error" in str(error))
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join([str(Path(__file__).parent), *sys.path]), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_broken_device_fails_every_transfer_and_the_process_ends_well():
    done = run(BROKEN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ended: " in done.stdout
    assert "CUDA_ERROR" in done.stdout


def test_an_engine_on_a_broken_device_says_so_and_closes():
    done = run(ENGINE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a step failed: True" in done.stdout
    assert "closed: True" in done.stdout


@pytest.mark.parametrize("mode", HOST_MODES)
@pytest.mark.parametrize("window", [0, 5])
def test_a_load_that_fails_is_a_miss_and_its_slot_stays_out_of_use(mode: Mode, window: int):
    loaded = adopt_model(build("llama").cuda(), name="tiny llama")
    case = Returning(loaded, mode=mode, patient=False, window_bytes=TINY_BLOCK_BYTES // 2)
    with case.rig:
        case.core.fail_window(Direction.LOAD, window)
        asked = [case.ask(0), case.ask(0)]
        case.rig.finish(asked)
        case.rig.settle()
        stats = case.rig.cache.stats()
        assert stats.quarantined_blocks == 1
        assert sum(stats.misses.values()) == stats.sources["recomputed"]
        if mode is not Mode.SYNCHRONOUS:
            assert stats.misses["failed"] > 0
        tier = case.rig.cache._store.device.tier
        states = tier.state(np.arange(tier.count, dtype=np.int32))
        lost = np.flatnonzero(states == SlotState.QUARANTINED)
        assert len(lost) == 1
        used: set[int] = set()
        case.rig.recorder.before_step.append(
            lambda chunks: used.update(slot for chunk in chunks for slot in chunk.slots.tolist())
        )
        asked += [case.engine.submit(each, greedy(4)) for each in case.prompts]
        case.rig.finish(asked)
        assert used
        assert lost[0] not in used
        case.judge(asked)
        case.rig.settle()
