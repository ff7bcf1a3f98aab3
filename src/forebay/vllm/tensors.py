"""How blocks lie in vLLM's KV tensors, and the pool over them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.errors import SettingsError
from forebay.transfer.pool import Pool
from forebay.vllm.adapter import KVShape

_MANY_TENSORS = 8
"""From so many pieces on a driver hands over faster what lies evenly within one allocation."""

_logger = logging.getLogger("forebay.vllm")


def device_of(caches: Mapping[str, Any]) -> Any:
    """The one device that all of `caches` are on, as torch tells it."""
    devices = {tensor.device for tensor in caches.values()}
    if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise SettingsError(
            f"the KV cache lies on {sorted(map(str, devices))}: one GPU of CUDA or a CPU is "
            "supported for each worker"
        )
    return next(iter(devices))


def parts_of(shape: KVShape, caches: Mapping[str, Any]) -> list[Any]:
    """Tensors [blocks, ...] in which each block's bytes are in one piece: those of all layers, or
    one of them all, also where each layer has a view of it; one that layers share counts once.

    In a tensor blocks are the outermost axis in memory, or K and V are, and blocks the next. An
    attention kernel may see each block as several of its own.
    Raises SettingsError for other tensors, and for layers that share one and see it cut otherwise.
    """
    parts: list[Any] = []
    seen: dict[int, list[tuple[int, int, int]]] = {}
    for name, tensor in caches.items():
        own = _parts(name, tensor, shape.blocks)
        bounds = [_bounds(part) for part in own]
        first = seen.setdefault(tensor.data_ptr(), bounds)
        if first is bounds:
            parts += own
        elif first != bounds:
            raise SettingsError(
                f"the KV cache of {name} lies in the memory of another layer, and its blocks begin "
                "elsewhere there: this layout is not supported"
            )
    whole = _whole_blocks(parts)
    return parts if whole is None else [whole]


def warn_of_tensors(parts: Sequence[Any]) -> None:
    """Tell the log where copies of a block hold up the kernels that vLLM launches meanwhile."""
    tensors = {int(part.untyped_storage().data_ptr()) for part in parts}
    if len(tensors) >= _MANY_TENSORS:
        _logger.warning(
            "each KV block lies in %d tensors: while blocks are copied, kernels start later. "
            "Layers side by side avoid it; in vLLM 0.26: VLLM_USE_V2_MODEL_RUNNER=0",
            len(tensors),
        )


def device_pool(shape: KVShape, parts: Sequence[Any]) -> Pool:
    """The pool that lies in `parts`."""
    pool = Pool.of(parts)
    if pool.block_bytes != shape.block_bytes:
        raise SettingsError(
            f"vLLM says that a block has {shape.block_bytes} bytes, and its tensors have "
            f"{pool.block_bytes}: this layout is not supported"
        )
    return pool


def _bounds(part: Any) -> tuple[int, int, int]:
    """Where its first block begins, how far the next one is from there, and how long each is."""
    size = int(part.element_size())
    return int(part.data_ptr()), int(part.stride(0)) * size, int(part[0].numel()) * size


def _parts(name: str, tensor: Any, blocks: int) -> list[Any]:
    order = sorted(range(tensor.dim()), key=lambda axis: -int(tensor.stride(axis)))
    laid_out = tensor.permute(order)
    if laid_out.shape[0] % blocks == 0:
        return [_blocks_first(laid_out, blocks)]
    if laid_out.shape[0] == 2 and laid_out.shape[1] % blocks == 0:
        return [_blocks_first(each, blocks) for each in (laid_out[0], laid_out[1])]
    raise SettingsError(
        f"the KV cache of {name} has shape {tuple(tensor.shape)} and strides "
        f"{tuple(tensor.stride())}, in which {blocks} blocks are not the outermost axis: this "
        "layout is not supported"
    )


def _whole_blocks(parts: Sequence[Any]) -> Any | None:
    """One tensor [blocks, elements] for `parts`, in whose memory each block is all of theirs, one
    behind the other; None where they lie otherwise.
    """
    first = parts[0]
    size = int(first.element_size())
    end = first.data_ptr()
    for part in parts:
        beside = (
            part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and (part.dtype, part.stride(0)) == (first.dtype, first.stride(0))
            and part.data_ptr() == end
            and part[0].is_contiguous()
        )
        if not beside:
            return None
        end += part[0].numel() * size
    if end - first.data_ptr() != first.stride(0) * size:
        return None
    return first.as_strided((first.shape[0], first.stride(0)), (first.stride(0), 1))


def _blocks_first(laid_out: Any, blocks: int) -> Any:
    """`laid_out`, whose first axis counts a kernel's blocks, by vLLM's."""
    each = laid_out.shape[0] // blocks
    return laid_out if each == 1 else laid_out.unflatten(0, (blocks, each))
