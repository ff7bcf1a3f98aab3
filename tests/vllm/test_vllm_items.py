"""Prompts with images over vLLM's real scheduler: no KV of one for another, nor of part of one."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus
from vllm_toy import BLOCK_BYTES, BLOCK_TOKENS, assert_nothing_left, prompt_of, wrong_answers
from vllm_toy_bytes import Watched
from vllm_toy_items import Image, SightedEngine

from forebay.core.ledger import Source

KEYS = "vllm.v1.core.kv_cache_utils._gen_mm_extra_hash_keys"
CAT, DOG = Image(1, 40), Image(2, 40)


@pytest.fixture
def sighted(tiny_llama: Path) -> Iterator[Any]:
    """Makes toy engines that see, and closes them."""
    engines: list[SightedEngine] = []

    def make(**options: Any) -> SightedEngine:
        engines.append(SightedEngine(tiny_llama, **{"min_load_tokens": 0, **options}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def loaded(engine: SightedEngine, parts: list[int | Image], **more: Any) -> int:
    """How many blocks of a prompt are found in host memory, after all that was computed has left;
    they make the answer that is right.
    """
    engine.try_to_reset()
    before = engine.half.stats().sources[Source.HOST]
    asked = engine.show(parts, 6, **more)
    engine.run()
    assert asked.ended == "finished"
    assert not wrong_answers(engine)
    return engine.half.stats().sources[Source.HOST] - before


@pytest.mark.parametrize("before", [0, 5, 16, 30])
def test_what_is_found_ends_where_another_image_begins(sighted: Any, before: int):
    """From the block on in which it begins, wherever in it."""
    engine: SightedEngine = sighted()
    around = prompt_of(1, 100)
    shown = [[*around[:before], image, *around[before:]] for image in (CAT, DOG)]
    whole = (100 + 40) // BLOCK_TOKENS
    assert [loaded(engine, each) for each in shown] == [0, before // BLOCK_TOKENS]
    assert [loaded(engine, each) for each in shown] == [whole, whole]
    assert_nothing_left(engine)


def test_the_same_image_elsewhere_is_another_prompt(sighted: Any):
    """Also where tokens are those of images alone."""
    engine: SightedEngine = sighted()
    shown = [[CAT, DOG, Image(3, 16)], [DOG, CAT, Image(3, 16)], [CAT, CAT, Image(3, 16)]]
    assert [loaded(engine, each) for each in shown] == [0, 0, 2]
    assert [loaded(engine, each) for each in shown] == [6, 6, 6]


def test_an_image_of_which_a_part_is_found_is_encoded_again(sighted: Any):
    engine: SightedEngine = sighted(blocks=60)
    around = prompt_of(1, 20)
    loaded(engine, [*around, CAT, *around])
    assert engine.encoded == 1
    # Nothing behind its third block is the same, so it is found but for 12 tokens of the image.
    engine.try_to_reset()
    engine.forget_encoded()
    asked = engine.show([*around, CAT], 6)
    engine.run()
    assert asked.request.num_prompt_tokens == 60
    assert engine.half.stats().sources[Source.HOST] == 3
    assert engine.encoded == 2
    assert not wrong_answers(engine)


def test_a_prompt_that_ends_with_an_image_and_is_found_whole(sighted: Any):
    """Its last token is computed, and is one of the image."""
    engine: SightedEngine = sighted()
    shown: list[int | Image] = [*prompt_of(1, 24), CAT]
    assert loaded(engine, shown) == 0
    engine.forget_encoded()
    assert loaded(engine, shown) == 4
    assert engine.half.stats().sources[Source.RECOMPUTED] == 4
    assert engine.encoded == 2
    # And another one in its place is not taken for it.
    assert loaded(engine, [*prompt_of(1, 24), DOG]) == 1


@pytest.mark.parametrize("names", ["by content", "of nothing"])
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_random_lives(
    sighted: Any, monkeypatch: pytest.MonkeyPatch, seed: int, lag: int, names: str
):
    """Two of them, or the mutant: vLLM has no images in the names of blocks."""
    if names == "of nothing":
        monkeypatch.setattr(KEYS, lambda request, start, end, place: ([], place))
    dice = random.Random(seed)
    # As in the role of a producer: blocks come back while steps under way use them.
    early = dice.random() < 0.5
    monkeypatch.setattr("forebay.vllm.connector.frees_idle", lambda config: not early)
    engine: SightedEngine = sighted(lag=lag, **settings(dice))
    engine.scheduler.defer_block_free = bool(lag) and not early
    for _ in range(4):
        live(engine, dice)
        # They would wait by the clock.
        engine.half._hints.drop_all()
        engine.run()
        # What was computed comes back from host memory.
        assert engine.scheduler.reset_prefix_cache()
    assert engine.half.stats().sources[Source.HOST] > 5
    assert bool(wrong_answers(engine)) == (names == "of nothing")
    assert_nothing_left(engine)


def live(engine: SightedEngine, dice: random.Random) -> None:
    for _ in range(100):
        if dice.random() < 0.2 and len(list(engine.open())) < 8:
            hint = {"forebay": {"hint": {"eta_s": 0.05}}} if dice.random() < 0.2 else None
            most = 1 if hint else dice.randrange(1, 30)
            engine.show(some_prompt(dice), most, priority=dice.randrange(3), params=hint)
        if dice.random() < 0.03 and (opened := list(engine.open())):
            engine.abort(engine.asked[dice.choice(opened)])
        if dice.random() < 0.1:
            engine.try_to_reset()
        if dice.random() < 0.005:
            engine.scheduler.reset_connector_cache()
        engine.step()


def settings(dice: random.Random) -> dict[str, Any]:
    return {
        "blocks": dice.choice([30, 40]),
        "most_running": dice.choice([2, 4]),
        "step_tokens": dice.choice([32, 64, 200]),
        "policy": dice.choice(["fcfs", "priority"]),
        "host_bytes": dice.choice([40, 400]) * BLOCK_BYTES,
        "window_bytes": BLOCK_BYTES,
        "copy_bytes_per_s": dice.choice([0.0, 4e5]),
        # No more than fits in one image, or more.
        "encoder_tokens": dice.choice([50, 100]),
    }


def some_prompt(dice: random.Random) -> list[int | Image]:
    """Many have the same text, and images that take the same place."""
    parts: list[int | Image] = list(prompt_of(dice.randrange(2), dice.choice([5, 16, 60, 70])))
    for _ in range(dice.randrange(4)):
        parts.append(Image(dice.randrange(3), dice.choice([3, 40, 50])))
        parts += prompt_of(2, dice.choice([0, 8, 16, 70]))
    return parts or [1]


def test_images_that_their_client_names_are_kept_out(
    sighted: Any, caplog: pytest.LogCaptureFixture
):
    """Two images of one name: vLLM tells them apart as long as it has forgotten the first."""
    engine: SightedEngine = sighted()
    around = prompt_of(1, 100)
    with caplog.at_level(logging.WARNING):
        for seed in (1, 2, 1, 2):
            assert loaded(engine, [*around, Image(seed, 40, "me"), *around]) == 0
    assert engine.half.stats().saved_bytes == 0
    assert [each.message for each in caplog.records if "uuid" in each.message][1:] == []
    # Those that vLLM names are not, whatever goes along with them.
    again = [*around, CAT, *around]
    assert loaded(engine, again) == 0
    assert loaded(engine, again) == 240 // BLOCK_TOKENS


def test_images_whose_kv_depends_on_steps_are_kept_out_and_text_is_not(
    sighted: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("forebay.vllm.connector.items_depend_on_steps", lambda config: True)
    engine: SightedEngine = sighted()
    around = prompt_of(1, 100)
    for _ in range(2):
        assert loaded(engine, [*around, CAT]) == 0
    assert engine.half.stats().saved_bytes == 0
    assert [loaded(engine, [*around]) for _ in range(2)] == [0, 100 // BLOCK_TOKENS]
    assert loaded(engine, [*around, CAT]) == 0


def test_a_digest_for_a_lora_is_vllms_own(sighted: Any):
    """Where LoRAs have a part in what the encoder makes, their names stand before it."""
    engine: SightedEngine = sighted()
    own, other = (Image(1, 40, f"{name}:{CAT.name}") for name in ("a", "b"))
    adapter = LoRARequest("a", 1, "somewhere")
    assert loaded(engine, [own] * 2, lora_request=adapter) == 0
    assert loaded(engine, [own] * 2, lora_request=adapter) == 5
    assert loaded(engine, [other] * 2, lora_request=adapter) == 0
    assert loaded(engine, [other] * 2, lora_request=adapter) == 0


def test_items_that_lie_over_each_other_are_kept_out(sighted: Any):
    """As sound in a video does: vLLM looks for the second where the first has ended."""
    engine: SightedEngine = sighted(encoder_tokens=100)

    def found(second: Image) -> int:
        engine.try_to_reset()
        before = engine.half.stats().sources[Source.HOST]
        asked = engine.show([CAT, *prompt_of(1, 60)], 1, over=second)
        engine.run()
        assert asked.ended == "finished"
        return engine.half.stats().sources[Source.HOST] - before

    assert [found(Image(seed, 40)) for seed in (3, 4, 3)] == [0, 0, 0]
    assert engine.half.stats().saved_bytes == 0


@pytest.mark.parametrize(("version", "found"), [("0.26.0", 0), ("0.32.0", 6), ("0.33.0", 6)])
def test_items_in_the_block_that_a_prompt_leaves_partly_filled(
    sighted: Any, monkeypatch: pytest.MonkeyPatch, version: str, found: int
):
    """0.26 puts the last of them alone into the name of that block, which the answer fills."""
    monkeypatch.setattr("forebay.vllm.connector.__version__", version)
    engine: SightedEngine = sighted()
    small = [Image(seed, 3) for seed in (1, 2)]
    parts = [*prompt_of(1, 97), *small]
    loaded(engine, parts)
    assert loaded(engine, parts) == found
    # One alone is named, and so are two in blocks that are full.
    for more in ([*prompt_of(2, 97), small[0]], [*prompt_of(3, 90), *small]):
        loaded(engine, more)
        assert loaded(engine, more) == 6


def test_vllm_leaves_items_out_where_that_is_believed(sighted: Any):
    engine: SightedEngine = sighted()
    hashes: list[bytes] = []
    for seed in (1, 2):
        asked = engine.show([*prompt_of(1, 97), Image(seed, 3), Image(3, 3)], 20)
        # Its answer is another one, and is set to be the same.
        asked.request.append_output_token_ids([7] * 20)
        hashes.append(asked.request.block_hashes[6])
    assert (hashes[0] == hashes[1]) == engine.half._misnamed._tails


def test_sessions_that_go_on_are_kept_out(sighted: Any):
    """Streaming input: what else comes is not known when a session begins."""
    engine: SightedEngine = sighted()
    session = engine.show(prompt_of(1, 100), 6, resumable=True)
    while len(session.given) < 6:
        engine.step()
    engine.scheduler.finish_requests(session.request.request_id, RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert engine.half.stats().saved_bytes == 0
    assert loaded(engine, [*prompt_of(1, 100)]) == 0
    assert loaded(engine, [*prompt_of(1, 100)]) == 6


@pytest.mark.parametrize("lag", [0, 2])
def test_every_block_has_the_right_bytes_in_both_tiers(sighted: Any, lag: int):
    dice = random.Random(lag)
    engine: SightedEngine = sighted(lag=lag, blocks=30)
    watched = Watched(engine)
    for _ in range(200):
        if dice.random() < 0.3 and len(list(engine.open())) < 6:
            engine.show(some_prompt(dice), dice.randrange(1, 30))
        if dice.random() < 0.1:
            engine.try_to_reset()
        engine.step()
        watched.check_books()
        watched.check_device()
        watched.check_host()
    engine.run()
    assert engine.half.stats().sources[Source.HOST] > 0
    assert not wrong_answers(engine)
