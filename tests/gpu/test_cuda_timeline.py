"""A timeline of the device: steps, windows and waits on one clock, by its own events."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch
from gpu_rig import GpuRig
from oracle import BLOCK_TOKENS
from tiny_models import build

from forebay.core.modes import Mode
from forebay.engine.engine import Engine
from forebay.engine.models import adopt_model
from forebay.engine.sampler import SamplingParams
from forebay.engine.settings import EngineSettings
from forebay.engine.tracing import DeviceTrace
from forebay.timeline.record import Kind, Timeline


def test_an_event_is_told_on_the_clock_of_the_host():
    rig = GpuRig(timing=True)
    event = torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        before_s = time.monotonic()
        torch.cuda._sleep(20_000_000)
        event.record()
        assert rig.mover.when(event.cuda_event) is None, "it has not completed"
        event.synchronize()
        after_s = time.monotonic()
        at_s = rig.mover.when(event.cuda_event)
        assert at_s is not None
        assert before_s - 1e-3 <= at_s <= after_s + 1e-3
    rig.close()


def test_windows_take_the_device_s_time():
    rig = GpuRig(slots=64, parts=1, fragment=1 << 20, gap=0, window_bytes=4 << 20, timing=True)
    began_s = time.monotonic()
    rig.end_of(rig.load(range(64), range(64)))
    ended_s = time.monotonic()
    windows = rig.mover.windows()
    assert windows["bytes"].sum() == 64 << 20
    assert (windows["end_s"] > windows["start_s"]).all()
    assert windows["start_s"].min() >= began_s - 1e-3
    assert windows["end_s"].max() <= ended_s + 1e-3
    for lane in (0, 1):
        mine = windows[windows["lane"] == lane]
        assert (mine["start_s"][1:] >= mine["end_s"][:-1] - 1e-4).all(), "one window a lane"
    rig.close()


def test_without_timing_no_event_is_told():
    rig = GpuRig()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    event.synchronize()
    assert rig.mover.when(event.cuda_event) is None
    rig.close()


@pytest.mark.parametrize("mode", [Mode.SYNCHRONOUS, Mode.LOOK_AHEAD])
def test_an_engine_s_steps_waits_and_copies_are_the_device_s(mode: Mode):
    loaded = adopt_model(build("llama").cuda(), name="tiny llama")
    timeline = Timeline()
    settings = EngineSettings(
        block_tokens=BLOCK_TOKENS, device_tokens=20 * BLOCK_TOKENS, host_bytes=1 << 20, mode=mode,
        min_load_tokens=BLOCK_TOKENS,
    )  # fmt: skip
    began_s = time.monotonic()
    with Engine(loaded, settings, timeline=timeline) as engine:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        prompts = [[seed + 3] * 60 for seed in range(6)]
        for _ in range(2):
            engine.generate(prompts, params)
        torch.cuda.synchronize()
        assert engine.cache.stats().loaded_bytes > 0
        steps = engine.steps
    spans = list(timeline)
    ran = [s for s in spans if s.kind in (Kind.DECODE_STEP, Kind.PREFILL_STEP)]
    assert steps - 8 <= len(ran) <= steps, "the newest may not have been told of yet"
    assert all(began_s <= span.start_s < span.end_s <= time.monotonic() for span in ran)
    ran.sort(key=lambda span: span.start_s)
    assert [s.details["step"] for s in ran] == sorted(s.details["step"] for s in ran)
    for one, next_one in pairwise(ran):
        assert one.end_s <= next_one.start_s + 1e-4
    assert {Kind.SAVE} <= {span.kind for span in spans}
    assert {Kind.DEMAND, Kind.PREFETCH} & {span.kind for span in spans}


def test_a_wait_of_the_stream_is_shown_before_its_step_and_a_finished_one_is_not():
    rig = GpuRig(timing=True)
    trace, timeline = DeviceTrace(rig.mover, torch.device("cuda")), Timeline()
    for step, waits in enumerate([True, False], start=1):
        torch.cuda._sleep(50_000_000)  # so that what follows runs behind each other
        trace.wait_begins(expected=True)
        if waits:
            torch.cuda._sleep(5_000_000)
        trace.waited(timeline, 0.0, 0.0, in_step=True)
        trace.step_begins()
        torch.cuda._sleep(5_000_000)
        trace.step_ends()
        torch.cuda.synchronize()
        trace.stepped(timeline, step, 0.0, 0.0, decode_tokens=1)
    wait, first, second = timeline
    assert wait.kind is Kind.WAIT
    assert (first.details["step"], second.details["step"]) == (1, 2)
    assert wait.start_s < wait.end_s <= first.start_s < first.end_s < second.start_s
    rig.close()
