"""Tiny random decoders of many families, and what plain `generate` says about them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import byte_tokens
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models

from forebay.engine.attention import PAGED
from forebay.engine.models import LoadedModel, adopt_model, load_model

VOCAB = 320
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    # Far from 0.02, so that greedy tokens vary and their logits are well apart.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GQA = {"num_key_value_heads": 2, "intermediate_size": 96}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _GQA,
    "qwen3": {**_GQA, "head_dim": 16},
    "gpt_neox": {"intermediate_size": 96, "rotary_pct": 0.5},
    "gpt2": {},
    "mixtral": {**_GQA, "num_local_experts": 4},
    "qwen3_moe": {**_GQA, **_EXPERTS, "num_experts": 4, "head_dim": 16},
    "deepseek_v3": {
        **_EXPERTS,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
    },
}


def build(family: str, **overrides: Any) -> transformers.PreTrainedModel:
    """A decoder with random weights, the same ones every time."""
    settings = {**_COMMON, **FAMILIES.get(family, _GQA), **overrides}
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(family, **settings)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@cache
def _loaded(family: str) -> LoadedModel:
    return adopt_model(build(family), name=f"tiny {family}")


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], LoadedModel]:
    """`tiny_model(family)`: the loaded decoder of one of FAMILIES, made once."""
    return _loaded


@pytest.fixture(scope="session")
def build_model() -> Callable[..., transformers.PreTrainedModel]:
    """`build_model(family, **config)`: a random decoder of any family, not yet loaded."""
    return build


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    return load_model("smollm2")


@pytest.fixture(scope="session")
def plain_generate() -> Callable[[LoadedModel, Sequence[int], int], list[int]]:
    """`plain_generate(loaded, prompt, count)`: greedy tokens of `generate` over sdpa, no EOS."""
    return generate


def generate(loaded: LoadedModel, prompt: Sequence[int], count: int) -> list[int]:
    model: Any = loaded.model
    ends = model.generation_config.eos_token_id
    model.set_attn_implementation("sdpa")
    # `min_new_tokens` would change which tokens are chosen.
    model.generation_config.eos_token_id = None
    try:
        ids = torch.tensor([list(prompt)])
        mask = torch.ones_like(ids)
        result = model.generate(
            ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return result[0, len(prompt) :].tolist()
    finally:
        model.generation_config.eos_token_id = ends
        model.set_attn_implementation(PAGED)


@pytest.fixture
def random_prompts() -> Callable[..., list[np.ndarray]]:
    def prompts(lengths: Sequence[int], vocab: int = VOCAB, seed: int = 0) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [rng.integers(3, vocab, length, dtype=np.int64) for length in lengths]

    return prompts


@pytest.fixture(scope="session")
def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a byte, and an end token; fits the tiny models."""
    return byte_tokens.byte_tokenizer()


@pytest.fixture(scope="session")
def piece_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Word pieces with a mark for the space, and bytes for what has no piece, as Llama 2 has."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["\u2581", "\u2581hello", "\u2581world", "hello", "world", "!", "s"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Such small steps are quicker on one thread, and the link's threads get the other core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
