"""vLLM on one GPU with layers that look back through a window: tokens over KV from host memory are
those over KV on the GPU.
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

WINDOW = 512
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "head_dim": 128,
        "query_pre_attn_scalar": 128,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "gpt_oss": {
        "head_dim": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
POSITIONS = 4096
LENGTHS = (300, 700, 1200, 2000, 2500)
ANSWER = 40
# One at a time: then a hit runs the same kernels over the same shapes, wherever its KV was.
ENGINE = {
    "dtype": "bfloat16",
    "block_size": 16,
    "max_num_seqs": 1,
    "num_gpu_blocks_override": 900,
    "max_model_len": POSITIONS,
    "max_num_batched_tokens": 1024,
    "gpu_memory_utilization": 0.2,
    # So that vLLM does not measure what is free, which others may change meanwhile.
    "kv_cache_memory_bytes": 256 << 20,
}


def round_of(name: str, **before: bool) -> dict[str, Any]:
    """All prompts, once."""
    dice = random.Random(3)
    prompts = [[dice.randrange(3, 320) for _ in range(length)] for length in LENGTHS]
    return {
        "requests": [asked(f"{name}-{at}", each, ANSWER) for at, each in enumerate(prompts)],
        **before,
    }


@pytest.mark.timeout(200)
@pytest.mark.parametrize("runner", ["0", "1"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_tokens_over_host_memory_are_those_over_the_gpu(tmp_path: Path, family: str, runner: str):
    """Under vLLM's first or second model runner."""
    sizes = {"hidden_size": 512, "sliding_window": WINDOW, "max_position_embeddings": POSITIONS}
    model: Any = tiny_models.build(family, **sizes, **FAMILIES[family])
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    rounds = [
        round_of("cold"),
        round_of("gpu"),
        round_of("host", reset=True),
        round_of("broken", reset=True, bring_nothing=True),
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
    _, gpu, host, broken = (list(each.values()) for each in told["rounds"])
    assert [len(answer) for answer in gpu] == [ANSWER] * len(LENGTHS)
    assert gpu == host
    assert sum(one != other for one, other in zip(gpu, broken, strict=True)) > 2
    assert told["sources"]["host"] > 50
    assert told["free"] == told["blocks"] - 1
