"""Starts by layer on a CUDA device: the layers are launched ahead of the copies, and wait there."""

from __future__ import annotations

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
from tiny_models import build

from forebay.config import KVLayout
from forebay.core.modes import Mode
from forebay.engine.models import LoadedModel, adopt_model


def wide() -> LoadedModel:
    """A block of 8 tokens has 3 MiB, so that a load takes longer than to say that it is there."""
    sizes = {"num_hidden_layers": 12, "head_dim": 1024, "num_key_value_heads": 4}
    return adopt_model(build("llama", **sizes).cuda(), name="wide")


def play(rig: Rig, seed: int) -> list:
    """One request at a time, each with nothing beside it."""
    rng = np.random.default_rng(seed)
    for average, value in (
        (rig.cache.rates.link_bytes_per_s, 1e8),
        (rig.cache.rates.prefill_tokens_per_s, 1.0),
    ):
        average.value, average.weight = value, 0.0
    prompts = [rng.integers(3, 320, 70) for _ in range(5)]
    requests = []
    for turn in range(15):
        prompt = prompts[turn % 5]
        request = rig.engine.submit(prompt, greedy(3))
        rig.finish([request])
        requests.append(request)
        prompts[turn % 5] = np.concatenate([request.tokens, rng.integers(3, 320, 5)])
    return requests


@pytest.mark.parametrize("mode", [Mode.ASYNCHRONOUS, Mode.LOOK_AHEAD])
@pytest.mark.parametrize("layout", KVLayout)
def test_tokens_are_right_while_loads_flow(layout: KVLayout, mode: Mode) -> None:
    loaded = wide()
    settings = tiny_settings(
        mode=mode, kv_layout=layout, host_bytes=1 << 29, device_tokens=20 * BLOCK_TOKENS
    )
    with Rig(loaded, settings, seed=8, check_each_step=True) as rig:
        requests = play(rig, seed=8)
        assert rig.cache.stats().layered_starts >= 5
        assert rig.cache.stats().quarantined_blocks == 0
        assert replay_difference(loaded, rig.recorder, BLOCK_TOKENS) is None
        compare_with_recompute(loaded, requests)
        rig.settle()


@pytest.mark.parametrize("layout", KVLayout)
def test_a_layer_that_does_not_wait_is_seen(layout: KVLayout) -> None:
    """The mutant: no band is waited for, on a stream that is ahead of the copies."""
    loaded = wide()
    settings = tiny_settings(
        mode=Mode.ASYNCHRONOUS,
        kv_layout=layout,
        host_bytes=1 << 29,
        device_tokens=20 * BLOCK_TOKENS,
        check_blocks=False,
    )
    with Rig(loaded, settings, seed=8) as rig:
        rig.engine.cache.layer = lambda ticket, layer, *_: _pretend(ticket, layer)
        torch.cuda.synchronize()
        try:
            play(rig, seed=8)
        except Exception as error:  # NaN may end a request before the end
            print(error)
        assert rig.cache.stats().layered_starts > 0
        assert replay_difference(loaded, rig.recorder, BLOCK_TOKENS) is not None
        rig.settle()


def _pretend(ticket, layer: int) -> None:
    ticket.bands_waited = ticket.band_of_layer[layer] + 1
