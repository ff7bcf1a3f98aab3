"""What cannot be is refused with a word on what would work, and leaves nothing behind."""

from __future__ import annotations

import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import BLOCK_TOKENS, Returning, Rig, compare_with_recompute, greedy, tiny_settings

from forebay.config import BatchSettings
from forebay.core.modes import Mode
from forebay.engine.engine import Engine
from forebay.engine.models import LoadedModel, load_model
from forebay.engine.sampler import SamplingParams
from forebay.errors import ForebayError, ModelError, RequestError, SettingsError

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def llama(tiny_model: Callable[[str], LoadedModel]) -> LoadedModel:
    return tiny_model("llama")


def works(rig: Rig, loaded: LoadedModel) -> None:
    """Nothing is left over, and the next request is answered rightly."""
    assert not rig.engine.busy
    rig.settle()
    after = rig.engine.submit(np.arange(10, 40), greedy(3))
    rig.finish([after])
    compare_with_recompute(loaded, [after])
    rig.settle()


BAD_PROMPTS: list[tuple[Any, str]] = [
    ([], "at least one token"),
    (np.zeros((0,), np.int64), "at least one token"),
    (np.zeros((2, 3), np.int64), "in one row"),
    (np.int64(5), "in one row"),
    ([[1, 2], [3]], "one row"),
    ([5, -1], r"must be in 0\.\.319"),
    ([5, 320], r"must be in 0\.\.319"),
    ([5, 2**40], r"must be in 0\.\.319"),
    ([5, 2**70], "whole numbers"),
    (np.array([2**63 + 5], np.uint64), r"must be in 0\.\.319"),
    ([5.0, 6.0], "whole numbers"),
    (np.array([5.7, 6.2]), "whole numbers"),
    ([True, False], "whole numbers"),
    ([5, None], "whole numbers"),
    (["5"], "whole numbers"),
    (None, "in one row"),
    ("text", "no tokenizer"),
]


@pytest.mark.parametrize(("prompt", "why"), BAD_PROMPTS, ids=lambda value: str(value)[:24])
def test_what_is_no_prompt(prompt: Any, why: str, bad_input_rig: Rig) -> None:
    with pytest.raises(RequestError, match=why):
        bad_input_rig.engine.submit(prompt, greedy(3))
    assert not bad_input_rig.engine.busy


@pytest.fixture(scope="module")
def bad_input_rig(tiny_model: Callable[[str], LoadedModel]) -> Iterator[Rig]:
    """One engine for all that is refused; it must work at the end."""
    loaded = tiny_model("llama")
    with Rig(loaded) as rig:
        yield rig
        works(rig, loaded)


@pytest.mark.parametrize(
    ("length", "answer", "why"),
    [
        (512, 1, "model's context of 512"),
        (600, 1, "room for 0 tokens"),
        (100, 413, "model's context of 512"),
        (400, 10, "fit the 20 blocks of 8 tokens"),
        (30, 131, "fit the 20 blocks of 8 tokens"),
    ],
)
def test_longer_than_the_context_or_the_pool(
    length: int, answer: int, why: str, bad_input_rig: Rig
) -> None:
    with pytest.raises(RequestError, match=why):
        bad_input_rig.engine.submit(np.full(length, 7), greedy(answer))
    assert not bad_input_rig.engine.busy


def test_exactly_as_long_as_the_pool(bad_input_rig: Rig) -> None:
    request = bad_input_rig.engine.submit(np.full(30, 7), greedy(130))
    bad_input_rig.finish([request])
    assert len(request.drawn) == 130


def test_refused_beside_others_that_run(llama: LoadedModel) -> None:
    with Rig(llama) as rig:
        good = [rig.engine.submit(np.arange(9 + i, 60 + i), greedy(8)) for i in range(3)]
        for prompt, _ in BAD_PROMPTS:
            with pytest.raises(RequestError):
                rig.engine.submit(prompt, greedy(3))
            rig.step()
        rig.finish(good)
        compare_with_recompute(llama, good)
        works(rig, llama)


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 0},
        {"max_tokens": -3},
        {"max_tokens": 2.5},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 2.0},
        {"seed": -1},
        {"seed": 2**64},
        {"stop": ("",)},
        {"stop": "text"},
        {"logprobs": 21},
    ],
    ids=str,
)
def test_absurd_sampling(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        SamplingParams(**params)


# -- settings --------------------------------------------------------------------------------------

BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"device_tokens": 2 * BLOCK_TOKENS - 1}, "less than two blocks of 8 tokens"),
    ({"device_tokens": 10**16}, "device_tokens 10000000000000000 take"),
    ({"block_tokens": 10**12}, "a device_tokens of .* or a block_tokens of 80"),
    ({"host_bytes": 100}, "host_bytes 100 is less than one block of 6144 bytes"),
    ({"host_bytes": 10**18}, "use a smaller pool"),
    ({"window_bytes": 1 << 30}, "window_bytes of 261120 would work"),
    ({"link_bytes_per_s": 100.0}, "takes longer than wait_timeout_s 10"),
    ({"prefetch_share": 1.0}, "prefetch_share of 0.95 would work"),
]


