"""Starts by layer on a CUDA device: the layers are launched ahead of the copies, and wait there."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from oracle import (
    BLOCK_TOKENS,
    TINY_BLOCK_BYTES,
    Returning,
    Rig,
    compare_with_recompute,
    greedy,
    replay_difference,
    tiny_settings,
)
from tiny_models import build

from forebay.config import KVLayout
from forebay.core.modes import Mode
from forebay.core.requests import Ticket
from forebay.engine.attention import LayerGate
from forebay.engine.models import LoadedModel, adopt_model
from forebay.engine.runner import Chunk


def wide() -> LoadedModel:
    """A block of 8 tokens has 3 MiB, so that a load takes longer than to say that it is there."""
    sizes = {"num_hidden_layers": 12, "head_dim": 1024, "num_key_value_heads": 4}
    return adopt_model(build("llama", **sizes).cuda(), name="wide")


def slow_to_look_at(rig: Rig, *, link: float) -> None:
    """Loads look as if they took a while, and computing as if it took longer."""
    for average, value in (
        (rig.cache.rates.link_bytes_per_s, link),
        (rig.cache.rates.prefill_tokens_per_s, 1.0),
    ):
        average.value, average.weight = value, 0.0


def play(rig: Rig, seed: int) -> list:
    """One request at a time, each with nothing beside it."""
    rng = np.random.default_rng(seed)
    slow_to_look_at(rig, link=1e8)
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
@pytest.mark.parametrize("waits", [True, False], ids=["as it is", "mutant"])
def test_a_step_that_is_ahead_of_its_copies_is_seen_unless_its_layers_wait(
    waits: bool, layout: KVLayout
) -> None:
    """The lanes are held until the step has begun; the mutant's has run by then."""
    case = Returning(
        adopt_model(build("llama").cuda(), name="tiny llama"),
        patient=False,
        mode=Mode.ASYNCHRONOUS,
        kv_layout=layout,
        band_bytes=TINY_BLOCK_BYTES // 3,
        check_blocks=False,
    )
    forward = case.engine.runner.forward

    def ran(chunks: Sequence[Chunk], gate: LayerGate | None = None) -> torch.Tensor:
        logits = forward(chunks, gate)
        torch.cuda.current_stream().synchronize()
        case.release()
        return logits

    with case.rig as rig:
        slow_to_look_at(rig, link=1e6)
        if not waits:
            rig.cache.layer = lambda ticket, layer, *_: _pretend(ticket, layer)
            case.engine.runner.forward = ran
        case.hold()
        releasing = threading.Timer(0.3 if waits else 20.0, case.release)
        releasing.start()
        request = case.ask()
        rig.finish([request])
        releasing.cancel()
        assert rig.cache.stats().layered_starts == 1
        difference = replay_difference(case.loaded, rig.recorder, BLOCK_TOKENS)
        if waits:
            assert difference is None
            compare_with_recompute(case.loaded, [request])
        else:
            assert difference is not None
            assert f"requests [{request.id}]" in difference
        rig.settle()


def _pretend(ticket: Ticket, layer: int) -> None:
    ticket.bands_waited = ticket.band_of_layer[layer] + 1
