"""Tiny decoders of many families, with random weights that are the same every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
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
    "gemma3_text": {
        **_GQA,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 100,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        # Else the last token decides alone, more often than not, what comes next.
        "tie_word_embeddings": False,
    },
    # With attention sinks.
    "gpt_oss": {
        **_GQA,
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 100,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
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


def latent(positions: int) -> dict[str, Any]:
    """What makes of a "deepseek_v3" one with the latents of the real ones, and experts and
    positions of the sizes that vLLM's kernels are known to take.
    """
    return {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "n_routed_experts": 16,
        "n_group": 8,
        "topk_group": 2,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "max_position_embeddings": positions,
        # With none vLLM 0.32 turns queries wrongly on a CPU: its kernel asks for them in one piece.
        "rope_scaling": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": positions // 8,
        },
    }


def build(family: str, **overrides: Any) -> transformers.PreTrainedModel:
    """A decoder with random weights, the same ones every time."""
    settings = {**_COMMON, **FAMILIES.get(family, _GQA), **overrides}
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(family, **settings)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def save_eagle(folder: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> None:
    """One layer that guesses the tokens of a Llama from what that has in its last one, as EAGLE's
    weights are saved.
    """
    model: Any = build("llama", num_hidden_layers=1, **overrides)
    model.to(dtype).save_pretrained(folder)
    layer = {
        name.removeprefix("model."): weight
        for name, weight in model.state_dict().items()
        if ".layers." in name and "input_layernorm" not in name
    }
    size = model.config.hidden_size
    layer["fc.weight"] = some_weights(size, 2 * size).to(dtype)
    safetensors.torch.save_file(layer, folder / "model.safetensors")


def save_eagle3(folder: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> None:
    """The same from what it has in three of its layers, as EAGLE-3's weights are saved."""
    model: Any = build("llama", num_hidden_layers=1, **overrides)
    model.to(dtype).save_pretrained(folder)
    layer = {
        name.removeprefix("model.").replace("layers.0", "midlayer"): weight
        for name, weight in model.state_dict().items()
        if "embed_tokens" not in name
    }
    size = model.config.hidden_size
    layer["midlayer.hidden_norm.weight"] = torch.ones(size, dtype=dtype)
    layer["fc.weight"] = some_weights(size, 3 * size).to(dtype)
    for name in ("q_proj", "k_proj", "v_proj"):
        # They read the token's embedding too.
        at = f"midlayer.self_attn.{name}.weight"
        layer[at] = some_weights(len(layer[at]), 2 * size).to(dtype)
    safetensors.torch.save_file(layer, folder / "model.safetensors")


def save_with_mtp(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    *,
    family: str = "glm4_moe",
    **overrides: Any,
) -> None:
    """A decoder of experts whose last layer guesses tokens, as its weights are saved."""
    experts = {**_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}
    model: Any = build(family, **experts | overrides)
    model.to(dtype).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    told = {"num_hidden_layers": last, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | told))
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    size = model.config.hidden_size
    more = {name: torch.ones(size, dtype=dtype) for name in ("enorm", "hnorm", "shared_head.norm")}
    more["eh_proj"] = some_weights(size, 2 * size).to(dtype)
    more["embed_tokens"] = weights["model.embed_tokens.weight"].clone()
    more["shared_head.head"] = weights["lm_head.weight"].clone()
    weights |= {f"model.layers.{last}.{name}.weight": each for name, each in more.items()}
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})


def some_weights(*shape: int) -> torch.Tensor:
    """Weights as random as those of a decoder here, the same every time."""
    dice = torch.Generator().manual_seed(8)
    return _COMMON["initializer_range"] * torch.randn(*shape, generator=dice)


def save_lora(model: transformers.PreTrainedModel, folder: Path, seed: int) -> None:
    """A LoRA over the keys and values of `model`, as PEFT saves one."""
    rank, layers = 8, ("k_proj", "v_proj")
    dice = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.endswith(layers):
            down = torch.randn(rank, layer.in_features, generator=dice)
            up = torch.randn(layer.out_features, rank, generator=dice)
            weights[f"base_model.model.{name}.lora_A.weight"] = 0.1 * down
            weights[f"base_model.model.{name}.lora_B.weight"] = 0.3 * up
    folder.mkdir()
    safetensors.torch.save_file(weights, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": layers}
    (folder / "adapter_config.json").write_text(json.dumps({**told, "bias": "none"}))
