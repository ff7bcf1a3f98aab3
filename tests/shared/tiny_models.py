"""Tiny decoders of many families, with random weights that are the same every time."""

from __future__ import annotations

from typing import Any

import torch
import transformers

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
