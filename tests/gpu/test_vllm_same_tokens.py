"""vLLM in its batch-invariant mode, in which a request's tokens do not depend on what runs beside
it: with the connector they are the same bits wherever its KV was, and however it came from there.
"""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest
import tiny_models
import torch
from vllm_programs import asked, connector, engine_options, served

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

import vllm.envs

if "VLLM_BATCH_INVARIANT" not in vllm.envs.environment_variables:
    pytest.skip("this vLLM has no batch-invariant mode", allow_module_level=True)
if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("vLLM's batch-invariant mode is for GPUs of Hopper's kind", allow_module_level=True)

LENGTHS = (17, 33, 100, 256, 257, 500, 700, 900, 1100, 1500)
SHARED = 640
"""Tokens that some prompts begin with alike."""
ANSWER = 40
# Of four requests one leaves at some step; of three one is hinted first.
ABORTS = {1: 3, 5: 20, 9: 45}
HINTED = (3, 6, 9, 11)
ENGINE = {
    "dtype": "bfloat16",
    "block_size": 16,
    "max_num_seqs": 8,
    # Fewer than all prompts have, so that some are preempted.
    "num_gpu_blocks_override": 200,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 256 << 20,
}
ENVIRONMENT = {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}

Requests = list[dict[str, Any]]


def prompts() -> list[list[int]]:
    dice = random.Random(11)

    def some(count: int) -> list[int]:
        return [dice.randrange(3, tiny_models.VOCAB) for _ in range(count)]

    front = some(SHARED)
    return [some(length) for length in LENGTHS] + [front + some(more) for more in (1, 60, 300)]


PROMPTS = prompts()
EACH = range(len(PROMPTS))


def request(way: str, place: int, answer: int = ANSWER, **more: Any) -> dict[str, Any]:
    return asked(f"{way} {place}", PROMPTS[place], answer, **more)


def crowd(way: str, **aborts: dict[int, int]) -> Requests:
    leave = aborts.get("aborts", {})
    return [request(way, place, abort=leave.get(place)) for place in EACH]


def hinted(way: str, place: int, after: int = 0) -> Requests:
    """A hint, and its session three steps behind it."""
    return [
        request(f"{way} hint", place, 1, after=after, hint=True),
        request(way, place, after=after + 3),
    ]


def mixed(way: str) -> Requests:
    """All of it at once: hints and their sessions, requests that leave, and others between them."""
    found: Requests = []
    for place in EACH:
        if place in HINTED:
            found += hinted(way, place, after=2 * place)
        else:
            found.append(request(way, place, abort=ABORTS.get(place), after=2 * place))
    # And the same prompts again, while the first are under way.
    return found + [request(f"{way} twice", place, after=3 * place) for place in EACH]


def rounds() -> list[dict[str, Any]]:
    return [
        *({"requests": [request("alone", place)], "forget": True} for place in EACH),
        {"requests": crowd("computed"), "forget": True},
        {"requests": crowd("once more")},
        {"requests": crowd("host"), "reset": True},
        *({"requests": [request("near", place)], "reset": True} for place in EACH),
        *({"requests": hinted("hinted", place), "reset": True} for place in HINTED),
        {"requests": crowd("leaving", aborts=ABORTS), "reset": True},
        {"requests": mixed("mixed"), "reset": True},
        {"requests": crowd("again"), "reset": True},
        {"requests": crowd("swapped"), "reset": True, "swap": True},
    ]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one engine served of all rounds."""
    folder = tmp_path_factory.mktemp("vllm")
    model = tiny_models.build(
        "llama",
        head_dim=128,
        hidden_size=1024,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=2048,
        num_hidden_layers=8,
        max_position_embeddings=2048,
        initializer_range=0.05,
    )
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    ours = connector(host_bytes="512MiB", min_load_tokens=0)
    engine = engine_options(folder / "model", kv_transfer_config=ours, **ENGINE)
    return served(folder, rounds(), engine, timeout_s=240, environment=ENVIRONMENT)


def answers(told: dict[str, Any], way: str) -> dict[str, list[int]]:
    """All answers of one way, by name."""
    every = {name: answer for served in told["rounds"] for name, answer in served.items()}
    return {name: every[name] for name in every if name.rpartition(" ")[0] in (way, f"{way} hint")}


def others(told: dict[str, Any], way: str) -> dict[str, int]:
    """Answers of one way that are not those of the same prompt alone: where each differs first."""
    found: dict[str, int] = {}
    for name, answer in answers(told, way).items():
        wanted = answers(told, "alone")[f"alone {name.rpartition(' ')[2]}"]
        if answer != wanted[: len(answer)]:
            pairs = zip(answer, wanted, strict=False)
            found[name] = next(at for at, (one, other) in enumerate(pairs) if one != other)
    return found


@pytest.mark.timeout(260)
def test_what_is_computed_in_a_crowd_is_what_is_computed_alone(told: dict[str, Any]):
    """vLLM's mode itself, without which the others say nothing."""
    assert {len(answer) for answer in answers(told, "alone").values()} == {ANSWER}
    assert len({tuple(answer) for answer in answers(told, "alone").values()}) == len(PROMPTS)
    assert others(told, "computed") == {}


@pytest.mark.timeout(260)
@pytest.mark.parametrize("way", ["once more", "host", "near", "hinted", "again"])
def test_tokens_are_the_same_bits_wherever_the_kv_was(told: dict[str, Any], way: str):
    assert others(told, way) == {}
    assert {len(answer) for answer in answers(told, way).values()} <= {ANSWER, 1}


@pytest.mark.timeout(260)
@pytest.mark.parametrize("way", ["leaving", "mixed", "mixed twice"])
def test_those_that_leave_change_no_token_of_others(told: dict[str, Any], way: str):
    assert others(told, way) == {}
    whole = {name for name, answer in answers(told, way).items() if len(answer) == ANSWER}
    places = {int(name.rpartition(" ")[2]) for name in whole}
    assert places >= set(EACH) - ABORTS.keys()


@pytest.mark.timeout(260)
def test_all_ways_were_gone(told: dict[str, Any]):
    assert told["preempted"] > 0
    assert told["near"] > 0
    assert told["hints"]["claimed"] > 0
    assert told["sources"]["host"] > sum(map(len, PROMPTS)) // 16
    assert told["sources"]["device"] > 0
    assert told["free"] == told["blocks"] - 1


@pytest.mark.timeout(260)
def test_blocks_in_each_others_places_are_noticed(told: dict[str, Any]):
    assert len(others(told, "swapped")) > len(PROMPTS) // 2
