"""The engine and its link: slow, hanging and failing, and aborts at every moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from oracle import (
    BLOCK_TOKENS,
    TINY_BLOCK_BYTES,
    Returning,
    Rig,
    greedy,
    ids,
    prompt,
    roomy,
)

from forebay.config import SaveMode
from forebay.core.modes import Mode
from forebay.core.requests import NotYet
from forebay.core.slots import SlotState
from forebay.engine.models import LoadedModel
from forebay.engine.request import EngineRequest, FinishReason
from forebay.transfer.messages import Direction

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("one_thread")]


# -- loads and those who run meanwhile -------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.ASYNCHRONOUS, Mode.LOOK_AHEAD])
def test_a_load_never_stalls_the_others(mode: Mode, llama: LoadedModel) -> None:
    case = Returning(llama, mode=mode)
    with case.rig:
        runs = case.engine.submit(prompt(10, 40), greedy(30))
        case.rig.run(lambda: len(runs.drawn) == 2)
        case.hold()
        loads = case.ask()
        case.rig.run(lambda: len(runs.drawn) == 25)
        assert loads.ticket is None
        assert case.rig.cache.admit(loads.id, first=True) is NotYet.LOADING
        case.release()
        case.rig.finish([runs, loads])
        assert loads.sources["host"] == 9
        assert case.steps_of(loads) == 4, "one prefill of what was not cached, then decodes"
        case.judge([runs, loads])
        case.rig.settle()


def test_a_synchronous_load_does_stall_them(llama: LoadedModel) -> None:
    case = Returning(llama, mode=Mode.SYNCHRONOUS)
    with case.rig:
        runs = case.engine.submit(prompt(10, 40), greedy(30))
        case.rig.run(lambda: len(runs.drawn) == 2)
        case.hold()
        loads = case.ask()
        timer = threading.Timer(0.3, case.release)
        timer.start()
        began_s, drawn = time.monotonic(), len(runs.drawn)
        case.rig.step()
        assert time.monotonic() - began_s > 0.25
        assert len(runs.drawn) == drawn + 1
        assert len(loads.drawn) == 1, "they were in one step"
        assert case.engine.stall_s > 0.25
        case.rig.finish([runs, loads])
        case.judge([runs, loads])
        case.rig.settle()


@pytest.mark.parametrize("mode", [Mode.SYNCHRONOUS, Mode.ASYNCHRONOUS, Mode.LOOK_AHEAD])
@pytest.mark.parametrize("windows", ["many", "one"])
@pytest.mark.parametrize("noticed", ["by the link", "by the engine"])
def test_a_link_that_hangs_costs_its_bound_and_no_token(
    mode: Mode, windows: str, noticed: str, llama: LoadedModel
) -> None:
    """Handed over in part or whole; given up by the link's own bound, or long before that."""
    bound_s = 0.3
    case = Returning(
        llama,
        mode=mode,
        patient=False,
        window_bytes=TINY_BLOCK_BYTES * (1 if windows == "many" else 16),
        wait_timeout_s=bound_s if noticed == "by the link" else 100.0,
        device_tokens=30 * BLOCK_TOKENS,
    )
    case.engine.settings = replace(case.engine.settings, wait_timeout_s=bound_s)
    with case.rig:
        runs = case.engine.submit(prompt(10, 40), greedy(12))
        case.rig.run(lambda: len(runs.drawn) == 2)
        case.hold()
        asked = [runs, case.ask(), case.ask()]
        began_s = time.monotonic()
        case.rig.finish(asked)
        asked.append(case.engine.submit(prompt(20, 41), greedy(3)))
        case.rig.finish(asked)
        assert time.monotonic() - began_s < 30.0
        case.judge(asked)
        case.release()
        case.rig.settle()


@pytest.mark.parametrize("mode", [Mode.ASYNCHRONOUS, Mode.LOOK_AHEAD])
def test_a_load_that_hangs_whole_holds_nobody_else_up(mode: Mode, llama: LoadedModel) -> None:
    """Handed over in one window, so that it counts as issued: on a GPU a stream would wait."""
    case = Returning(llama, mode=mode, window_bytes=TINY_BLOCK_BYTES * 16, wait_timeout_s=100.0)
    with case.rig:
        runs = case.engine.submit(prompt(10, 40), greedy(30))
        case.rig.run(lambda: len(runs.drawn) == 2)
        case.hold()
        loads = case.ask()
        case.rig.finish([runs])
        assert loads.ticket is None
        assert case.engine.stall_s == 0.0
        case.release()
        case.rig.finish([loads])
        assert loads.sources["host"] == 9
        case.judge([runs, loads])
        case.rig.settle()


