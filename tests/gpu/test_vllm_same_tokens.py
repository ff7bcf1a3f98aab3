"""vLLM in its batch-invariant mode, in which a request's tokens do not depend on what runs beside
it: with the connector they are the same bits wherever its KV was, and however it came from there.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import tiny_models
import torch
from vllm_programs import connector, engine_options, served
from vllm_ways import ENGINE, MOST_TOKENS, WAYS, not_gone, of_two_minds, rounds, unanswered, unlike

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

import vllm.envs

if "VLLM_BATCH_INVARIANT" not in vllm.envs.environment_variables:
    pytest.skip("this vLLM has no batch-invariant mode", allow_module_level=True)
if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("vLLM's batch-invariant mode is for GPUs of Hopper's kind", allow_module_level=True)

ENVIRONMENT = {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


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
        num_hidden_layers=4,
        max_position_embeddings=MOST_TOKENS,
        initializer_range=0.05,
    )
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    engine = engine_options(
        folder / "model",
        kv_transfer_config=connector(host_bytes="512MiB", min_load_tokens=0),
        dtype="bfloat16",
        block_size=16,
        # Fewer than all prompts have, so that some are preempted.
        num_gpu_blocks_override=140,
        gpu_memory_utilization=0.2,
        # So that vLLM does not measure what is free, which others may change meanwhile.
        kv_cache_memory_bytes=256 << 20,
        **ENGINE,
    )
    return served(folder, rounds(), engine, timeout_s=240, environment=ENVIRONMENT)


@pytest.mark.timeout(260)
def test_vllm_by_itself_gives_one_answer_to_nearly_every_prompt(told: dict[str, Any]):
    """Without which the others say nothing."""
    assert len(of_two_minds(told)) <= 1


@pytest.mark.timeout(260)
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_the_same_bits(told: dict[str, Any], way: str):
    assert unlike(told, way) == {}
    assert unanswered(told, way) == set()


@pytest.mark.timeout(260)
def test_all_ways_were_gone(told: dict[str, Any]):
    assert not_gone(told) == []
