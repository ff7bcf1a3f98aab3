"""Tokens do not depend on where their KV has been: three oracles over pools that always evict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from oracle import (
    BLOCK_TOKENS,
    HOST_MODES,
    Conversations,
    Rig,
    compare_with_recompute,
    greedy,
    judge,
    plain_logits,
    replay_difference,
    tiny_settings,
)

from forebay.config import BatchSettings, KVLayout, SaveMode
from forebay.core.modes import Mode
from forebay.engine.models import LoadedModel
from forebay.engine.settings import EngineSettings
from forebay.errors import CorruptBlockError
from forebay.transfer.messages import Completion, Direction, Report, Transfer

WRITE_THROUGH, ON_EVICT = SaveMode.WRITE_THROUGH, SaveMode.ON_EVICT
# Far above what they need: a busy machine is slow.
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("one_thread")]


def crowded(mode: Mode, save: SaveMode) -> EngineSettings:
    """Three run at once and fill the pool: hardly anything stays for long."""
    return tiny_settings(mode=mode, save_mode=save, device_tokens=17 * BLOCK_TOKENS)


def roomy(save: SaveMode) -> EngineSettings:
    """One runs, and there is room to bring the next one's blocks: look-ahead has work."""
    batch = BatchSettings(step_tokens=24, max_running=1)
    return tiny_settings(save_mode=save, device_tokens=24 * BLOCK_TOKENS, batch=batch)


def mixed_steps(rig: Rig) -> int:
    """Steps in which one request's prompt and another's decode went side by side."""
    lengths = [[len(tokens) for tokens in step.token_ids] for step in rig.recorder.steps]
    return sum(min(each) == 1 < max(each) for each in lengths)


@pytest.mark.parametrize(
    ("mode", "save"),
    [(Mode.RECOMPUTE, WRITE_THROUGH)] + [(m, s) for m in HOST_MODES for s in SaveMode],
)
def test_tokens_are_those_of_the_same_schedule_without_a_cache(
    mode: Mode, save: SaveMode, tiny_model: Callable[[str], LoadedModel]
) -> None:
    loaded = tiny_model("llama")
    with Rig(loaded, crowded(mode, save), seed=1, check_each_step=True) as rig:
        talk = Conversations(rig, answer_tokens=13, abort_every=31, preempt_every=14, seed=1)
        judge(loaded, rig, talk)
        assert talk.aborted > 0
        assert talk.preempted > 0
        assert mixed_steps(rig) > 0


@pytest.mark.parametrize("save", SaveMode)
def test_what_look_ahead_brought_is_used_and_right(
    save: SaveMode, tiny_model: Callable[[str], LoadedModel]
) -> None:
    loaded = tiny_model("llama")
    with Rig(loaded, roomy(save), seed=2) as rig:
        talk = Conversations(
            rig, turns=2, system_tokens=24, question_tokens=33, answer_tokens=7, seed=2
        )
        judge(loaded, rig, talk)
        assert rig.cache.stats().prefetch_bytes["used"] > 0


@pytest.mark.parametrize(
    ("family", "mode", "save"),
    [
        ("qwen3", Mode.LOOK_AHEAD, WRITE_THROUGH),
        ("qwen3", Mode.SYNCHRONOUS, ON_EVICT),
        ("gpt_neox", Mode.LOOK_AHEAD, ON_EVICT),
        ("gpt_neox", Mode.ASYNCHRONOUS, WRITE_THROUGH),
        ("mixtral", Mode.LOOK_AHEAD, WRITE_THROUGH),
        ("qwen3_moe", Mode.ASYNCHRONOUS, ON_EVICT),
        ("deepseek_v3", Mode.LOOK_AHEAD, WRITE_THROUGH),
    ],
)
def test_other_families(
    family: str, mode: Mode, save: SaveMode, tiny_model: Callable[[str], LoadedModel]
) -> None:
    loaded = tiny_model(family)
    with Rig(loaded, crowded(mode, save), seed=3) as rig:
        judge(loaded, rig, Conversations(rig, turns=2, users=7, preempt_every=14, seed=3))


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_pool_that_is_layer_first(family: str, tiny_model: Callable[[str], LoadedModel]) -> None:
    """A block is moved in two pieces a layer, of other sizes where K and V differ."""
    loaded = tiny_model(family)
    settings = replace(roomy(WRITE_THROUGH), kv_layout=KVLayout.LAYER_FIRST)
    with Rig(loaded, settings, seed=4, check_each_step=True) as rig:
        talk = Conversations(
            rig, turns=2, system_tokens=24, question_tokens=33, answer_tokens=7, seed=4
        )
        judge(loaded, rig, talk)
        assert rig.cache.stats().prefetch_bytes["used"] > 0


def test_a_real_model(smollm2: LoadedModel) -> None:
    batch = BatchSettings(step_tokens=48, max_running=3)
    settings = tiny_settings(device_tokens=12 * BLOCK_TOKENS, host_bytes=64 << 20, batch=batch)
    with Rig(smollm2, settings, seed=4) as rig:
        talk = Conversations(
            rig,
            users=4,
            turns=2,
            system_tokens=24,
            question_tokens=10,
            answer_tokens=4,
            vocab=40_000,
            preempt_every=9,
            seed=4,
        )
        answered = talk.play()
        rig.settle()
        assert len(answered) == 8
        assert replay_difference(smollm2, rig.recorder, BLOCK_TOKENS) is None
        compare_with_recompute(smollm2, answered)
        stats = rig.cache.stats()
        assert stats.loaded_bytes > 0
        assert stats.evicted_blocks > 0
        assert rig.engine._verifier.compared > 0


