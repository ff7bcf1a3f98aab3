"""KV events in vLLM's own form, as its subscribers read them."""

# vLLM's classes are of no type that a checker knows where vLLM is not installed.
# pyright: standard

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import (  # pyright: ignore[reportMissingImports]
    MEDIUM_CPU,
    BlockRemoved,
    BlockStored,
)
from vllm.v1.core.kv_cache_utils import (  # pyright: ignore[reportMissingImports]
    maybe_convert_block_hash,
)

from forebay.vllm.groups import Groups
from forebay.vllm.seen.events import Removed, Stored

_FULL, _WINDOW = "full_attention", "sliding_window"
"""vLLM's words for the kinds of KV cache that other groups may have."""


def as_vllm_events(
    events: Sequence[Stored | Removed], block_tokens: int, kind: str, groups: Groups
) -> list[Any]:
    """`events` of host memory, of a KV cache of the `kind` that vLLM calls so, or of one of other
    `groups`. Hashes are written as vLLM writes those of its own blocks.
    """
    kinds = {group.number: _WINDOW if group.window else _FULL for group in groups.beside}
    windows = {group.number: group.window_tokens for group in groups.beside if group.window}
    made: list[Any] = []
    for event in events:
        hashes = [maybe_convert_block_hash(each) for each in event.hashes]
        if isinstance(event, Removed):
            made.append(BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU, group_idx=event.group))
            continue
        made.append(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=(
                    None if event.parent is None else maybe_convert_block_hash(event.parent)
                ),
                token_ids=event.tokens,
                block_size=block_tokens,
                lora_id=None if event.lora is None else event.lora[0],
                medium=MEDIUM_CPU,
                lora_name=None if event.lora is None else event.lora[1],
                group_idx=event.group,
                kv_cache_spec_kind=kinds.get(event.group, kind),
                kv_cache_spec_sliding_window=windows.get(event.group),
            )
        )
    return made