@pytest.mark.parametrize("mode", [Mode.SYNCHRONOUS, Mode.ASYNCHRONOUS, Mode.LOOK_AHEAD])
def test_a_link_that_stopped_is_waited_for_once(
    mode: Mode, llama: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    case = Returning(
        llama,
        mode=mode,
        patient=False,
        window_bytes=TINY_BLOCK_BYTES * 16,
        wait_timeout_s=1000.0,
        device_tokens=30 * BLOCK_TOKENS,
    )
    link = case.rig.cache._loads.link
    with case.rig:
        case.hold()
        first = case.ask()
        case.rig.finish([first])
        assert link.stopped
        flying = case.rig.cache._flights.load_blocks
        stalled_s = case.engine.stall_s
        later = [case.ask(), case.ask(1)]
        case.rig.finish(later)
        assert case.engine.stall_s == stalled_s
        assert case.rig.cache._flights.load_blocks == flying
        assert case.rig.cache.stats().misses["stopped"] > 0
        case.release()
        case.rig.settle()
        assert not link.stopped
        again = case.ask()
        case.rig.finish([again])
        assert again.sources["host"] > 0
        case.judge([first, *later, again])
        case.rig.settle()
    said = [record.getMessage() for record in caplog.records if record.name == "forebay.cache"]
    assert ["hang" in line for line in said] == [True, False]


def test_closing_while_the_link_hangs(llama: LoadedModel) -> None:
    case = Returning(llama, mode=Mode.LOOK_AHEAD)
    case.hold()
    case.hold(Direction.SAVE)
    asked = [case.ask(), case.engine.submit(prompt(60, 44), greedy(5))]
    for _ in range(4):
        case.rig.step()
    threads = threading.active_count()
    began_s = time.monotonic()
    case.rig.cache.close(timeout_s=0.3)
    case.engine.close()
    assert time.monotonic() - began_s < 5.0
    assert threading.active_count() <= threads
    assert all(request.finished is not None for request in asked)
    case.rig.close()


def test_saves_that_hang_hold_nobody_up_for_long(llama: LoadedModel) -> None:
    case = Returning(llama, patient=False, wait_timeout_s=0.5)
    with case.rig:
        case.hold(Direction.SAVE)
        asked = [case.engine.submit(prompt(80, 70 + i), greedy(5)) for i in range(6)]
        case.rig.finish(asked)
        case.judge(asked)
        case.rig.settle()
        assert {request.finished for request in asked} == {FinishReason.LENGTH}


@pytest.mark.parametrize("mode", [Mode.SYNCHRONOUS, Mode.ASYNCHRONOUS, Mode.LOOK_AHEAD])
@pytest.mark.parametrize("window", [0, 5])
def test_failed_loads_are_recomputed(mode: Mode, window: int, llama: LoadedModel) -> None:
    case = Returning(llama, mode=mode, patient=False, window_bytes=TINY_BLOCK_BYTES // 2)
    with case.rig:
        case.core.fail_window(Direction.LOAD, window)
        asked = [case.ask(0), case.ask(0)]
        case.rig.finish(asked)
        case.judge(asked)
        case.rig.settle()
        stats = case.rig.cache.stats()
        assert stats.quarantined_blocks == 1
        assert sum(stats.misses.values()) == stats.sources["recomputed"]
        if mode is not Mode.SYNCHRONOUS:
            assert stats.misses["failed"] > 0


def test_a_load_that_is_lost_is_not_told_as_one(llama: LoadedModel) -> None:
    """Where steps wait for loads, a request is admitted with its own under way."""
    case = Returning(llama, mode=Mode.SYNCHRONOUS, window_bytes=TINY_BLOCK_BYTES // 2)
    with case.rig:
        case.core.fail_window(Direction.LOAD, 0)
        lost = case.ask()
        case.rig.run(lambda: lost.ticket is not None or lost.finished is not None)
        case.rig.finish([lost])
        assert lost.sources["host"] == 0
        assert lost.sources["recomputed"] == len(lost.prompt_ids) // BLOCK_TOKENS
        case.judge([lost])
        case.rig.settle()


def test_failed_saves_leave_the_blocks_where_they_are(llama: LoadedModel) -> None:
    with Rig(llama, roomy(window_bytes=TINY_BLOCK_BYTES)) as rig:
        rig.engine.mover.core.fail_window(Direction.SAVE, 2)
        first = rig.engine.submit(prompt(70, 7), greedy(2))
        rig.finish([first])
        rig.settle()
        again = rig.engine.submit(prompt(70, 7), greedy(2))
        rig.finish([again])
        assert again.sources["device"] == 8
        assert ids(again) == ids(first)
        rig.settle()


def test_a_pool_that_lost_too_many_slots_fails_whom_it_cannot_hold(llama: LoadedModel) -> None:
    case = Returning(llama, mode=Mode.ASYNCHRONOUS, patient=False)
    with case.rig:
        big = case.engine.submit(prompt(140, 45), greedy(20))
        case.rig.run(lambda: len(big.drawn) == 1)
        tier = case.rig.cache._store.device.tier
        tier._counts[SlotState.QUARANTINED] += 1  # as after a copy that never ended
        small = case.engine.submit(prompt(20, 46), greedy(3))
        case.engine._batcher.preempt(big)
        case.rig.finish([big, small])
        tier._counts[SlotState.QUARANTINED] -= 1
        assert big.finished is FinishReason.FAILED
        assert "restart" in big.error
        assert small.finished is FinishReason.LENGTH
        case.rig.settle()


def test_the_mode_can_change_while_everything_is_under_way(llama: LoadedModel) -> None:
    case = Returning(llama, patient=False, save_mode=SaveMode.ON_EVICT)
    modes = [Mode.RECOMPUTE, Mode.ASYNCHRONOUS, Mode.SYNCHRONOUS, Mode.LOOK_AHEAD]
    with case.rig:
        asked = [
            case.engine.submit(np.concatenate([each, prompt(5, 30 + i)]), greedy(6))
            for i in range(3)
            for each in case.prompts
        ]
        for turn in range(2000):
            if not case.engine.busy:
                break
            case.engine.set_mode(modes[turn // 3 % 4])
            case.rig.step()
        case.rig.finish(asked)
        case.judge(asked)
        case.rig.settle()


# -- aborts ----------------------------------------------------------------------------------------


def unmatched(case: Returning) -> EngineRequest:
    return case.ask()


def prefetching(case: Returning) -> EngineRequest:
    case.hold()
    busy = [case.engine.submit(prompt(3, 80 + i), greedy(30)) for i in range(3)]
    case.rig.run(lambda: all(len(request.drawn) > 1 for request in busy))
    waiting = case.ask()
    case.rig.step()
    assert case.rig.cache._line[waiting.id].waits
    assert waiting.ticket is None
    return waiting


def loading(case: Returning) -> EngineRequest:
    case.hold()
    waiting = case.ask()
    case.rig.step()
    assert case.rig.cache._line[waiting.id].turn_s is not None
    return waiting


def prefilling(case: Returning) -> EngineRequest:
    request = case.engine.submit(prompt(90, 47), greedy(5))
    case.rig.run(lambda: request.computed_tokens > 0)
    assert request.computed_tokens < 90
    return request


def decoding(case: Returning) -> EngineRequest:
    request = case.ask(count=9)
    case.rig.run(lambda: len(request.drawn) > 3)
    return request


def preempted(case: Returning) -> EngineRequest:
    request = decoding(case)
    case.engine._batcher.preempt(request)
    return request


def finished(case: Returning) -> EngineRequest:
    request = case.ask()
    case.rig.finish([request])
    return request


STATES = [unmatched, prefetching, loading, prefilling, decoding, preempted, finished]


@pytest.mark.parametrize("state", STATES)
def test_abort_in_every_state(state: Callable[[Returning], EngineRequest], llama: Any) -> None:
    case = Returning(llama, device_tokens=26 * BLOCK_TOKENS)
    with case.rig:
        request = state(case)
        before = request.finished
        case.engine.abort(request.id)
        case.engine.abort(request.id)
        case.engine.abort(987_654)
        assert request.finished is (before or FinishReason.ABORTED)
        assert request.ticket is None
        case.release()
        for other in list(case.engine._requests):
            case.engine.abort(other)
        assert not case.engine.busy
        case.rig.settle()
        after = case.engine.submit(np.concatenate([case.prompts[0], [5]]), greedy(3))
        case.rig.finish([after])
        case.judge([after])
        case.rig.settle()


def test_a_chat_that_nobody_reads_on_is_aborted(talking: LoadedModel) -> None:
    with Rig(talking, roomy()) as rig:
        talking.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        try:
            answer = rig.engine.chat([{"role": "user", "content": "hello"}], greedy(50))
            next(answer)
            answer.close()
        finally:
            talking.tokenizer.chat_template = None
        assert not rig.engine.busy
        rig.settle()
