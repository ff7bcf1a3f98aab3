"""The mover on a CUDA device: every byte, in order, whatever is asked of it and whenever."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
import torch

from forebay.errors import DeviceError, NotIssuedError, SettingsError
from forebay.transfer.messages import Outcome
from forebay.transfer.native import NativeMover
from forebay.transfer.pinned import PinnedArena
from forebay.transfer.pool import Pool


def test_a_device_that_is_not_there_is_refused_with_what_there_is():
    with pytest.raises(SettingsError, match="no CUDA device 99: this process sees"):
        PinnedArena(4096, 4096, device_index=99)
    pool = Pool.of([np.zeros((2, 4096), np.uint8)])
    with pytest.raises(SettingsError, match="no CUDA device 99"):
        NativeMover(pool, pool, backend="cuda", device_index=99)


def test_a_save_waits_for_the_step_that_writes(make_rig):
    rig = make_rig()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        rig.device.fill_(7)
    save = rig.save([3], [5], after=1)
    rig.poll()
    assert save not in rig.issued
    rig.mover.step_launched(1, stream.cuda_stream)
    assert rig.end_of(save).outcome is Outcome.DONE
    assert (rig.host[5] == 7).all()
    assert rig.completed_step == 1


def test_a_step_that_is_captured_is_refused_and_counts_where_it_is_launched(make_rig):
    rig = make_rig()
    stream = torch.cuda.Stream()
    said = ""
    # The driver may end the capture for it.
    with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        rig.device.fill_(3)
        try:
            rig.mover.step_launched(1, stream.cuda_stream)
        except DeviceError as error:
            said = str(error)
    assert "step 1 would never count as run" in said
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        torch.cuda._sleep(100_000_000)
        rig.device.fill_(7)
    save = rig.save([3], [5], after=1)
    with torch.cuda.stream(stream):
        graph.replay()
    rig.mover.step_launched(1, stream.cuda_stream)
    assert rig.end_of(save).outcome is Outcome.DONE
    assert (rig.host[5] == 7).all()


def test_a_step_behind_a_wait_reads_what_was_loaded(make_rig):
    rig = make_rig(slots=64, parts=1, fragment=1 << 20, window_bytes=1 << 20)
    stream = torch.cuda.Stream()
    for _ in range(10):
        rig.device.zero_()
        torch.cuda.synchronize()
        load = rig.load(range(64), range(64))
        rig.until(lambda load=load: load in rig.issued)
        rig.mover.wait([load], stream.cuda_stream)
        with torch.cuda.stream(stream):
            read = rig.device.clone()
        stream.synchronize()
        assert (read[0].cpu().numpy() == rig.host).all()
        rig.end_of(load)


def test_nobody_waits_for_what_is_not_issued(make_rig):
    rig = make_rig()
    for lane in range(2):
        rig.mover.core.hold_lane(0, lane)
    load = rig.load(range(8), range(8))
    with pytest.raises(NotIssuedError):
        rig.mover.wait([load], torch.cuda.current_stream().cuda_stream)
    for lane in range(2):
        rig.mover.core.release_lane(0, lane)
    rig.end_of(load)


def test_a_load_waits_for_the_step_that_reads_its_slot(make_rig):
    rig = make_rig()
    rig.device.fill_(9)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        read = rig.device.clone()
    rig.mover.step_launched(1, stream.cuda_stream)
    rig.end_of(rig.load(range(rig.slots), range(rig.slots), after=1))
    stream.synchronize()
    assert (read == 9).all()
    assert (rig.device_blocks() == rig.host).all()


def test_a_load_waits_for_the_save_of_its_host_slot(make_rig):
    rig = make_rig()
    rig.device.fill_(4)
    torch.cuda.synchronize()
    for lane in range(2):
        rig.mover.core.hold_lane(1, lane)
    save = rig.save([0], [1])
    load = rig.load([1], [2])
    rig.until(lambda: save in rig.issued)
    assert load not in rig.issued
    for lane in range(2):
        rig.mover.core.release_lane(1, lane)
    rig.end_of(load)
    assert (rig.device_blocks()[2] == 4).all()


def test_no_copy_crosses_two_registrations(make_rig):
    block = 64 * 1024
    rig = make_rig(parts=1, fragment=block, gap=0, slots=64, slice_bytes=8 * block,
                   window_bytes=32 * block)  # fmt: skip
    assert rig.end_of(rig.load(range(64), range(64))).outcome is Outcome.DONE
    assert (rig.device_blocks() == rig.host).all()


def test_a_window_that_fails_is_told_and_the_rest_goes_on(make_rig):
    rig = make_rig()
    rig.mover.core.fail_window(0, 2)
    broken = rig.end_of(rig.load(range(8), range(8)))
    assert broken.outcome is Outcome.FAILED
    assert "injected" in broken.error
    assert rig.end_of(rig.load(range(8), range(8))).outcome is Outcome.DONE
    assert (rig.device_blocks()[:8] == rig.host[:8]).all()
