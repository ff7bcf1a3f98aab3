"""vLLM on one GPU with the connector: KV from host memory gives the tokens of KV on the GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_models
import torch
from vllm_hits import BLOCK_TOKENS, POSITIONS, RUNNERS, options, prompts
from vllm_programs import asked, served

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

# Within a block, at its end and behind it; of one chunk and of several.
LENGTHS = (17, 32, 33, 100, 255, 256, 257, 700, 1500, 2700)
PROMPTS = prompts(LENGTHS, seed=5, vocabulary=tiny_models.VOCAB)
ANSWER = 24
# By the step after which the client of a request is gone.
ABORTS = {1: 2, 4: 60, 6: 30, 8: 0, 9: 90}


class Kind(NamedTuple):
    """Of KV, and of what reads it."""

    runner: str
    numbers: str = "auto"
    latents: str | None = None
    """The backend for multi-head latent attention, where the model has that."""


KINDS = {
    "V1 runner": Kind("V1 runner"),
    "V2 runner": Kind("V2 runner"),
    "V2 runner, fp8": Kind("V2 runner", "fp8"),
    "V2 runner, latents": Kind("V2 runner", latents="FLASH_ATTN_MLA"),
    "V1 runner, latents of fp8": Kind("V1 runner", "fp8", latents="TRITON_MLA"),
}


LLAMA = {"head_dim": 128, "hidden_size": 512, "max_position_embeddings": POSITIONS}
# With heads of prompts of the size that vLLM's kernels take. Without experts, which have no KV and
# compile when vLLM starts.
DEEPSEEK = {
    **tiny_models.latent(POSITIONS),
    "first_k_dense_replace": 3,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "intermediate_size": 256,
    "initializer_range": 0.1,
}


def save_model(kind: Kind, folder: Path) -> None:
    family, settings = ("deepseek_v3", DEEPSEEK) if kind.latents else ("llama", LLAMA)
    tiny_models.build(family, **settings).to(torch.bfloat16).save_pretrained(folder)


def round_of(name: str, aborts: dict[int, int] | None = None, **before: bool) -> dict[str, Any]:
    """All prompts, once."""
    requests = [
        asked(f"{name}-{place}", prompt, ANSWER, (aborts or {}).get(place))
        for place, prompt in enumerate(PROMPTS)
    ]
    return {"requests": requests, **before}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """What one engine served of all rounds, by the kind of its KV."""
    kind: Kind = request.param
    folder = tmp_path_factory.mktemp("vllm")
    save_model(kind, folder / "model")
    rounds = [
        round_of("cold"),
        round_of("gpu"),
        round_of("host", reset=True),
        round_of("aborted", ABORTS, reset=True),
        round_of("again", reset=True),
        round_of("swapped", reset=True, swap=True),
    ]
    backend = {"attention_backend": kind.latents} if kind.latents else {}
    engine = options(folder, kv_cache_dtype=kind.numbers, **backend)
    environment = {"VLLM_USE_V2_MODEL_RUNNER": RUNNERS[kind.runner]}
    return served(folder, rounds, engine, timeout_s=170, environment=environment)


def tokens(told: dict[str, Any], place: int) -> list[list[int]]:
    return list(told["rounds"][place].values())


@pytest.mark.timeout(200)
def test_tokens_of_a_host_hit_are_those_of_a_hit_on_the_gpu(told: dict[str, Any]):
    gpu, host = tokens(told, 1), tokens(told, 2)
    assert [len(answer) for answer in gpu] == [ANSWER] * len(LENGTHS)
    assert {
        length: one == other for length, one, other in zip(LENGTHS, gpu, host, strict=True)
    } == (dict.fromkeys(LENGTHS, True))
    found = sum((length - 1) // BLOCK_TOKENS for length in LENGTHS)
    assert told["sources"]["host"] >= found


@pytest.mark.timeout(200)
def test_all_layers_of_a_block_lie_side_by_side(told: dict[str, Any]):
    assert told["tensors"] == [1]


@pytest.mark.timeout(200)
def test_aborts_change_no_token_and_leave_nothing(told: dict[str, Any]):
    gpu, aborted, again = (tokens(told, place) for place in (1, 3, 4))
    assert any(len(answer) < ANSWER for answer in aborted), "nothing was aborted in time"
    assert [whole[: len(answer)] for whole, answer in zip(gpu, aborted, strict=True)] == aborted
    assert all(
        len(aborted[place]) == ANSWER for place in range(len(LENGTHS)) if place not in ABORTS
    )
    assert again == gpu
    assert told["free"] == told["blocks"] - 1


@pytest.mark.timeout(200)
def test_blocks_that_lie_in_each_others_places_are_noticed(told: dict[str, Any]):
    gpu, swapped = tokens(told, 1), tokens(told, 5)
    wrong = [one != other for one, other in zip(gpu, swapped, strict=True)]
    assert sum(wrong) > len(LENGTHS) // 2, wrong
