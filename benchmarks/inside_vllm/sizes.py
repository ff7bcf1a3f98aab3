"""How large everything is: on one GPU, and in a rehearsal on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30
MOST_DIVERGENCE = 0.003
"""Mean divergence per token, in nats, of answers over KV from host memory from those over KV that
stayed on the GPU. One wrong block has to exceed it, or it says nothing."""

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
"""The shape of Llama 3.1 8B."""

TINY: dict[str, Any] = {
    **LLAMA_3_8B,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large everything is. Lengths are in tokens."""

    model: Mapping[str, Any]
    weights_std: float
    dtype: str
    block_tokens: int
    host_bytes: int
    small_host_bytes: int
    step_tokens: int
    max_model_len: int
    gpu: bool

    blocks: int
    all_resident_blocks: int
    small_blocks: int
    most_running: int
    small_most_running: int

    solo_lengths: tuple[int, ...]
    hint_lead_s: float
    users: int
    turns: int
    context: int
    question: int
    no_hit_requests: int
    no_hit_prompt: int
    no_hit_answer: int
    itl_running: int
    itl_answer: int
    itl_arrivals: int
    itl_prompt: int
    itl_gap_s: float
    thrash_requests: int
    thrash_prompt: int
    thrash_answer: int
    convoy_requests: int
    convoy_prefix: int
    convoy_suffix: int
    accuracy_prompts: int
    accuracy_lengths: tuple[int, ...]
    accuracy_answer: int

    @property
    def token_bytes(self) -> int:
        """KV of one token in all layers."""
        width = {"bfloat16": 2, "float32": 4}[self.dtype]
        shape = self.model
        per_layer = 2 * shape["num_key_value_heads"] * shape["head_dim"] * width
        return shape["num_hidden_layers"] * per_layer


# Of each field: on one GPU, in a rehearsal.
_BOTH: dict[str, tuple[Any, Any]] = {
    "model": (LLAMA_3_8B, TINY),
    "weights_std": (0.02, 0.3),
    "dtype": ("bfloat16", "float32"),
    "block_tokens": (16, 32),
    "host_bytes": (48 * GIB, 64 << 20),
    # A power of two: PyTorch takes no more for it, so that two arms fit side by side.
    "small_host_bytes": (32 * GIB, 64 << 20),
    "step_tokens": (8192, 256),
    "max_model_len": (36_864, 768),
    "gpu": (True, False),
    "blocks": (10_000, 80),
    "all_resident_blocks": (20_000, 400),
    "small_blocks": (3_000, 60),
    "most_running": (8, 4),
    "small_most_running": (64, 16),
    "solo_lengths": ((16_384, 32_768), (256, 512)),
    "hint_lead_s": (0.1, 0.1),
    "users": (24, 6),
    "turns": (3, 3),
    "context": (12_288, 256),
    "question": (256, 32),
    "no_hit_requests": (24, 6),
    "no_hit_prompt": (4_096, 128),
    "no_hit_answer": (64, 4),
    "itl_running": (4, 2),
    "itl_answer": (480, 400),
    "itl_arrivals": (12, 3),
    "itl_prompt": (8_192, 256),
    "itl_gap_s": (0.1, 0.05),
    "thrash_requests": (30, 20),
    "thrash_prompt": (8_000, 480),
    "thrash_answer": (64, 4),
    "convoy_requests": (50, 8),
    "convoy_prefix": (10_240, 320),
    "convoy_suffix": (128, 32),
    "accuracy_prompts": (3, 2),
    "accuracy_lengths": ((200, 500, 1_000, 2_000), (100, 250)),
    "accuracy_answer": (6, 4),
}

FULL = Sizes(**{name: both[0] for name, both in _BOTH.items()})
REHEARSAL = Sizes(**{name: both[1] for name, both in _BOTH.items()})
