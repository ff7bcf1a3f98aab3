"""vLLM on one GPU with speculative decoding: over KV from host memory as many drafts are right, and
tokens are the same, as over KV on the GPU.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from guessing import Guess, by_a_model, by_eagle, by_mtp, by_ngrams
from vllm_hits import BLOCK_TOKENS, POSITIONS, RUNNERS, differing, hits, plain, prompts

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

VOCAB = 16
"""With few tokens some guesses are right, whoever guesses."""
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "head_dim": 128,
    "max_position_embeddings": POSITIONS,
}
LENGTHS = (17, 255, 256, 700)
GUESSES = [
    (by_eagle, "V2 runner"),
    (by_a_model, "V1 runner"),
    (by_mtp, "V1 runner"),
    (by_ngrams, "V1 runner"),
]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("guess", "runner"), GUESSES)
def test_drafts_and_tokens_over_host_memory_are_those_over_the_gpu(
    tmp_path: Path, guess: Guess, runner: str
):
    """As vLLM schedules by default."""
    drafts = {**guess(tmp_path, torch.bfloat16, **SHAPE), "num_speculative_tokens": 3}
    wanted = plain(prompts(LENGTHS, seed=5, vocabulary=VOCAB), 48)
    found = hits(tmp_path, wanted, RUNNERS[runner], {"swap": True}, speculative_config=drafts)
    _, over_gpu, over_host, _ = found.told["drafts"]
    assert over_gpu == over_host
    assert over_gpu[0] > over_gpu[1] > 0
    assert found.told["sources"]["host"] >= sum(each // BLOCK_TOKENS - 2 for each in LENGTHS)
    assert differing(found) > 1, "blocks that lie in each other's places were not noticed"
