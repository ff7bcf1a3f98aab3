"""Models that see images in vLLM on one GPU: KV from host memory gives the tokens of KV on it."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
from tiny_sights import SIGHTS
from vllm_programs import connector, engine_options, served
from vllm_sights import prompts, whole_blocks

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

BLOCK_TOKENS = 16
# One at a time: then a hit runs the same kernels over the same shapes, wherever its KV was.
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_num_seqs": 1,
    "num_gpu_blocks_override": 400,
    "block_size": BLOCK_TOKENS,
    "gpu_memory_utilization": 0.2,
    # So that vLLM does not measure what is free, which others may change meanwhile.
    "kv_cache_memory_bytes": 256 << 20,
    "skip_tokenizer_init": False,
    "limit_mm_per_prompt": {"image": 2},
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", SIGHTS)
@pytest.mark.parametrize("runner", ["0", "1"], ids=["V1 runner", "V2 runner"])
def test_a_host_hit_over_images_gives_the_tokens_of_a_hit_on_the_gpu(
    tmp_path_factory: pytest.TempPathFactory, name: str, runner: str
):
    try:
        importlib.import_module(f"vllm.model_executor.models.{name}")
    except ImportError as error:
        # Of transformers and others it takes some versions alone.
        pytest.skip(f"this vLLM has no {name} here: {error}")
    sight, folder = SIGHTS[name], tmp_path_factory.mktemp("vllm")
    sight.save(folder / "model", 128)
    wanted = prompts(sight)
    rounds = [
        {"requests": wanted},
        {"requests": wanted},
        {"requests": wanted, "reset": True},
        {"requests": wanted, "reset": True, "swap": True},
    ]
    # Of what 0.26 has the role asks for nothing else.
    options = engine_options(
        folder / "model",
        kv_transfer_config=connector(host_bytes="256MiB", min_load_tokens=0),
        **ENGINE,
    )
    environment = {"VLLM_USE_V2_MODEL_RUNNER": runner}
    told = served(folder, rounds, options, timeout_s=170, environment=environment)
    _, on_gpu, in_host, swapped = told["rounds"]
    assert in_host == on_gpu
    for place in range(4):
        assert in_host[f"{place}-a"] != in_host[f"{place}-b"], "images that are not seen"
    wrong = [name for name in in_host if swapped[name] != in_host[name]]
    assert len(wrong) > len(wanted) // 2, "blocks that lie in each other's places were not noticed"
    assert told["sources"]["host"] > 0.8 * whole_blocks(sight, wanted, BLOCK_TOKENS)
    assert told["free"] == told["blocks"] - 1