@pytest.mark.parametrize(("settings", "why"), BAD_SETTINGS, ids=lambda value: str(value)[:40])
def test_absurd_settings(settings: dict[str, Any], why: str, llama: LoadedModel) -> None:
    threads = threading.active_count()
    with pytest.raises(SettingsError, match=why):
        Engine(llama, tiny_settings(**settings))
    assert threading.active_count() == threads


def test_more_run_slots_than_anything_could_fill(llama: LoadedModel) -> None:
    most = 2**63 - 1
    batch = BatchSettings(step_tokens=most, max_running=most, max_waiting=most)
    case = Returning(llama, patient=False, batch=batch)
    with case.rig:
        asked = [case.ask(), case.ask()]
        case.rig.finish(asked)
        case.judge(asked)


def test_the_mode_by_its_text(llama: LoadedModel) -> None:
    with Rig(llama, tiny_settings(mode="b0", host_bytes=1 << 20)) as rig:
        assert "mode b0" in rig.engine.startup_line
        works(rig, llama)
    with Rig(llama, tiny_settings(mode="b4", save_mode="on_evict")) as rig:
        rig.engine.set_mode("b3")
        assert rig.engine.stats().mode is Mode.ASYNCHRONOUS
        with pytest.raises(SettingsError, match="one of b0"):
            rig.engine.set_mode("b9")
        works(rig, llama)


def test_a_window_that_was_said_to_work_works(llama: LoadedModel) -> None:
    with Rig(llama, tiny_settings(window_bytes=261_120)) as rig:
        works(rig, llama)


def test_a_host_tier_smaller_than_the_device_pool_warns_and_works(llama: LoadedModel) -> None:
    with pytest.warns(UserWarning, match="smaller than the device pool") as warned:
        rig = Rig(llama, tiny_settings(host_bytes=5 * 6144))
    assert len(warned) == 1
    with rig:
        asked = [rig.engine.submit(np.arange(9 + i, 90 + i), greedy(4)) for i in range(6)]
        rig.finish(asked)
        compare_with_recompute(llama, asked)
        works(rig, llama)


@pytest.mark.parametrize("mode", [Mode.RECOMPUTE, Mode.SYNCHRONOUS, Mode.LOOK_AHEAD])
def test_the_smallest_pools_work(mode: Mode, llama: LoadedModel) -> None:
    settings = tiny_settings(mode=mode, device_tokens=2 * BLOCK_TOKENS, host_bytes=3 * 6144)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rig = Rig(llama, settings, check_each_step=True)
    with rig:
        asked = [rig.engine.submit(np.arange(9 + i, 19 + i), greedy(6)) for i in range(5)]
        rig.finish(asked)
        compare_with_recompute(llama, asked)
        rig.settle()


def test_no_host_tier_is_plain_recompute(llama: LoadedModel) -> None:
    with Rig(llama, tiny_settings(host_bytes=0), check_each_step=True) as rig:
        assert "no host tier" in rig.engine.startup_line
        asked = [rig.engine.submit(np.arange(9 + i, 90 + i), greedy(4)) for i in range(4)]
        rig.finish(asked)
        assert rig.cache.stats().saved_bytes == 0
        rig.engine.set_mode(Mode.RECOMPUTE)
        with pytest.raises(SettingsError, match="made without one"):
            rig.engine.set_mode(Mode.LOOK_AHEAD)
        works(rig, llama)


# -- models ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(build_model: Any, byte_tokenizer: Any, tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_model("llama", vocab_size=259).save_pretrained(path)
    byte_tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_with_a_file_missing(missing: str, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / missing).unlink()
    with pytest.raises(ModelError, match=f"lacks .*{missing}"):
        Engine(copy, tiny_settings())
    shutil.copy(folder / missing, copy / missing)
    with Engine(copy, tiny_settings()) as engine:
        for prompts in (["it works again"], "a text alone is one prompt"):
            (answer,) = engine.generate(prompts, greedy(3))
            assert len(answer.drawn) == 3


def test_damaged_and_absent_models(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    for wrong in (copy, tmp_path / "nowhere", copy / "config.json"):
        with pytest.raises(ForebayError):
            load_model(wrong)
