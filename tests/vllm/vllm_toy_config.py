"""What a toy engine tells vLLM of its workers: the configuration of each, and its KV cache."""

from __future__ import annotations

import copy
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)

BLOCK_TOKENS = 16
BLOCK_BYTES = 8 * BLOCK_TOKENS
"""Of one layer."""


def name_of(layer: int) -> str:
    """The name of a layer."""
    return f"layer {layer}"


def layers_of(config: Any) -> list[int]:
    """Those of the stage of a rank."""
    return list(range(*config.model_config.get_layers_start_end_indices(config.parallel_config)))


def plan_of(blocks: int, layers: list[int]) -> KVCacheConfig:
    """The KV cache of a worker, as this version of vLLM describes it."""
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    names, size = [name_of(layer) for layer in layers], blocks * BLOCK_BYTES
    if "layers" in KVCacheTensor.__dataclass_fields__:
        stride = {"layer_stride": size, "block_stride": BLOCK_BYTES}
        tensors = [KVCacheTensor(size=size * len(names), layers=names, **stride)]
    else:
        tensors = [KVCacheTensor(size=size, shared_by=[each]) for each in names]
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
    )


def of_rank(config: Any, rank: int, late_bytes_per_s: float) -> Any:
    """`config` as the worker of this rank has it."""
    own = copy.copy(config)
    own.parallel_config = copy.copy(config.parallel_config)
    own.parallel_config.rank = rank
    if rank and late_bytes_per_s:
        own.kv_transfer_config = copy.copy(config.kv_transfer_config)
        extra = own.kv_transfer_config.kv_connector_extra_config
        own.kv_transfer_config.kv_connector_extra_config = {
            **extra,
            "copy_bytes_per_s": late_bytes_per_s,
        }
    return own
