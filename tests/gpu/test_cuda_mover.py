"""The mover on a CUDA device: every byte, in order, whatever is asked of it and whenever."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from gpu_rig import GpuRig

from forebay.errors import NotIssuedError, SettingsError
from forebay.transfer.messages import Outcome, TransferClass
from forebay.transfer.native import NativeMover
from forebay.transfer.pinned import PinnedArena
from forebay.transfer.pool import Pool


@pytest.fixture
def make_rig():
    made: list[GpuRig] = []

    def make(**settings):
        made.append(GpuRig(**settings))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def test_a_device_that_is_not_there_is_refused_with_what_there_is():
    with pytest.raises(SettingsError, match="no CUDA device 99: this process sees"):
        PinnedArena(4096, 4096, device_index=99)
    pool = Pool.of([np.zeros((2, 4096), np.uint8)])
    with pytest.raises(SettingsError, match="no CUDA device 99"):
        NativeMover(pool, pool, backend="cuda", device_index=99)


@pytest.mark.parametrize("piece_by_piece", [False, True])
@pytest.mark.parametrize(("parts", "fragment"), [(1, 65536), (8, 4096), (64, 512), (6, 1013)])
def test_blocks_go_down_and_come_back_byte_for_byte(make_rig, parts, fragment, piece_by_piece):
    rig = make_rig(parts=parts, fragment=fragment, piece_by_piece=piece_by_piece)
    rig.fill_device()
    before = rig.device_blocks()
    order = rig.rng.permutation(rig.slots)
    assert rig.end_of(rig.save(range(rig.slots), order)).outcome is Outcome.DONE
    assert (rig.host[order] == before).all()
    rig.fill_device()
    assert rig.end_of(rig.load(order, range(rig.slots))).outcome is Outcome.DONE
    assert (rig.device_blocks() == before).all()
    assert rig.poisoned()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn"])
def test_pools_of_every_type_of_number(dtype):
    numbers = torch.randn(8, 2, 16, 4, 32).to(getattr(torch, dtype)).cuda()
    before = numbers.clone()
    block = numbers[0].numel() * numbers.element_size()
    with PinnedArena(8 * block, block, threads=1) as arena:
        rig = GpuRig.__new__(GpuRig)
        rig.mover = NativeMover(
            Pool.of([numbers]), Pool.of([arena.blocks(8, block)]), backend="cuda"
        )
        rig.issued, rig.ended, rig.next_id = set(), {}, 1
        rig.end_of(rig.save(range(8), range(8)))
        numbers.zero_()
        torch.cuda.synchronize()
        rig.end_of(rig.load(range(8), range(8)))
        assert (numbers.view(torch.uint8) == before.view(torch.uint8)).all()
        rig.mover.close(5.0)


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


def test_ten_thousand_random_calls_leave_nothing_behind(make_rig):
    rig = make_rig(slots=32, parts=4, fragment=16384)
    rng = random.Random(1)
    stream = torch.cuda.Stream()
    free = torch.cuda.mem_get_info()[0]
    live: list[int] = []
    step = 0
    for _ in range(10_000):
        kind = rng.random()
        blocks = rng.sample(range(32), rng.randint(1, 8))
        other = rng.sample(range(32), len(blocks))
        if kind < 0.25:
            live.append(rig.load(blocks, other, after=step, transfer_class=TransferClass(1)))
        elif kind < 0.5:
            live.append(rig.save(blocks, other, after=step))
        elif kind < 0.6 and live:
            rig.mover.cancel([rng.choice(live)])
        elif kind < 0.7 and live:
            rig.mover.expedite([rng.choice(live)], TransferClass.DEMAND, 0.0)
        elif kind < 0.8:
            step += 1
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1000)
            rig.mover.step_launched(step, stream.cuda_stream)
        elif kind < 0.9 and live:
            issued = [each for each in live if each in rig.issued and each not in rig.ended]
            rig.mover.wait(issued[:3], stream.cuda_stream)
        rig.poll()
        live = [each for each in live if each not in rig.ended]
        if len(live) > 200:
            rig.end_of(live[0])
    for each in live:
        rig.end_of(each)
    assert {each.outcome for each in rig.ended.values()} <= {Outcome.DONE, Outcome.CANCELLED}
    assert len(rig.ended) == rig.next_id - 1
    assert abs(torch.cuda.mem_get_info()[0] - free) < 64 << 20
    assert rig.poisoned()
