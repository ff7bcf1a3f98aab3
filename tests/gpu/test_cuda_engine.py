"""The engine on a CUDA device, over pools that always evict, before the same three judges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import BLOCK_TOKENS, HOST_MODES, Conversations, Rig, judge, tiny_settings
from tiny_models import build

from forebay.config import BatchSettings, SaveMode
from forebay.core.modes import Mode
from forebay.engine.engine import Engine
from forebay.engine.models import LoadedModel, adopt_model
from forebay.engine.runner import Chunk
from forebay.errors import SettingsError


def on_gpu(family: str) -> LoadedModel:
    return adopt_model(build(family).cuda(), name=f"tiny {family}")


@pytest.mark.parametrize("save", SaveMode)
@pytest.mark.parametrize("mode", [Mode.RECOMPUTE, *HOST_MODES])
def test_tokens_are_those_of_the_same_schedule_without_a_cache(mode: Mode, save: SaveMode) -> None:
    loaded = on_gpu("llama")
    settings = tiny_settings(mode=mode, save_mode=save, device_tokens=17 * BLOCK_TOKENS)
    with Rig(loaded, settings, seed=1, check_each_step=True) as rig:
        talk = Conversations(rig, answer_tokens=13, abort_every=31, preempt_every=14, seed=1)
        judge(loaded, rig, talk)
        assert talk.preempted > 0


@pytest.mark.parametrize("family", ["qwen3", "gpt_neox", "mixtral", "deepseek_v3"])
def test_other_families(family: str) -> None:
    loaded = on_gpu(family)
    with Rig(loaded, tiny_settings(device_tokens=17 * BLOCK_TOKENS), seed=3) as rig:
        judge(loaded, rig, Conversations(rig, turns=2, users=7, preempt_every=14, seed=3))


def test_what_look_ahead_brought_is_used_and_right() -> None:
    loaded = on_gpu("llama")
    batch = BatchSettings(step_tokens=24, max_running=1)
    with Rig(loaded, tiny_settings(device_tokens=24 * BLOCK_TOKENS, batch=batch), seed=2) as rig:
        talk = Conversations(rig, turns=2, system_tokens=24, question_tokens=33, answer_tokens=7)
        judge(loaded, rig, talk)
        assert rig.cache.stats().prefetch_bytes["used"] > 0


def test_logits_come_to_pinned_memory_as_they_are() -> None:
    loaded = on_gpu("llama")
    with Engine(loaded, tiny_settings()) as engine:
        runner = engine.runner
        for rows in (3, 2, 5):
            tables = np.arange(rows, dtype=np.int32)[:, None]
            chunks = [Chunk(np.array([7 + row]), 0, table) for row, table in enumerate(tables)]
            logits = runner.forward(chunks)
            host = runner.on_host(logits)
            assert host.is_pinned()
            assert torch.equal(host, logits.cpu())


def test_a_pool_larger_than_the_gpu_is_refused_with_what_fits() -> None:
    loaded = on_gpu("llama")
    with pytest.raises(
        SettingsError, match=r"the GPU has .* left .* tokens would leave it a tenth"
    ):
        Engine(loaded, tiny_settings(device_tokens=1 << 40))


def test_an_engine_gives_all_memory_back() -> None:
    loaded = on_gpu("llama")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(5):
        with Rig(loaded, tiny_settings(), seed=5) as rig:
            Conversations(rig, turns=1, users=2).play()
        del rig
    torch.cuda.empty_cache()
    assert before - torch.cuda.mem_get_info()[0] < 64 << 20
