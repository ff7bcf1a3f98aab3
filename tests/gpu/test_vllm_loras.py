"""vLLM on one GPU with LoRA: tokens over KV from host memory are those over KV on the GPU, for each
LoRA its own.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from vllm_hits import BLOCK_TOKENS, POSITIONS, RUNNERS, differing, hits, prompts
from vllm_programs import asked

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

SHAPE = {"hidden_size": 512, "head_dim": 128, "max_position_embeddings": POSITIONS}
LENGTHS = (17, 255, 256, 700)
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


def save_model(folder: Path) -> dict[str, tuple[str, int, str] | None]:
    """A model in `folder`/model and two LoRAs for it: how to ask for none and for each of them."""
    model: Any = tiny_models.build("llama", **SHAPE)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    for number, name in enumerate(("a", "b"), start=1):
        tiny_models.save_lora(model, folder / name, seed=number)
    return {
        "none": None,
        "a": ("a", 1, str(folder / "a")),
        "b": ("b", 2, str(folder / "b")),
    }


@pytest.mark.timeout(200)
@pytest.mark.parametrize("runner", RUNNERS.values(), ids=RUNNERS.keys())
def test_tokens_over_host_memory_are_those_over_the_gpu(tmp_path: Path, runner: str):
    """Each prompt for none and for both, in turns."""
    loras = save_model(tmp_path)
    wanted = [
        asked(f"{name}-{place}", prompt, 32, lora=lora)
        for place, prompt in enumerate(prompts(LENGTHS, seed=6, vocabulary=tiny_models.VOCAB))
        for name, lora in loras.items()
    ]
    found = hits(tmp_path, wanted, runner, {"swap": True}, **LORA)
    for place in range(len(LENGTHS)):
        said = {tuple(found.in_host[f"{name}-{place}"]) for name in loras}
        assert len(said) == len(loras), "LoRAs that say the same show nothing"
    assert differing(found) > len(loras), "blocks that lie in each other's places were not noticed"
    whole = sum((length - 1) // BLOCK_TOKENS for length in LENGTHS)
    assert found.told["sources"]["host"] >= len(loras) * whole
