"""The engine: preemption, sharing, a full pool, steps that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracle import (
    BLOCK_TOKENS,
    Rig,
    compare_with_recompute,
    greedy,
    ids,
    prompt,
    replay_difference,
    roomy,
    tiny_settings,
)

from forebay.config import BatchSettings
from forebay.core.modes import Mode
from forebay.engine.engine import Engine
from forebay.engine.models import LoadedModel
from forebay.engine.request import EngineRequest, FinishReason
from forebay.engine.sampler import SamplingParams
from forebay.errors import DeviceError, ProtocolError, QueueFullError, RequestError

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("one_thread")]


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


# -- what a request is owed ------------------------------------------------------------------------


def test_a_sampled_request_goes_on_after_preemption_as_if_undisturbed(llama: LoadedModel) -> None:
    params = [
        greedy(14, temperature=1.2, seed=11),
        greedy(14, temperature=0.9, top_p=0.8, seed=12, frequency_penalty=0.7),
        greedy(14, temperature=1.5, top_k=30, seed=13, repetition_penalty=1.3),
        greedy(
            14, temperature=1.5, seed=14, logit_bias=dict.fromkeys(range(40), 4.0), min_tokens=9
        ),
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
    assert len({tuple(ids(each)) for each in alone}) == 4


def test_min_tokens_outlives_preemption(talking: LoadedModel) -> None:
    ends = dict.fromkeys(talking.eos_token_ids, 100.0) or {5: 100.0}
    params = greedy(20, min_tokens=11, logit_bias=ends, stop_token_ids=frozenset(ends))
    with Rig(talking, tiny_settings()) as rig:
        request = rig.engine.submit("say", params)
        step = preempting(rig, 3)
        while request.finished is None:
            step()
        assert len(request.drawn) == 12
        assert not set(ids(request)[:11]) & set(ends)
        assert request.finished is FinishReason.STOP
        rig.settle()


@pytest.mark.parametrize("when", ["in its prefill", "while it decodes"])
def test_what_was_cached_is_told_as_it_was_at_the_start(when: str, llama: LoadedModel) -> None:
    """Preempted and admitted anew, a request finds its own blocks: those were computed."""
    with Rig(llama, roomy()) as rig:
        first = rig.engine.submit(prompt(40, 5), greedy(2))
        rig.finish([first])
        tokens = np.concatenate([prompt(40, 5), prompt(150, 6)])
        request = rig.engine.submit(tokens, greedy(12))
        step = preempting(rig, 2)
        decoded = False
        while request.finished is None:
            decoded |= bool(request.drawn)
            (rig.step if decoded == (when == "in its prefill") else step)()
        found = 40 // BLOCK_TOKENS
        assert request.sources["device"] == found
        assert request.sources["host"] == 0
        assert request.sources["recomputed"] == 190 // BLOCK_TOKENS - found
        rig.settle()


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


@pytest.mark.parametrize("mode", [Mode.RECOMPUTE, Mode.SYNCHRONOUS, Mode.LOOK_AHEAD])
def test_a_shared_prefix_takes_its_slots_once(mode: Mode, llama: LoadedModel) -> None:
    """Two run at once in a pool that has room for them only because they share."""
    shared = prompt(56, 1)
    settings = tiny_settings(mode=mode, device_tokens=14 * BLOCK_TOKENS)
    with Rig(llama, settings, check_each_step=True) as rig:
        rig.finish([rig.engine.submit(shared, greedy(2))])
        both = [
            rig.engine.submit(np.concatenate([shared, prompt(8, 50 + i)]), greedy(9))
            for i in range(2)
        ]
        rig.finish(both)
        assert [request.sources["device"] for request in both] == [7, 7]
        assert any(len(step.request_ids) == 2 for step in rig.recorder.steps)
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


def test_a_session_is_a_hint_and_no_key(llama: LoadedModel) -> None:
    """One of another tenant, of another text, of a text that goes another way: found as without."""
    with Rig(llama, roomy()) as rig:
        text = prompt(70, 3)
        first = rig.engine.submit(text, greedy(3), salt="a")
        rig.finish([first])
        assert first.session is not None or first.sources["device"] == 0
        again = rig.engine.submit(text, greedy(3), salt="a")
        rig.finish([again])
        session = again.session
        assert session is not None
        bent = text.copy()
        bent[20] ^= 1
        asked = {
            (70 - 1) // BLOCK_TOKENS: rig.engine.submit(
                np.concatenate([text, [5]]), greedy(3), salt="a", follows=session
            ),
            2: rig.engine.submit(bent, greedy(3), salt="a", follows=session),
            0: rig.engine.submit(text, greedy(3), salt="b", follows=session),
        }
        other = rig.engine.submit(prompt(40, 8), greedy(3), salt="a", follows=session)
        rig.finish([*asked.values(), other])
        for blocks, request in asked.items():
            assert request.sources["device"] == blocks
        compare_with_recompute(llama, [*asked.values(), other])
        rig.settle()


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


# -- errors inside a step --------------------------------------------------------------------------


def test_a_step_that_fails_ends_its_requests_and_no_others(llama: LoadedModel) -> None:
    with Rig(llama, tiny_settings(batch=BatchSettings(step_tokens=24, max_running=2))) as rig:
        asked = [rig.engine.submit(prompt(30, i), greedy(6)) for i in range(4)]
        rig.run(lambda: len(asked[0].drawn) > 0)
        forward = rig.engine.runner.forward

        def broken(*_: object) -> torch.Tensor:
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


@pytest.mark.parametrize("device_broke", [False, True])
def test_a_step_that_breaks_off_counts_as_launched(
    device_broke: bool, llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first layers are under way on a GPU, and write; one that broke has no event for them."""
    with Rig(llama, tiny_settings()) as rig:
        mover, launched = rig.engine.mover, rig.engine.mover.step_launched
        told: list[int] = []

        def tell(step: int, stream: int = 0) -> None:
            told.append(step)
            if device_broke:
                raise DeviceError("recording an event: the device is lost")
            launched(step, stream)

        def broken(*_: object) -> torch.Tensor:
            raise RuntimeError("the third layer was too much")

        request = rig.engine.submit(prompt(30, 1), greedy(6))
        with monkeypatch.context() as patched:
            patched.setattr(mover, "step_launched", tell)
            patched.setattr(rig.engine.runner, "forward", broken)
            with pytest.raises(RuntimeError, match="third layer"):
                rig.run()
        assert len(told) == 1
        assert request.finished is FinishReason.FAILED
        assert "third layer" in request.error
        rig.settle()


