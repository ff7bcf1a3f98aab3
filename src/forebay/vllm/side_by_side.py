"""How vLLM is to allocate KV, where it asks no connector."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def lay_side_by_side(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Have vLLM's worker allocate all layers of a block side by side, and return whether it will.

    To be called before it allocates: what `kv_cache_config` says of its tensors is changed. Only
    0.26 with its second model runner needs that, which asks no connector how blocks are to lie and
    would make a tensor for each layer. Layers of several groups stay as vLLM lays them.
    """
    tensors = kv_cache_config.kv_cache_tensors
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    page_bytes, blocks = int(spec.page_size_bytes), int(kv_cache_config.num_blocks)
    if (
        vllm_config.device_config.device_type != "cuda"
        or not getattr(vllm_config, "use_v2_model_runner", False)
        or not getattr(spec, "indexes_kv_by_block_stride", False)
        or len(kv_cache_config.kv_cache_groups) > 1
        or getattr(spec, "page_size_padded", None) is not None
        # Packed already, or of a version that says otherwise how blocks lie.
        or any(getattr(tensor, "block_stride", None) != 0 for tensor in tensors)
        or any(int(tensor.size) != page_bytes * blocks for tensor in tensors)
        or not _kernels_take(vllm_config, group.layer_names, int(spec.block_size))
    ):
        return False
    block_bytes = page_bytes * len(tensors)
    for place, tensor in enumerate(tensors):
        tensor.size, tensor.block_stride = block_bytes * blocks, block_bytes
        tensor.offset = place * page_bytes
    return True


_BY_STRIDE = frozenset({"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLASH_ATTN_MLA"})
"""Attention backends that find a block by its stride. FlexAttention says so too, and flattens."""


def _kernels_take(vllm_config: Any, layers: Iterable[str], block_tokens: int) -> bool:
    """Whether the attention kernels of `layers` find blocks by their stride, and see each as one of
    their own.
    """
    by_name = vllm_config.compilation_config.static_forward_context
    backends = {by_name[name].get_attn_backend() for name in layers}

    def takes(size: Any) -> bool:
        # A number, or vLLM's `MultipleOf` one.
        return block_tokens % size.base == 0 if hasattr(size, "base") else block_tokens == size

    return all(
        each.get_name() in _BY_STRIDE and any(map(takes, each.get_supported_kernel_block_sizes()))
        for each in backends
    )
