"""Speculative decoding in vLLM's own engine on a CPU: greedy tokens are those without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

import tiny_models
from guessing import Guess, by_a_model, by_eagle, by_eagle3, by_mtp, by_ngrams
from test_vllm_end_to_end import CROWDED, assert_only_the_last_differs, renamed, requests, with_ours
from vllm_programs import engine_options, served

SHAPE = {"head_dim": 32, "vocab_size": 16}
"""With few tokens some guesses are right, whoever guesses."""


PLAIN, WITH_ABORTS = requests(6, aborts=False), requests(6, aborts=True)
for _each in [*PLAIN[::2], *WITH_ABORTS[::2]]:
    # One prompt in two is found whole.
    _each["prompt"] = _each["prompt"][: len(_each["prompt"]) // 32 * 32]
for _each in [*PLAIN, *WITH_ABORTS]:
    _each["prompt"] = [3 + token % 13 for token in _each["prompt"]]


def by_mtp_of_latents(folder: Path, **shape: Any) -> dict[str, Any]:
    shape = {**tiny_models.latent(512), "vocab_size": shape["vocab_size"]}
    tiny_models.save_with_mtp(folder / "model", family="deepseek_v3", **shape)
    return {"method": "mtp"}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "guess", [by_ngrams, by_a_model, by_eagle, by_eagle3, by_mtp, by_mtp_of_latents]
)
def test_greedy_tokens_are_those_without_drafts_and_connector(tmp_path: Path, guess: Guess):
    """With aborts and preemption."""
    drafts = {**guess(tmp_path, **SHAPE), "num_speculative_tokens": 3}
    model = tmp_path / "model"
    alone = served(tmp_path, [{"requests": PLAIN}], engine_options(model, **CROWDED))
    rounds = [
        {"requests": WITH_ABORTS},
        {"requests": renamed(PLAIN, "b"), "reset": True},
        {"requests": renamed(WITH_ABORTS, "c"), "reset": True},
        {"requests": renamed(PLAIN, "d"), "reset": True, "bring_nothing": True},
    ]
    ours = served(tmp_path, rounds, with_ours(model, speculative_config=drafts, **CROWDED))
    assert_only_the_last_differs(ours["rounds"], alone["rounds"][0])
    assert all(guessed > accepted > 10 for guessed, accepted in ours["drafts"])
    assert ours["sources"]["host"] > 0
    assert ours["preempted"] > 0
    assert ours["free"] == ours["blocks"] - 1


@pytest.mark.timeout(900)
def test_two_workers_have_a_part_of_the_layers_that_make_drafts_each(tmp_path: Path):
    drafts = {**by_a_model(tmp_path, **SHAPE), "num_speculative_tokens": 3}
    two = {**CROWDED, "tensor_parallel_size": 2}
    wanted = [{**each, "answer": 30} for each in PLAIN[:5]]
    rounds = [
        {"requests": wanted},
        {"requests": renamed(wanted, "b"), "reset": True},
        {"requests": renamed(wanted, "c"), "reset": True, "bring_nothing_at": 1},
    ]
    engine = with_ours(tmp_path / "model", speculative_config=drafts, **two)
    ours = served(tmp_path, rounds, engine, timeout_s=600)
    computed, loaded, broken = (list(each.values()) for each in ours["rounds"])
    assert loaded == computed
    assert broken != computed, "a worker whose loads bring nothing was not noticed"
    assert all(guessed > accepted > 10 for guessed, accepted in ours["drafts"])
    assert ours["sources"]["host"] > 20
    assert ours["free"] == ours["blocks"] - 1
