"""The engine under preemption, faults, aborts and a link that stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from oracle import (
    BLOCK_TOKENS,
    Rig,
    compare_with_recompute,
    greedy,
    replay_difference,
    tiny_settings,
)

from forebay.config import BatchSettings, SaveMode
from forebay.core.modes import Mode
from forebay.core.requests import NotYet
from forebay.engine.engine import Engine
from forebay.engine.models import LoadedModel, adopt_model
from forebay.engine.request import EngineRequest, FinishReason
from forebay.engine.sampler import SamplingParams
from forebay.errors import QueueFullError, RequestError
from forebay.transfer.messages import Direction

pytestmark = pytest.mark.timeout(300)
LANES = (0, 1)
BLOCK_BYTES = 6144


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def llama(tiny_model: Callable[[str], LoadedModel]) -> LoadedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def talking(build_model: Any, byte_tokenizer: Any) -> LoadedModel:
    """A tiny decoder each of whose tokens is a byte of text."""
    return adopt_model(build_model("llama", vocab_size=259), byte_tokenizer, name="talking")


def prompt(length: int, seed: int, vocab: int = 320) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, vocab, length)


def roomy(**overrides: Any) -> Any:
    return tiny_settings(device_tokens=64 * BLOCK_TOKENS, **overrides)


def preempting(rig: Rig, every: int) -> Callable[[], None]:
    """A step after which, every so often, all that runs is preempted."""
    steps = 0

    def step() -> None:
        nonlocal steps
        rig.step()
        steps += 1
        if steps % every == 0:
            for sequence in list(rig.engine._batcher.running):
                rig.engine._batcher.preempt(sequence)

    return step


def ids(request: EngineRequest) -> list[int]:
    return [token.token_id for token in request.drawn]


# -- what a request is owed ------------------------------------------------------------------------


def test_a_sampled_request_goes_on_after_preemption_as_if_undisturbed(llama: LoadedModel) -> None:
    params = [
        greedy(14, temperature=1.2, seed=11),
        greedy(14, temperature=0.9, top_p=0.8, seed=12, frequency_penalty=0.7),
        greedy(14, temperature=1.5, top_k=30, seed=13, repetition_penalty=1.3),
    ]
    with Rig(llama, roomy()) as rig:
        alone = []
        for i, each in enumerate(params):
            alone.append(rig.engine.submit(prompt(30 + i, i), each, no_cache=True, no_save=True))
            rig.finish(alone[-1:])
    with Rig(llama, tiny_settings()) as rig:
        step = preempting(rig, 4)
        other = rig.engine.submit(prompt(60, 9), greedy(20))
        disturbed = [rig.engine.submit(prompt(30 + i, i), each) for i, each in enumerate(params)]
        while rig.engine.busy:
            step()
        rig.settle()
        assert [ids(each) for each in disturbed] == [ids(each) for each in alone]
        assert len(other.drawn) == 20
        assert replay_difference(llama, rig.recorder, BLOCK_TOKENS) is None
    assert len({tuple(ids(each)) for each in alone}) == 3


def test_without_a_seed_two_requests_differ(llama: LoadedModel) -> None:
    with Rig(llama, roomy()) as rig:
        both = [rig.engine.submit(prompt(9, 1), greedy(12, temperature=2.0)) for _ in range(2)]
        rig.finish(both)
        assert ids(both[0]) != ids(both[1])


def test_stop_strings_across_tokens_and_preemption(talking: LoadedModel) -> None:
    with Rig(talking, roomy()) as rig:
        free = rig.engine.submit("say", greedy(24))
        rig.finish([free])
    stop = free.text[9:12]
    assert len(stop.encode()) > 1, "the stop string is more than a token"
    cut = free.text.index(stop)
    with Rig(talking, tiny_settings()) as rig:
        stopped = rig.engine.submit("say", greedy(24, stop=(stop, "never this")))
        step = preempting(rig, 3)
        while stopped.finished is None:
            step()
        assert stopped.text == free.text[:cut]
        assert stopped.finished is FinishReason.STOP
        assert ids(stopped) == ids(free)[: len(stopped.drawn)]
        rig.settle()


def test_stop_tokens_and_the_models_own_end(talking: LoadedModel) -> None:
    with Rig(talking, roomy()) as rig:
        free = rig.engine.submit("say", greedy(10))
        rig.finish([free])
        last = next(i for i, token in enumerate(ids(free)) if ids(free).index(token) == i and i > 2)
        stops = frozenset({ids(free)[last]})
        stopped = rig.engine.submit("say", greedy(10, stop_token_ids=stops))
        rig.finish([stopped])
        assert ids(stopped) == ids(free)[: last + 1]
        assert free.text.startswith(stopped.text)
        assert stopped.finished is FinishReason.STOP
        assert free.finished is FinishReason.LENGTH


def test_deltas_add_up(talking: LoadedModel) -> None:
    with Rig(talking, tiny_settings()) as rig:
        asked = [rig.engine.submit(text, greedy(12)) for text in ("one", "two and more", "three")]
        texts = {request.id: "" for request in asked}
        tokens = {request.id: 0 for request in asked}
        ends: list[int] = []
        while rig.engine.busy:
            for delta in rig.engine.step():
                texts[delta.request_id] += delta.text
                tokens[delta.request_id] += len(delta.tokens)
                ends += [delta.request_id] if delta.finished else []
        assert [texts[request.id] for request in asked] == [request.text for request in asked]
        assert set(tokens.values()) == {12}
        assert sorted(ends) == [request.id for request in asked]


# -- sharing ---------------------------------------------------------------------------------------


def positions_computed(rig: Rig, requests: list[EngineRequest]) -> int:
    """Prompt positions that were computed for `requests`, counted once for each time."""
    wanted = {request.id: len(request.prompt_ids) for request in requests}
    return sum(
        max(0, min(start + len(tokens), wanted[request]) - start)
        for step in rig.recorder.steps
        for request, start, tokens in zip(
            step.request_ids, step.starts, step.token_ids, strict=True
        )
        if request in wanted
    )


@pytest.mark.parametrize("mode", [Mode.RECOMPUTE, Mode.LOOK_AHEAD])
def test_who_shares_a_prefix_waits_for_one_prefill(mode: Mode, llama: LoadedModel) -> None:
    shared = prompt(200, 1)
    batch = BatchSettings(step_tokens=48, max_running=4)
    with Rig(llama, roomy(mode=mode, batch=batch), check_each_step=True) as rig:
        asked = [
            rig.engine.submit(np.concatenate([shared, prompt(5 + i, 50 + i)]), greedy(4))
            for i in range(4)
        ]
        rig.finish(asked)
        apart = rig.cache.settings.min_shared_tokens
        once = [positions_computed(rig, [request]) for request in asked]
        assert once[0] == 205
        assert all(
            each <= apart + len(request.prompt_ids) - 200
            for each, request in zip(once[1:], asked[1:], strict=True)
        )
        assert replay_difference(llama, rig.recorder, BLOCK_TOKENS) is None
        compare_with_recompute(llama, asked)
        rig.settle()


def test_a_waiter_takes_over_when_the_one_who_computes_is_gone(llama: LoadedModel) -> None:
    shared = prompt(160, 2)
    batch = BatchSettings(step_tokens=16, max_running=4)
    with Rig(llama, roomy(batch=batch), check_each_step=True) as rig:
        asked = [
            rig.engine.submit(np.concatenate([shared, prompt(6, 60 + i)]), greedy(3))
            for i in range(3)
        ]
        rig.run(lambda: asked[0].computed_tokens >= 48)
        assert [request.ticket is None for request in asked] == [False, True, True]
        rig.engine.abort(asked[0].id)
        rig.step()
        assert asked[1].ticket is not None, "taken over before the next step"
        assert asked[1].ticket.cached_tokens >= 48
        rig.finish(asked)
        assert positions_computed(rig, asked) <= 160 + 3 * 6 + 16
        rig.settle()


def test_two_tenants_share_nothing_and_one_tenant_does(llama: LoadedModel) -> None:
    with Rig(llama, roomy()) as rig:
        text = prompt(70, 3)
        first = rig.engine.submit(text, greedy(3), salt="a")
        rig.finish([first])
        other, again = (rig.engine.submit(text, greedy(3), salt=salt) for salt in ("b", "a"))
        rig.finish([other, again])
        assert other.sources["device"] + other.sources["host"] == 0
        assert again.sources["device"] == (70 - 1) // BLOCK_TOKENS
        assert ids(first) == ids(other) == ids(again)
        used = {rid: set() for rid in (first.id, other.id, again.id)}
        for step in rig.recorder.steps:
            for rid, serials in zip(step.request_ids, step.serials, strict=True):
                used[rid] |= set(serials.tolist())
        assert not used[other.id] & (used[first.id] | used[again.id])
        assert used[again.id] & used[first.id]


def test_what_is_not_to_be_cached_or_saved(llama: LoadedModel) -> None:
    with Rig(llama, roomy()) as rig:
        text, secret = prompt(70, 4), prompt(70, 5)
        rig.finish([rig.engine.submit(text, greedy(3))])
        apart = rig.engine.submit(text, greedy(3), no_cache=True)
        rig.finish([apart])
        assert apart.sources["recomputed"] == 70 // BLOCK_TOKENS
        rig.settle()
        saved = rig.cache.stats().saved_bytes
        hidden = rig.engine.submit(secret, greedy(20), no_save=True)
        rig.finish([hidden])
        rig.settle()
        assert rig.cache.stats().saved_bytes == saved
        again = rig.engine.submit(secret, greedy(3))
        rig.finish([again])
        assert again.sources["recomputed"] == 70 // BLOCK_TOKENS


# -- loads and those who run meanwhile -------------------------------------------------------------


class Returning:
    """An engine with some prompts in host memory alone, whose link a test can stop.

    `patient`: loads look worth any wait, so that nobody recomputes before the test is done.
    """

    def __init__(self, loaded: LoadedModel, *, patient: bool = True, **overrides: Any) -> None:
        self.loaded = loaded
        values = {"window_bytes": BLOCK_BYTES, **overrides}
        self.rig = Rig(loaded, tiny_settings(**values), seed=6)
        self.engine = self.rig.engine
        self.core = self.engine.mover.core
        self.prompts = [prompt(72, 20 + i) for i in range(6)]
        self.rig.finish([self.engine.submit(each, greedy(2)) for each in self.prompts])
        self.rig.settle()
        if patient:
            for average, value in (
                (self.rig.cache.rates.prefill_tokens_per_s, 0.1),
                (self.rig.cache.rates.link_bytes_per_s, 100.0),
            ):
                average.value, average.weight = value, 0.0

    def host_only(self) -> list[np.ndarray]:
        store, found = self.rig.cache._store, []
        for each in self.prompts:
            keys = each[:64].astype(np.int32).tobytes()
            blocks = store.match(self.engine._namespace(""), keys).ids
            if len(blocks) == 8 and not store.resident(blocks).any():
                found.append(each)
        assert found, "every prompt has something on the device"
        return found

    def ask(self, which: int = 0, count: int = 4) -> EngineRequest:
        tokens = np.concatenate([self.host_only()[which], [9, 9]])
        return self.engine.submit(tokens, greedy(count))

    def hold(self, direction: Direction = Direction.LOAD) -> None:
        for lane in LANES:
            self.core.hold_lane(direction, lane)

    def release(self, direction: Direction = Direction.LOAD) -> None:
        for lane in LANES:
            self.core.release_lane(direction, lane)

    def judge(self, requests: list[EngineRequest]) -> None:
        assert replay_difference(self.loaded, self.rig.recorder, BLOCK_TOKENS) is None
        compare_with_recompute(self.loaded, requests)

    def steps_of(self, request: EngineRequest) -> int:
        return sum(request.id in step.request_ids for step in self.rig.recorder.steps)


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
def test_a_link_that_hangs_costs_its_bound_and_no_token(mode: Mode, llama: LoadedModel) -> None:
    case = Returning(
        llama, mode=mode, patient=False, wait_timeout_s=0.5, device_tokens=30 * BLOCK_TOKENS
    )
    with case.rig:
        runs = case.engine.submit(prompt(10, 40), greedy(12))
        case.rig.run(lambda: len(runs.drawn) == 2)
        case.hold()
        loads = case.ask()
        began_s = time.monotonic()
        case.rig.finish([runs, loads])
        again = case.engine.submit(prompt(20, 41), greedy(3))
        case.rig.finish([again])
        assert time.monotonic() - began_s < 20.0
        case.judge([runs, loads, again])
        case.rig.settle()
        began_s = time.monotonic()
        case.engine.close()
        assert time.monotonic() - began_s < 11.0


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
    case = Returning(llama, mode=mode, patient=False, window_bytes=BLOCK_BYTES // 2)
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


def test_failed_saves_leave_the_blocks_where_they_are(llama: LoadedModel) -> None:
    with Rig(llama, roomy(window_bytes=BLOCK_BYTES)) as rig:
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
        tier.quarantined += 1  # as after a copy that never ended
        small = case.engine.submit(prompt(20, 46), greedy(3))
        case.engine._batcher.preempt(big)
        case.rig.finish([big, small])
        tier.quarantined -= 1
        assert big.finished is FinishReason.FAILED
        assert "restart" in big.error
        assert small.finished is FinishReason.LENGTH
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


# -- a full pool -----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.95])
def test_all_slots_leased_and_everybody_ends(share: float, llama: LoadedModel) -> None:
    """Running requests hold every slot, others wait with or without leases; then all outgrow it."""
    settings = tiny_settings(
        prefetch_share=share, batch=BatchSettings(step_tokens=64, max_running=6)
    )
    with Rig(llama, settings, check_each_step=True) as rig:
        first = [rig.engine.submit(prompt(36, 90 + i), greedy(40)) for i in range(4)]
        rig.run(lambda: rig.cache._store.device.obtainable(protected=True) == 0)
        late = [rig.engine.submit(prompt(36, 90 + i), greedy(9)) for i in range(4)]
        rig.finish(first + late)
        assert rig.engine.preemptions > 0
        assert {request.finished for request in first + late} == {FinishReason.LENGTH}
        assert replay_difference(llama, rig.recorder, BLOCK_TOKENS) is None
        compare_with_recompute(llama, first + late)
        rig.settle()


def test_a_request_as_large_as_the_pool(llama: LoadedModel) -> None:
    with Rig(llama, tiny_settings(), check_each_step=True) as rig:
        small = rig.engine.submit(prompt(30, 1), greedy(9))
        whole = rig.engine.submit(prompt(150, 2), greedy(10))
        rig.finish([small, whole])
        compare_with_recompute(llama, [small, whole])
        rig.settle()


def test_priority_goes_first(llama: LoadedModel) -> None:
    with Rig(llama, tiny_settings(batch=BatchSettings(max_running=1))) as rig:
        asked = [
            rig.engine.submit(prompt(20, i), greedy(3), priority=priority)
            for i, priority in enumerate((1, 1, 0))
        ]
        rig.finish(asked)
        order = sorted(asked, key=lambda request: request.timing.finished_s or 0.0)
        assert [request.id for request in order] == [3, 1, 2]


def test_the_queue_has_a_bound_and_generate_minds_it(llama: LoadedModel) -> None:
    batch = BatchSettings(max_running=1, max_waiting=2)
    with Rig(llama, tiny_settings(batch=batch)) as rig:
        asked = [rig.engine.submit(prompt(9, i), greedy(2)) for i in range(2)]
        with pytest.raises(QueueFullError, match="max_waiting"):
            rig.engine.submit(prompt(9, 5), greedy(2))
        rig.finish(asked)
        answers = rig.engine.generate([prompt(9, i) for i in range(7)], greedy(2))
        assert [len(answer.drawn) for answer in answers] == [2] * 7
        rig.settle()


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


# -- errors inside a step --------------------------------------------------------------------------


def test_a_step_that_fails_ends_its_requests_and_no_others(llama: LoadedModel) -> None:
    with Rig(llama, tiny_settings(batch=BatchSettings(step_tokens=24, max_running=2))) as rig:
        asked = [rig.engine.submit(prompt(30, i), greedy(6)) for i in range(4)]
        rig.run(lambda: len(asked[0].drawn) > 0)
        forward = rig.engine.runner.forward

        def broken(_: object) -> torch.Tensor:
            raise RuntimeError("the device fell off the bus")

        rig.engine.runner.forward = broken
        with pytest.raises(RuntimeError, match="fell off"):
            rig.step()
        rig.engine.runner.forward = forward
        failed = [request for request in asked if request.finished is FinishReason.FAILED]
        assert 0 < len(failed) < 4
        assert all("fell off" in request.error for request in failed)
        rest = [request for request in asked if request not in failed]
        rig.finish(rest)
        compare_with_recompute(llama, rest)
        rig.settle()


def test_broken_logits_fail_their_request_alone(llama: LoadedModel) -> None:
    with Rig(llama, tiny_settings()) as rig:
        asked = [rig.engine.submit(prompt(20, i), greedy(6)) for i in range(3)]
        rig.run(lambda: all(request.drawn for request in asked))
        forward = rig.engine.runner.forward

        def half_broken(chunks: Any) -> torch.Tensor:
            logits = forward(chunks).clone()
            logits[1] = float("nan")
            return logits

        rig.engine.runner.forward = half_broken
        deltas = rig.engine.step()
        rig.engine.runner.forward = forward
        assert [delta.finished for delta in deltas] == [None, FinishReason.FAILED, None]
        assert "maximum" in asked[1].error
        rig.finish(asked)
        assert [len(request.drawn) for request in asked if not request.error] == [6, 6]
        rig.settle()


def test_generate_leaves_nothing_behind_when_one_prompt_is_refused(llama: LoadedModel) -> None:
    with Rig(llama, tiny_settings()) as rig:
        with pytest.raises(RequestError):
            rig.engine.generate([prompt(9, 1), np.array([5, 100_000])], greedy(2))
        assert not rig.engine.busy
        rig.settle()


def test_closing_is_final_and_may_be_repeated(llama: LoadedModel) -> None:
    engine = Engine(llama, tiny_settings())
    request = engine.submit(prompt(30, 1), SamplingParams(max_tokens=5))
    engine.step()
    engine.close()
    engine.close()
    assert request.finished is FinishReason.ABORTED
