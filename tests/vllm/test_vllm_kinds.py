"""Kinds of KV beside that of a plain decoder in vLLM's own engine on a CPU: greedy tokens over KV
from host memory are those that it gives without a connector.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

import tiny_models
from vllm_programs import asked, connector, engine_options, served

BLOCK_TOKENS = 32
LENGTHS = (33, 100, 200, 320, 260)
# One running at a time: the others queue, and their KV is prefetched.
ENGINE = {"max_num_seqs": 1, "num_gpu_blocks_override": 64}
LATENTS = {"block_size": 16, "num_gpu_blocks_override": 128}
LATENT_BYTES = 16 * (512 + 64) * 4
"""Of a block in a layer, in float32."""


def prompts() -> list[dict[str, Any]]:
    dice = random.Random(6)
    return [
        asked(f"{place}", [dice.randrange(3, 320) for _ in range(length)], 24)
        for place, length in enumerate(LENGTHS)
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_quantized_kv_gives_the_same_tokens_from_host_memory(
    tiny_llama: Path, tmp_path: Path, dtype: str
):
    wanted = prompts()
    quantized = engine_options(tiny_llama, kv_cache_dtype=dtype, **ENGINE)
    alone = served(tmp_path, [{"requests": wanted}], quantized)
    rounds = [
        {"requests": wanted},
        {"requests": wanted, "reset": True},
        {"requests": wanted, "reset": True, "swap": True},
    ]
    ours = served(tmp_path, rounds, {**quantized, "kv_transfer_config": connector()})
    computed, in_host, swapped = ours["rounds"]
    assert computed == in_host == alone["rounds"][0]
    wrong = [name for name in computed if swapped[name] != computed[name]]
    assert len(wrong) > 1, "blocks that lie in each other's places were not noticed"
    assert ours["sources"]["host"] >= 2 * sum((length - 1) // BLOCK_TOKENS for length in LENGTHS)
    assert ours["prefetched"]["used"] > 0
    # Of a byte each: keys and values of 3 layers with 2 heads of 32 numbers.
    assert ours["block_bytes"] == BLOCK_TOKENS * 2 * 3 * 2 * 32
    assert ours["free"] == ours["blocks"] - 1


@pytest.fixture(scope="session")
def tiny_deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved DeepSeek with random weights, of latents, and of experts behind its first layer."""
    folder = tmp_path_factory.mktemp("deepseek")
    tiny_models.build("deepseek_v3", **tiny_models.latent(512)).save_pretrained(folder)
    return folder


@pytest.mark.timeout(600)
def test_latents_give_the_same_tokens_from_host_memory(tiny_deepseek: Path, tmp_path: Path):
    """Multi-head latent attention, of blocks that are not cut into keys and values or heads."""
    wanted = prompts()
    engine = engine_options(tiny_deepseek, **{**ENGINE, **LATENTS})
    alone = served(tmp_path, [{"requests": wanted}], engine)["rounds"][0]
    rounds = [
        {"requests": wanted},
        {"requests": wanted, "reset": True},
        {"requests": wanted, "reset": True, "swap": True},
        {"requests": wanted, "reset": True, "bring_nothing": True},
    ]
    engine["kv_transfer_config"] = connector(min_load_tokens=0)
    ours = served(tmp_path, rounds, engine)
    computed, in_host, *mutants = ours["rounds"]
    assert computed == in_host == alone
    for mutant in mutants:
        wrong = [name for name in alone if mutant[name] != alone[name]]
        assert len(wrong) > 2, "blocks of others, or none, were not noticed"
    whole = sum(length // LATENTS["block_size"] for length in LENGTHS)
    assert ours["sources"]["host"] == 3 * whole
    assert ours["prefetched"]["used"] > 0
    assert ours["block_bytes"] == LATENT_BYTES * 3
    assert ours["free"] == ours["blocks"] - 1


@pytest.mark.timeout(900)
def test_workers_of_one_stage_have_the_same_latents_each_for_itself(
    tiny_deepseek: Path, tmp_path: Path
):
    """Tensor and pipeline parallelism: heads are divided, and latents are not."""
    four = {**LATENTS, "pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    wanted = [{**each, "answer": 10} for each in prompts()[2:]]
    rounds = [
        {"requests": wanted},
        {"requests": wanted, "reset": True},
        {"requests": wanted, "reset": True, "bring_nothing_at": 3},
    ]
    engine = engine_options(tiny_deepseek, **{**ENGINE, **four})
    engine["kv_transfer_config"] = connector()
    ours = served(tmp_path, rounds, engine, timeout_s=600)
    computed, in_host, broken = ours["rounds"]
    assert in_host == computed
    assert broken != computed, "a worker whose loads bring nothing was not noticed"
    whole = sum(length // LATENTS["block_size"] for length in LENGTHS[2:])
    assert ours["sources"]["host"] == 2 * whole
    assert [size for _, size in ours["host"]] == [LATENT_BYTES * layers for layers in (2, 2, 1, 1)]
    assert ours["free"] == ours["blocks"] - 1


@pytest.mark.timeout(600)
def test_a_lora_finds_its_own_kv_and_nobody_elses(tiny_llama: Path, tmp_path: Path):
    """One prompt for two of them and for none, in turns."""
    model = tiny_models.build("llama", head_dim=32)
    loras: list[tuple[str, int, str] | None] = [None]
    for number, name in enumerate(("a", "b"), start=1):
        tiny_models.save_lora(model, tmp_path / name, seed=number)
        loras.append((name, number, str(tmp_path / name)))
    wanted = [
        asked(f"{name}-{place}", each["prompt"], 24, lora=lora)
        for place, each in enumerate(prompts())
        for name, lora in zip(("none", "a", "b"), loras, strict=True)
    ]
    engine = engine_options(tiny_llama, enable_lora=True, max_lora_rank=8, max_loras=2, **ENGINE)
    alone = served(tmp_path, [{"requests": wanted}], engine)["rounds"][0]
    rounds = [
        {"requests": wanted},
        {"requests": wanted, "reset": True},
        {"requests": wanted, "reset": True, "swap": True},
    ]
    # Blocks of all of them are more than the pool has.
    ours = served(tmp_path, rounds, {**engine, "kv_transfer_config": connector()})
    computed, in_host, swapped = ours["rounds"]
    assert computed == in_host == alone
    for place in range(len(LENGTHS)):
        said = [alone[f"{name}-{place}"] for name in ("none", "a", "b")]
        assert said[0] != said[1] != said[2] != said[0], "LoRAs that say the same show nothing"
    wrong = [name for name in alone if swapped[name] != alone[name]]
    assert len(wrong) > len(alone) // 2, "blocks that lie in each other's places were not noticed"
    assert ours["sources"]["host"] >= 2 * 3 * sum(
        (length - 1) // BLOCK_TOKENS for length in LENGTHS
    )
    assert ours["prefetched"]["used"] > 0
    assert ours["free"] == ours["blocks"] - 1
