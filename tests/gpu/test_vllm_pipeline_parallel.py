"""vLLM over two stages of unequal length on two GPUs: host hits give the tokens of GPU hits."""

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
    "pipeline_parallel_size": 2,
    "block_size": BLOCK_TOKENS,
    "max_num_seqs": 1,
    "num_gpu_blocks_override": 300,
    "max_num_batched_tokens": 512,
    "gpu_memory_utilization": 0.2,
    # So that vLLM does not measure what is free, which others may change meanwhile.
    "kv_cache_memory_bytes": 256 << 20,
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("second_runner", ["1", "0"], ids=["second runner", "first runner"])
def test_tokens_with_kv_from_host_memory_are_those_with_kv_on_the_gpus(
    tmp_path: Path, second_runner: str
):
    model = tiny_models.build("llama", head_dim=128, hidden_size=512)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    dice = random.Random(5)
    prompts = [[dice.randrange(3, 320) for _ in range(dice.randrange(200, 400))] for _ in range(8)]
    rounds: list[dict[str, Any]] = [
        {"requests": named("cold", prompts)},
        {"requests": named("gpu", prompts)},
        {"requests": named("host", prompts), "reset": True},
        {"requests": named("nothing", prompts), "reset": True, "bring_nothing_at": 1},
    ]
    ours = connector(host_bytes="256MiB")
    engine = engine_options(tmp_path / "model", kv_transfer_config=ours, **ENGINE)
    runner = {"VLLM_USE_V2_MODEL_RUNNER": second_runner}
    told = served(tmp_path, rounds, engine, timeout_s=380, environment=runner)
    assert told["tensors"] == [1, 1], "the layers of a block do not lie side by side in each worker"
    (slots, first_bytes), (last_slots, last_bytes) = told["host"]
    assert (slots, first_bytes) == (last_slots, 2 * last_bytes)
    _, gpu, host, nothing = (list(each.values()) for each in told["rounds"])
    assert host == gpu
    assert nothing != gpu, "loads that bring nothing in one stage were not noticed"
    assert told["sources"]["host"] >= sum((len(prompt) - 1) // BLOCK_TOKENS for prompt in prompts)
    assert told["free"] == told["blocks"] - 1


@pytest.mark.timeout(400)
def test_stages_that_are_crowded_answer_all(tmp_path: Path):
    """Many at once, with preemption and aborts: in batches tokens may differ, but none is stuck."""
    model = tiny_models.build("llama", head_dim=128, hidden_size=512)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    dice = random.Random(6)
    prompts = [[dice.randrange(3, 320) for _ in range(dice.randrange(150, 330))] for _ in range(16)]
    crowd = {**ENGINE, "max_num_seqs": 6, "num_gpu_blocks_override": 34}
    rounds: list[dict[str, Any]] = [
        {"requests": [{**each, "abort": 12} for each in named("left", prompts[:4])]},
        {"requests": named("crowd", prompts)},
        {"requests": named("again", prompts), "reset": True},
    ]
    ours = connector(host_bytes="256MiB")
    engine = engine_options(tmp_path / "model", kv_transfer_config=ours, **crowd)
    told = served(tmp_path, rounds, engine, timeout_s=380)
    for each in told["rounds"][1:]:
        assert {len(said) for said in each.values()} == {60}
    assert told["sources"]["host"] > 0
    assert told["failed_loads"] == 0
    assert told["free"] == told["blocks"] - 1


def named(round_: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """The requests of a round."""
    return [asked(f"{round_}-{place}", prompt, 60) for place, prompt in enumerate(prompts)]
