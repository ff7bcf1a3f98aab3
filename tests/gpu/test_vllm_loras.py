"""vLLM on one GPU with LoRA: tokens over KV from host memory are those over KV on the GPU, for each
LoRA its own.
"""

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

SHAPE = {"hidden_size": 512, "head_dim": 128, "max_position_embeddings": 4096}
NAMES = ("none", "a", "b")
LENGTHS = (17, 255, 256, 700)
ANSWER = 32
# One at a time: then a hit runs the same kernels over the same shapes, wherever its KV was.
ENGINE = {
    "dtype": "bfloat16",
    "block_size": 16,
    "max_num_seqs": 1,
    "num_gpu_blocks_override": 500,
    "max_model_len": 4096,
    "max_num_batched_tokens": 1024,
    "enable_lora": True,
    "max_lora_rank": 8,
    "max_loras": 2,
    "gpu_memory_utilization": 0.2,
    # So that vLLM does not measure what is free, which others may change meanwhile.
    "kv_cache_memory_bytes": 256 << 20,
}


def saved(folder: Path) -> list[tuple[str, int, str] | None]:
    """A model and two LoRAs for it, and how to ask for none and for each of them."""
    model: Any = tiny_models.build("llama", **SHAPE)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    for number, name in enumerate(NAMES[1:], start=1):
        tiny_models.save_lora(model, folder / name, seed=number)
    return [None, *((name, number, str(folder / name)) for number, name in ((1, "a"), (2, "b")))]


def round_of(name: str, loras: list[tuple[str, int, str] | None], **before: bool) -> dict[str, Any]:
    """All prompts, once for each LoRA and once for none, in turns."""
    dice = random.Random(6)
    prompts = [[dice.randrange(3, 320) for _ in range(length)] for length in LENGTHS]
    requests = [
        asked(f"{name} {lora and lora[0]} {at}", prompt, ANSWER, lora=lora)
        for at, prompt in enumerate(prompts)
        for lora in loras
    ]
    return {"requests": requests, **before}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("runner", ["0", "1"])
def test_tokens_over_host_memory_are_those_over_the_gpu(tmp_path: Path, runner: str):
    """Under vLLM's first or second model runner."""
    loras = saved(tmp_path)
    rounds = [
        round_of("cold", loras),
        round_of("gpu", loras),
        round_of("host", loras, reset=True),
        round_of("swapped", loras, reset=True, swap=True),
    ]
    told = served(
        tmp_path,
        rounds,
        engine_options(
            tmp_path / "model",
            kv_transfer_config=connector(host_bytes="256MiB", min_load_tokens=0),
            **ENGINE,
        ),
        timeout_s=170,
        environment={"VLLM_USE_V2_MODEL_RUNNER": runner},
    )
    _, gpu, host, swapped = (list(each.values()) for each in told["rounds"])
    assert [len(answer) for answer in gpu] == [ANSWER] * len(LENGTHS) * len(NAMES)
    assert gpu == host
    for at in range(0, len(gpu), len(NAMES)):
        assert len({tuple(answer) for answer in gpu[at : at + len(NAMES)]}) == len(NAMES)
    assert sum(one != other for one, other in zip(gpu, swapped, strict=True)) > len(NAMES)
    assert told["sources"]["host"] >= len(NAMES) * sum(length // 16 - 1 for length in LENGTHS)
    assert told["free"] == told["blocks"] - 1
