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
    SlidingWindowSpec,
)

BLOCK_TOKENS = 16
BLOCK_BYTES = 8 * BLOCK_TOKENS
"""Of one layer."""


def name_of(layer: int, group: int = 0) -> str:
    """The name of a layer, or of one of another group that lies where that does."""
    return f"layer {layer}" if not group else f"layer {layer} of {group}"


def layers_of(config: Any) -> list[int]:
    """Those of the stage of a rank."""
    return list(range(*config.model_config.get_layers_start_end_indices(config.parallel_config)))


def plan_of(blocks: int, layers: list[int], windows: tuple[int, ...] = (0,)) -> KVCacheConfig:
    """The KV cache of a worker, as this version of vLLM describes it. Each of `windows` is that of
    a group of layers, 0 for one of full attention.
    """
    shape = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    specs = [
        SlidingWindowSpec(**shape, sliding_window=each) if each else FullAttentionSpec(**shape)
        for each in windows
    ]
    names = [[name_of(layer, group) for layer in layers] for group in range(len(windows))]
    size = blocks * BLOCK_BYTES
    if "layers" in KVCacheTensor.__dataclass_fields__:
        stride = {"layer_stride": size, "block_stride": BLOCK_BYTES}
        tensors = [KVCacheTensor(size=size * len(layers), layers=each, **stride) for each in names]
    else:
        tensors = [
            KVCacheTensor(size=size, shared_by=list(each)) for each in zip(*names, strict=True)
        ]
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=[KVCacheGroupSpec(*each) for each in zip(names, specs, strict=True)],
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
