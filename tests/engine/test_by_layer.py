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
    greedy,
    judge,
    replay_difference,
    tiny_settings,
)

from forebay.config import BatchSettings, KVLayout, SaveMode
from forebay.core.ledger import MissReason
from forebay.core.modes import Mode
from forebay.core.requests import Ticket
from forebay.engine.models import LoadedModel
from forebay.engine.request import EngineRequest
from forebay.errors import CorruptBlockError
from forebay.transfer.messages import Direction

LAYERS = 3
LAYER_BYTES = TINY_BLOCK_BYTES // LAYERS
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("one_thread")]


def unhurried(rig: Rig, *, link: float = 1e6, prefill: float = 1.0) -> None:
    """From now on loads look as if they took a while, and computing as if it took longer: what
    starts by layer does not depend on the machine."""
    for average, value in (
        (rig.cache.rates.link_bytes_per_s, link),
        (rig.cache.rates.prefill_tokens_per_s, prefill),
    ):
        average.value, average.weight = value, 0.0


def late_loads(loaded: LoadedModel, **overrides: Any) -> Returning:
    case = Returning(loaded, patient=False, **{"band_bytes": LAYER_BYTES, **overrides})
    unhurried(case.rig)
    return case


def watch_layers(case: Returning, instead: Callable[[Callable[[], None], Ticket, int], None]):
    """Each wait of a layer is `instead`'s to make: given the wait, the ticket and the layer."""
    layer = case.rig.cache.layer

    def watched(ticket: Ticket, which: int, *more: Any) -> None:
        instead(lambda: layer(ticket, which, *more), ticket, which)

    case.rig.cache.layer = watched


@pytest.mark.parametrize("mode", [Mode.ASYNCHRONOUS, Mode.LOOK_AHEAD])
@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_request_starts_while_its_loads_flow(
    family: str, layout: KVLayout, mode: Mode, tiny_model: Callable[[str], LoadedModel]
) -> None:
    """One request at a time, so that each has nothing beside it."""
    loaded = tiny_model(family)
    rng = np.random.default_rng(3)
    settings = tiny_settings(mode=mode, kv_layout=layout, band_bytes=1024)
    with Rig(loaded, settings, seed=3, check_each_step=True) as rig:
        unhurried(rig)
        prompts = [rng.integers(3, 320, 60) for _ in range(5)]
        asked: list[EngineRequest] = []
        for turn in range(15):
            asked.append(rig.engine.submit(prompts[turn % 5], greedy(3)))
            rig.finish(asked)
            prompts[turn % 5] = np.concatenate([asked[-1].tokens, rng.integers(3, 320, 5)])
        assert replay_difference(loaded, rig.recorder, BLOCK_TOKENS) is None
        compare_with_recompute(loaded, asked)
        stats = rig.cache.stats()
        assert stats.layered_starts >= 5
        assert stats.failed_loads == stats.quarantined_blocks == 0
        rig.settle()


@pytest.mark.parametrize("save", SaveMode)
def test_with_aborts_and_preemptions(save: SaveMode, llama: LoadedModel) -> None:
    """One runs at a time, and each load begins with its request's turn."""
    batch = BatchSettings(step_tokens=24, max_running=1)
    settings = tiny_settings(
        mode=Mode.ASYNCHRONOUS,
        save_mode=save,
        batch=batch,
        band_bytes=LAYER_BYTES,
        device_tokens=13 * BLOCK_TOKENS,
    )
    with Rig(llama, settings, seed=9, check_each_step=True) as rig:
        unhurried(rig)
        talk = Conversations(
            rig,
            users=9,
            system_tokens=16,
            question_tokens=17,
            answer_tokens=7,
            abort_every=37,
            preempt_every=9,
            seed=9,
        )
        judge(llama, rig, talk)
        assert talk.aborted > 0
        assert talk.preempted > 0
        assert rig.cache.stats().layered_starts > 3


@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("window", range(8))
def test_a_load_that_fails_on_its_way_is_computed(
    layout: KVLayout, window: int, llama: LoadedModel
) -> None:
    """Three bands of eight blocks go in eight windows or nine."""
    case = late_loads(llama, kv_layout=layout)
    with case.rig as rig:
        case.core.fail_window(Direction.LOAD, window)
        request = case.ask()
        rig.finish([request])
        stats = rig.cache.stats()
        assert stats.layered_starts > 0
        assert stats.failed_loads == 1
        assert stats.misses[MissReason.FAILED] > 0
        assert rig.engine.preemptions == 0  # nobody took its room
        case.judge([request])
        rig.settle()


def test_a_link_that_stops_within_the_step_is_computed(llama: LoadedModel) -> None:
    case = late_loads(llama)
    with case.rig as rig:
        case.hold()
        request = case.ask()
        rig.finish([request])
        stats = rig.cache.stats()
        assert stats.layered_starts == stats.link_stops == 1
        assert stats.misses[MissReason.LATE] > 0
        assert case.steps_of(request) > 0
        case.judge([request])
        case.release()
        rig.settle()


def test_an_abort_while_its_bands_flow(llama: LoadedModel) -> None:
    case = late_loads(llama)
    with case.rig as rig:
        unhurried(rig, link=1e4, prefill=10.0)  # worth the wait, and too early to start
        case.hold()
        request = case.ask()
        rig.run(lambda: any(f.bands for f in rig.cache._flights._flights.values()))
        assert request.ticket is None
        rig.engine.abort(request.id)
        case.release()
        rig.settle()
        unhurried(rig)
        again = case.ask()
        rig.finish([again])
        assert rig.cache.stats().layered_starts == 1
        case.judge([again])
        rig.settle()


def test_a_layer_that_does_not_wait_is_seen(llama: LoadedModel) -> None:
    """The mutant: the first layer does not wait for its band, which a held link has not moved."""
    case = late_loads(llama, check_blocks=False)

    def skip_the_first(wait: Callable[[], None], ticket: Ticket, layer: int) -> None:
        if layer == 0:
            ticket.bands_waited = 1
            return
        case.release()
        wait()

    watch_layers(case, skip_the_first)
    with case.rig as rig:
        case.hold()
        request = case.ask()
        rig.finish([request])
        assert rig.cache.stats().layered_starts == 1
        difference = replay_difference(llama, rig.recorder, BLOCK_TOKENS)
        assert difference is not None
        assert f"requests [{request.id}]" in difference


def test_a_block_that_was_swapped_on_its_way_is_seen(llama: LoadedModel) -> None:
    """Debug mode compares behind the step what it cannot before."""
    case = late_loads(llama)
    words = case.rig.host.numpy().view(np.uint32)
    words[:, words.shape[1] // 2] ^= np.uint32(1 << 22)
    with case.rig as rig:
        case.ask()
        with pytest.raises(CorruptBlockError, match="differs from what its step wrote"):
            rig.run()
        assert rig.cache.stats().layered_starts == 1
