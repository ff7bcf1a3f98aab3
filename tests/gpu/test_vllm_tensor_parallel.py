"""vLLM over two GPUs with the connector: KV from host memory gives the tokens of KV on the GPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)
if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

PROGRAM = Path(__file__).resolve().parents[1] / "vllm" / "vllm_run.py"
BLOCK_TOKENS = 32
# One at a time: then a hit runs the same kernels over the same shapes, wherever its KV was.
ENGINE = {
    "tensor_parallel_size": 2,
    "block_size": BLOCK_TOKENS,
    "max_num_seqs": 1,
    "num_gpu_blocks_override": 300,
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "gpu_memory_utilization": 0.2,
    "disable_custom_all_reduce": True,
}
CONNECTOR = {
    "kv_connector": "ForebayConnector",
    "kv_connector_module_path": "forebay.vllm.connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"host_bytes": "256MiB"},
}


@pytest.mark.timeout(400)
def test_tokens_with_kv_from_host_memory_are_those_with_kv_on_two_gpus(tmp_path: Path):
    model = tiny_models.build("llama", head_dim=128, hidden_size=512)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    dice = random.Random(5)
    asked = [[dice.randrange(3, 320) for _ in range(dice.randrange(200, 400))] for _ in range(8)]
    rounds: list[dict[str, Any]] = [
        {"requests": named("cold", asked)},
        {"requests": named("gpu", asked)},
        {"requests": named("host", asked), "reset": True},
        {"requests": named("nothing", asked), "reset": True, "bring_nothing": True},
    ]
    plan = tmp_path / "plan.json"
    plan.write_text(
        json.dumps(
            {
                "rounds": rounds,
                "engine": ENGINE,
                "connector": CONNECTOR,
                "apart": False,
                "dtype": "bfloat16",
            }
        )
    )
    result = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, PROGRAM, tmp_path / "model", plan, result],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    told = json.loads(result.read_text())
    _, gpu, host, nothing = (list(each.values()) for each in told["rounds"])
    assert host == gpu
    assert nothing != gpu, "loads that bring nothing were not noticed"
    assert told["sources"]["host"] >= sum((len(prompt) - 1) // BLOCK_TOKENS for prompt in asked)
    assert told["free"] == told["blocks"] - 1


def named(round_: str, asked: list[list[int]]) -> list[dict[str, Any]]:
    """The requests of a round."""
    return [
        {"name": f"{round_}-{place}", "prompt": prompt, "answer": 20, "abort": None}
        for place, prompt in enumerate(asked)
    ]
