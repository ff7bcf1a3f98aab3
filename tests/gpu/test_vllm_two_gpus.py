"""vLLM over two GPUs, by heads and by stages: host hits give the tokens of GPU hits."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from vllm_programs import asked, connector, engine_options, served

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)
if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

BLOCK_TOKENS = 32
# One at a time: then a hit runs the same kernels over the same shapes, wherever its KV was.
ENGINE = {
    "dtype": "bfloat16",
    "block_size": BLOCK_TOKENS,
    "max_num_seqs": 1,
    "num_gpu_blocks_override": 300,
    "max_num_batched_tokens": 512,
    "gpu_memory_utilization": 0.2,
    # So that vLLM does not measure what is free, which others may change meanwhile.
    "kv_cache_memory_bytes": 256 << 20,
}
HALVES = {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}
STAGES = {"pipeline_parallel_size": 2}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("ways", "first_has", "runner"),
    [(HALVES, 1, "1"), (STAGES, 2, "1"), (STAGES, 2, "0")],
    ids=["halves of heads", "stages under the second runner", "stages under the first runner"],
)
def test_tokens_with_kv_from_host_memory_are_those_with_kv_on_the_gpus(
    tmp_path: Path, ways: dict[str, Any], first_has: int, runner: str
):
    """Of three layers the first stage has two."""
    prompts = prepared(tmp_path, seed=5, count=8, lengths=(200, 400))
    rounds: list[dict[str, Any]] = [
        {"requests": named("cold", prompts)},
        {"requests": named("gpu", prompts)},
        {"requests": named("host", prompts), "reset": True},
        {"requests": named("nothing", prompts), "reset": True, "bring_nothing_at": 1},
    ]
    environment = {"VLLM_USE_V2_MODEL_RUNNER": runner}
    told = answered(tmp_path, rounds, ENGINE | ways, environment)
    assert told["tensors"] == [1, 1], "the layers of a block do not lie side by side in each worker"
    (slots, first_bytes), (last_slots, last_bytes) = told["host"]
    assert (slots, first_bytes) == (last_slots, first_has * last_bytes)
    _, gpu, host, nothing = (list(each.values()) for each in told["rounds"])
    assert host == gpu
    assert nothing != gpu, "loads that bring nothing at one worker were not noticed"
    assert told["sources"]["host"] >= sum((len(prompt) - 1) // BLOCK_TOKENS for prompt in prompts)
    assert told["failed_loads"] == 0
    assert told["free"] == told["blocks"] - 1


@pytest.mark.timeout(400)
def test_stages_that_are_crowded_answer_all(tmp_path: Path):
    """Many at once, with preemption and aborts: in batches tokens may differ, but none is stuck."""
    prompts = prepared(tmp_path, seed=6, count=16, lengths=(150, 330))
    crowd = {"max_num_seqs": 6, "num_gpu_blocks_override": 34}
    rounds: list[dict[str, Any]] = [
        {"requests": [{**each, "abort": 12} for each in named("left", prompts[:4])]},
        {"requests": named("crowd", prompts)},
        {"requests": named("again", prompts), "reset": True},
    ]
    told = answered(tmp_path, rounds, ENGINE | STAGES | crowd)
    for each in told["rounds"][1:]:
        assert {len(said) for said in each.values()} == {60}
    assert told["sources"]["host"] > 0
    assert told["failed_loads"] == 0
    assert told["free"] == told["blocks"] - 1


def prepared(folder: Path, seed: int, count: int, lengths: tuple[int, int]) -> list[list[int]]:
    """Prompts for the model that is saved in `folder`."""
    model = tiny_models.build("llama", head_dim=128, hidden_size=512)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    dice = random.Random(seed)
    return [[dice.randrange(3, 320) for _ in range(dice.randrange(*lengths))] for _ in range(count)]


def answered(
    folder: Path,
    rounds: list[dict[str, Any]],
    engine: dict[str, Any],
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    """What an engine with Forebay told of the rounds."""
    ours = connector(host_bytes="256MiB")
    options = engine_options(folder / "model", kv_transfer_config=ours, **engine)
    return served(folder, rounds, options, timeout_s=380, environment=environment)


def named(round_: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """The requests of a round."""
    return [asked(f"{round_}-{place}", prompt, 60) for place, prompt in enumerate(prompts)]
