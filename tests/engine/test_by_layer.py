"""Requests that start before their loads are there: the same tokens, whatever is late or fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from oracle import (
    BLOCK_TOKENS,
    TINY_BLOCK_BYTES,
    Conversations,
    Returning,
    Rig,
    compare_with_recompute,
    replay_difference,
    tiny_settings,
)

from forebay.config import KVLayout
from forebay.core.modes import Mode
from forebay.engine.models import LoadedModel

LAYERS = 3
LAYER_BYTES = TINY_BLOCK_BYTES // LAYERS
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("one_thread")]


def settle_rates(rig: Rig, *, link: float, prefill: float) -> None:
    """From now on the rates are these, so that what starts by layer does not depend on the
    machine's speed."""
    rates = rig.cache.rates
    for average, value in ((rates.link_bytes_per_s, link), (rates.prefill_tokens_per_s, prefill)):
        average.value, average.weight = value, 0.0


def late_loads(loaded: LoadedModel, **overrides: Any) -> Returning:
    """Loads look as if they took a while, and computing as if it took longer."""
    case = Returning(loaded, patient=False, **{"band_bytes": LAYER_BYTES, **overrides})
    settle_rates(case.rig, link=1e5, prefill=1.0)
    return case


@pytest.mark.parametrize("mode", [Mode.ASYNCHRONOUS, Mode.LOOK_AHEAD])
@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_request_starts_while_its_loads_flow(
    family: str, layout: KVLayout, mode: Mode, tiny_model: Callable[[str], LoadedModel]
) -> None:
    loaded = tiny_model(family)
    with Rig(
        loaded, tiny_settings(mode=mode, kv_layout=layout, band_bytes=1024, check_blocks=True)
    ) as rig:
        settle_rates(rig, link=1e5, prefill=1.0)
        batch = Conversations(rig, users=5, turns=3, answer_tokens=3, question_tokens=5)
        judge_alone(loaded, rig, batch)


def judge_alone(loaded: LoadedModel, rig: Rig, talk: Conversations) -> None:
    """One request at a time, so that each has nothing beside it."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 320, 60) for _ in range(talk.users)]
    for _ in range(talk.turns):
        for i, prompt in enumerate(prompts):
            request = talk._ask(prompt)
            rig.finish([request])
            prompts[i] = np.concatenate([request.tokens, rng.integers(3, 320, 5)])
    assert replay_difference(loaded, rig.recorder, BLOCK_TOKENS) is None
    compare_with_recompute(loaded, talk.requests)
    stats = rig.cache.stats()
    assert stats.layered_starts >= talk.users
    assert stats.quarantined_blocks == 0
    rig.settle()
