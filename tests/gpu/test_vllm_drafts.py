"""vLLM on one GPU with speculative decoding: over KV from host memory as many drafts are right, and
tokens are the same, as over KV on the GPU.
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from guessing import Guess, by_a_model, by_eagle, by_mtp, by_ngrams
from vllm_programs import asked, connector, engine_options, served

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

VOCAB = 16
"""With few tokens some guesses are right, whoever guesses."""
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
LENGTHS = (17, 255, 256, 700)
ANSWER = 48
# One at a time: then a hit runs the same kernels over the same shapes, wherever its KV was.
ENGINE = {
    "dtype": "bfloat16",
    "block_size": 16,
    "max_num_seqs": 1,
    "num_gpu_blocks_override": 500,
    "max_model_len": 4096,
    "max_num_batched_tokens": 1024,
    "gpu_memory_utilization": 0.2,
    # So that vLLM does not measure what is free, which others may change meanwhile.
    "kv_cache_memory_bytes": 256 << 20,
}


def round_of(name: str, **before: bool) -> dict[str, Any]:
    """All prompts, once."""
    dice = random.Random(5)
    prompts = [[dice.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    return {
        "requests": [asked(f"{name} {at}", each, ANSWER) for at, each in enumerate(prompts)],
        **before,
    }


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("guess", "runner"), [(by_eagle, "1"), (by_a_model, "0"), (by_mtp, "0"), (by_ngrams, "0")]
)
def test_drafts_and_tokens_over_host_memory_are_those_over_the_gpu(
    tmp_path: Path, guess: Guess, runner: str
):
    """Under vLLM's first or second model runner, and as it schedules by default."""
    drafts = {**guess(tmp_path, torch.bfloat16, **SHAPE), "num_speculative_tokens": 3}
    rounds = [
        round_of("cold"),
        round_of("gpu"),
        round_of("host", reset=True),
        round_of("swapped", reset=True, swap=True),
    ]
    told = served(
        tmp_path,
        rounds,
        engine_options(
            tmp_path / "model",
            kv_transfer_config=connector(host_bytes="256MiB", min_load_tokens=0),
            speculative_config=drafts,
            **ENGINE,
        ),
        timeout_s=170,
        environment={"VLLM_USE_V2_MODEL_RUNNER": runner},
    )
    _, gpu, host, swapped = (list(each.values()) for each in told["rounds"])
    assert [len(answer) for answer in gpu] == [ANSWER] * len(LENGTHS)
    assert gpu == host
    _, over_gpu, over_host, _ = told["drafts"]
    assert over_gpu == over_host
    assert over_gpu[0] > over_gpu[1] > 0
    assert told["sources"]["host"] >= sum(length // 16 - 2 for length in LENGTHS)
    assert told["free"] == told["blocks"] - 1
    assert sum(one != other for one, other in zip(gpu, swapped, strict=True)) > 1
