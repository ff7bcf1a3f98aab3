"""What goes into vLLM's names of blocks, and what its versions leave out of them."""

from __future__ import annotations

from typing import Any, NamedTuple

from forebay.vllm.adapter import VllmRequest, version_of


def ends_of_prompts_are_misnamed(version: str) -> bool:
    """Whether vLLM, of the items in a block that a prompt leaves partly filled, puts the last one
    alone into the block's name: those before 0.31 do.
    """
    return (version_of(version) or (0, 0)) < (0, 31)


class Item(NamedTuple):
    """An image, or what else a prompt has beside text: its tokens are `start` to `end`."""

    name: str
    start: int
    end: int


def items_of(request: VllmRequest) -> list[Item]:
    """Those in the prompt of `request`, as vLLM goes through them."""
    spans = ((each.identifier, each.mm_position) for each in request.mm_features)
    return [Item(name, at.offset, at.offset + at.length) for name, at in spans]


def salts_pass_for_loras(config: Any, version: str) -> bool:
    """Whether vLLM names a prompt's first block alike for a `cache_salt` and for a LoRA of that
    name: before 0.31 it puts one or the other behind its tokens and does not say which.
    """
    return config.lora_config is not None and (version_of(version) or (0, 0)) < (0, 31)


def items_depend_on_steps(config: Any) -> bool:
    """Whether KV of a prompt with items depends on more than what vLLM names it by: on where steps
    end, where an item's tokens see those behind them, or on what was found before, where vLLM
    counts positions behind a video anew when it encodes it.
    """
    model = config.model_config
    if not model.is_multimodal_model:
        return False
    return model.is_mm_prefix_lm or model.multimodal_config.is_multimodal_pruning_enabled()
