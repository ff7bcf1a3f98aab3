"""Models of real shapes, in bf16, over pools that always evict, before the judges of the tiny ones.

Their weights are random: what is judged is that KV does not depend on where it has been.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from divergence import divergence_of_a_swapped_block, mean_divergence
from oracle import (
    BLOCK_TOKENS,
    HOST_MODES,
    Conversations,
    Rig,
    replay_difference,
    something_to_look_at,
    tiny_settings,
)

from forebay.core.modes import Mode
from forebay.engine.models import LoadedModel, adopt_model

LARGEST_DIVERGENCE = 0.003
GIB = 1 << 30
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
SMOLLM2_135M: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    # Narrow, so that with 0.02 attention would hardly matter.
    "initializer_range": 0.06,
}


@pytest.fixture(scope="module", params=[SMOLLM2_135M, LLAMA_8B], ids=["SmolLM2 135M", "Llama 8B"])
def large(request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    torch.manual_seed(7)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**request.param), dtype=torch.bfloat16
        )
    yield adopt_model(model, name="a model of that shape")
    torch.cuda.empty_cache()


def test_a_swapped_block_would_be_noticed(large: LoadedModel) -> None:
    assert divergence_of_a_swapped_block(large, BLOCK_TOKENS) > LARGEST_DIVERGENCE


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", [Mode.RECOMPUTE, *HOST_MODES])
def test_tokens_do_not_depend_on_where_kv_has_been(large: LoadedModel, mode: Mode) -> None:
    settings = tiny_settings(mode=mode, device_tokens=17 * BLOCK_TOKENS, host_bytes=GIB // 4)
    with Rig(large, settings, seed=1) as rig:
        talk = Conversations(
            rig, users=5, turns=2, vocab=large.vocab_size, seed=1, abort_every=31, preempt_every=14
        )
        answered = talk.play()
        rig.settle()
        assert replay_difference(large, rig.recorder, BLOCK_TOKENS) is None
        far = mean_divergence(large, rig.recorder, answered)
        print(f"mean divergence {far:.2e} over {len(answered) * talk.answer_tokens} tokens")
        assert far <= LARGEST_DIVERGENCE
        something_to_look_at(rig)
