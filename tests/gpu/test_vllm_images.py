"""Models that see images in vLLM on one GPU: KV from host memory gives the tokens of KV on it."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest
from tiny_sights import SIGHTS
from vllm_hits import BLOCK_TOKENS, RUNNERS, differing, hits
from vllm_sights import prompts, whole_blocks

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

SEEING = {
    "skip_tokenizer_init": False,
    "limit_mm_per_prompt": {"image": 2},
    "max_model_len": 512,
    "max_num_batched_tokens": 128,
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", SIGHTS)
@pytest.mark.parametrize("runner", RUNNERS.values(), ids=RUNNERS.keys())
def test_a_host_hit_over_images_gives_the_tokens_of_a_hit_on_the_gpu(
    tmp_path: Path, name: str, runner: str
):
    """Of what 0.26 has the role `kv_both` asks for nothing else."""
    try:
        importlib.import_module(f"vllm.model_executor.models.{name}")
    except ImportError as error:
        # Of transformers and others it takes some versions alone.
        pytest.skip(f"this vLLM has no {name} here: {error}")
    sight = SIGHTS[name]
    sight.save(tmp_path / "model", 128)
    wanted = prompts(sight)
    found = hits(tmp_path, wanted, runner, {"swap": True}, **SEEING)
    for place in range(4):
        assert found.in_host[f"{place}-a"] != found.in_host[f"{place}-b"], "images are not seen"
    assert differing(found) > len(wanted) // 2, "blocks in each other's places were not noticed"
    assert found.told["sources"]["host"] > 0.8 * whole_blocks(sight, wanted, BLOCK_TOKENS)