def test_broken_logits_fail_their_request_alone(llama: LoadedModel) -> None:
    with Rig(llama, tiny_settings()) as rig:
        asked = [rig.engine.submit(prompt(20, i), greedy(6)) for i in range(3)]
        rig.run(lambda: all(request.drawn for request in asked))
        forward = rig.engine.runner.forward

        def half_broken(chunks: Any, _: object) -> torch.Tensor:
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


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda engine: engine.generate([1, 2, 3]), r"\[\[1, 2, 3\]\]"),
        (lambda engine: engine.generate(5), "in a list"),
        (lambda engine: engine.generate(["a"], {"max_tokens": 3}), "SamplingParams"),
        (lambda engine: engine.submit("a", {}), "SamplingParams"),
        (lambda engine: next(engine.chat("Hi")), "role and content"),
        (lambda engine: next(engine.chat(None)), "role and content"),
        (lambda engine: next(engine.chat([{"role": "user"}])), "role and content"),
        (lambda engine: engine.submit("a", greedy(2, logit_bias={10**6: 1.0})), "logit_bias"),
        (
            lambda engine: engine.submit(
                "a", greedy(2, min_tokens=1, stop_token_ids=frozenset(range(-1, 999)))
            ),
            "cannot be reached",
        ),
    ],
)
def test_what_is_given_in_another_form_is_refused(
    call: Callable[[Engine], object], why: str, talking: LoadedModel
) -> None:
    with Rig(talking, tiny_settings()) as rig:
        with pytest.raises(RequestError, match=why):
            call(rig.engine)
        assert not rig.engine.busy
        rig.settle()


def test_closing_is_final_and_may_be_repeated(llama: LoadedModel) -> None:
    engine = Engine(llama, tiny_settings())
    request = engine.submit(prompt(30, 1), SamplingParams(max_tokens=5))
    engine.step()
    engine.close()
    engine.close()
    assert request.finished is FinishReason.ABORTED
    with pytest.raises(ProtocolError, match="closed"):
        engine.submit(prompt(30, 1))
    assert not engine.busy