# -- the oracles see what they are for -------------------------------------------------------------


class Fault:
    """Conversations whose third turn comes back from host memory, with something done to it."""

    def __init__(self, loaded: LoadedModel, *, check_blocks: bool) -> None:
        self.loaded = loaded
        settings = tiny_settings(mode=Mode.ASYNCHRONOUS, check_blocks=check_blocks)
        self.rig = Rig(loaded, settings, seed=5)
        rng = np.random.default_rng(5)
        self.prompts = [rng.integers(3, 320, 70) for _ in range(4)]
        self.rig.finish(self._ask(self.prompts))
        self.rig.settle()

    def host_only(self) -> int:
        """A prompt that is in host memory alone."""
        store, engine = self.rig.cache._store, self.rig.engine
        for which, prompt in enumerate(self.prompts):
            keys = prompt[:64].astype(np.int32).tobytes()
            found = store.match(engine._namespace(""), keys).ids
            if len(found) == 8 and not store.resident(found).any():
                return which
        raise AssertionError("every prompt has something on the device")

    def ask_again(self) -> None:
        which = self.host_only()
        again = np.concatenate([self.prompts[which], [7, 8]])
        loaded_before = self.rig.cache.stats().loaded_bytes
        self.rig.finish(self._ask([again]))
        assert self.rig.cache.stats().loaded_bytes > loaded_before

    def _ask(self, prompts: Sequence[np.ndarray]) -> list:
        return [self.rig.engine.submit(prompt, greedy(3)) for prompt in prompts]


def flip_a_bit(fault: Fault) -> None:
    """In one block of the host arena, in each that could be read."""
    words = fault.rig.host.numpy().view(np.uint32)
    words[:, words.shape[1] // 2] ^= np.uint32(1 << 22)


def skip_a_block(fault: Fault) -> None:
    """The mover leaves out the second block of every load, and reports it as done."""
    mover = fault.rig.engine.mover
    submit, poll = mover.submit, mover.poll
    skipped: set[int] = set()

    def without_one(transfer: Transfer) -> Transfer:
        if transfer.direction is not Direction.LOAD:
            return transfer
        skipped.add(transfer.id)
        names = ("sources", "destinations", "after_steps")
        return replace(transfer, **{n: np.delete(getattr(transfer, n), 1) for n in names})

    def with_one(each: Completion) -> Completion:
        done, touched = each.blocks_done + 1, each.blocks_touched + 1
        return replace(each, blocks_done=done, blocks_touched=touched)

    def poll_hiding_it() -> Report:
        report = poll()
        ends = [with_one(c) if c.id in skipped else c for c in report.completions]
        return replace(report, completions=tuple(ends))

    mover.submit = lambda transfers: submit([without_one(each) for each in transfers])
    mover.poll = poll_hiding_it


def swap_two_blocks(fault: Fault) -> None:
    """Every load puts its first two blocks into each other's slots."""
    submit = fault.rig.engine.mover.submit

    def swapping(transfers: Sequence[Transfer]) -> None:
        for each in transfers:
            if each.direction is Direction.LOAD:
                each.destinations[:2] = each.destinations[1::-1].copy()
        submit(transfers)

    fault.rig.engine.mover.submit = swapping


@pytest.mark.parametrize("harm", [flip_a_bit, skip_a_block, swap_two_blocks])
def test_a_planted_fault_is_seen(
    harm: Callable[[Fault], None], tiny_model: Callable[[str], LoadedModel]
) -> None:
    checked = Fault(tiny_model("llama"), check_blocks=True)
    harm(checked)
    with pytest.raises(CorruptBlockError, match="differs from what its step wrote"):
        checked.ask_again()
    checked.rig.close()
    judged = Fault(tiny_model("llama"), check_blocks=False)
    harm(judged)
    judged.ask_again()
    difference = replay_difference(judged.loaded, judged.rig.recorder, BLOCK_TOKENS)
    assert difference is not None
    assert "requests [5]" in difference
    judged.rig.close()


def test_the_same_without_a_fault(tiny_model: Callable[[str], LoadedModel]) -> None:
    fault = Fault(tiny_model("llama"), check_blocks=True)
    fault.ask_again()
    assert replay_difference(fault.loaded, fault.rig.recorder, BLOCK_TOKENS) is None
    fault.rig.close()


def test_recompute_sees_another_token(tiny_model: Callable[[str], LoadedModel]) -> None:
    loaded = tiny_model("llama")
    with Rig(loaded) as rig:
        request = rig.engine.submit(np.arange(10, 30), greedy(4))
        rig.finish([request])
        compare_with_recompute(loaded, [request])
        own = plain_logits(loaded, request.tokens)[len(request.prompt_ids) - 1]
        request.drawn[0] = type(request.drawn[0])(int(own.argmin()), 1.0)
        with pytest.raises(AssertionError, match="instead of"):
            compare_with_recompute(loaded, [request])
