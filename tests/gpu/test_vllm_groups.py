"""vLLM on one GPU with layers that look back through a window: tokens over KV from host memory are
those over KV on the GPU.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from vllm_hits import POSITIONS, RUNNERS, differing, hits, plain, prompts

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
LENGTHS = (300, 700, 1200, 2000, 2500)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("runner", RUNNERS.values(), ids=RUNNERS.keys())
@pytest.mark.parametrize("family", list(FAMILIES))
def test_tokens_over_host_memory_are_those_over_the_gpu(tmp_path: Path, family: str, runner: str):
    sizes = {"hidden_size": 512, "sliding_window": WINDOW, "max_position_embeddings": POSITIONS}
    model: Any = tiny_models.build(family, **sizes, **FAMILIES[family])
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    wanted = plain(prompts(LENGTHS, seed=3, vocabulary=tiny_models.VOCAB), 40)
    found = hits(tmp_path, wanted, runner, {"bring_nothing": True})
    assert differing(found) > 2, "loads that bring nothing were not noticed"
    assert found.told["sources"]["host"] > 50
