"""Multi-head latent attention on a CPU, behind a prefix that is there already.

vLLM's own (`CPU_MLA`, of 0.32) begins at a prompt's first token only: it has no kernel that brings
the latents of a prefix together, and switches prefix caching off for it.
"""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path
from typing import Any

import torch


def is_latent(model: str) -> bool:
    """Whether the model saved in that folder attends to latents."""
    return "kv_lora_rank" in json.loads((Path(model) / "config.json").read_text())


def begin_behind_prefixes() -> None:
    """Let vLLM's CPU_MLA do so from now on, in this process and those that it forks."""
    platform: Any = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    backend: Any = importlib.import_module("vllm.v1.attention.backends.mla.cpu_mla")
    kept = _as_asked(platform.check_and_update_config)
    platform.check_and_update_config = staticmethod(kept)
    backend.CPUMLAImpl.forward_mha = _attend


def _as_asked(check: Any) -> Any:
    """`check` of a configuration, which leaves prefix caching and the size of steps as they are."""

    @functools.wraps(check)
    def kept(config: Any) -> None:
        cache, scheduler = config.cache_config, config.scheduler_config
        caching, chunked = cache.enable_prefix_caching, scheduler.enable_chunked_prefill
        tokens = scheduler.max_num_batched_tokens
        check(config)
        cache.enable_prefix_caching, scheduler.enable_chunked_prefill = caching, chunked
        scheduler.max_num_batched_tokens = tokens

    return kept


def _attend(
    self: Any,
    q: torch.Tensor,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    attn_metadata: Any,
    k_scale: torch.Tensor,
    output: torch.Tensor,
    output_scale: torch.Tensor | None = None,
) -> None:
    """Of each prompt, the new tokens' attention to all of it, whose latents are in `kv_cache`."""
    prefill = attn_metadata.prefill
    ends = prefill.query_start_loc.tolist()
    context = prefill.chunked_context
    before = context.context_lens_list if context is not None else [0] * (len(ends) - 1)
    sizes = [self.qk_nope_head_dim, self.v_head_dim]
    for place, there in enumerate(before):
        first, end = ends[place], ends[place + 1]
        length = there + end - first
        blocks = prefill.block_table[place, : -(-length // kv_cache.shape[1])]
        rows = kv_cache[blocks].flatten(0, 1)[:length]
        latents, rope = rows.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        kv = self.kv_b_proj(latents.contiguous())[0].view(length, self.num_heads, sum(sizes))
        k_nope, v = kv.split(sizes, dim=-1)
        k = torch.cat([k_nope, rope[:, None].expand(-1, self.num_heads, -1)], dim=-1)
        seen = torch.ones(end - first, length, dtype=torch.bool).tril(there)
        q_, k_, v_ = (each.transpose(0, 1) for each in (q[first:end], k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(
            q_, k_, v_, attn_mask=seen, scale=self.scale
        )
        output[first:end] = attended.transpose(0, 1).flatten(1)
