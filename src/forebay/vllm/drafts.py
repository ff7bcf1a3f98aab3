"""Tokens that vLLM guesses before it computes them: what speculative decoding means for blocks.

A step computes guesses behind the tokens that are known, and writes their KV; those that turn out
wrong are written over by the next one. vLLM names a block when all its tokens are known, and the
newest step that was scheduled then is the last one that writes into it. Layers that make guesses
write behind the model's, in the same step. For some of them the KV of a block's last token depends
on the token behind it: vLLM uses such a block where it finds the next one too.
"""

from __future__ import annotations

from typing import Any

_WITHOUT_KV = ("ngram", "suffix")
_WITH_KV = ("draft_model", "eagle", "eagle3", "mtp")
"""vLLM's names of the ways to guess that were tried, by whether they have layers of their own."""


def drafts_in_cache(vllm_config: Any) -> bool:
    """Whether drafts are made by layers with KV of their own."""
    drafts = vllm_config.speculative_config
    return drafts is not None and drafts.method not in _WITHOUT_KV


def dropped_blocks(vllm_config: Any) -> int:
    """How many of the blocks that it finds, from the last, vLLM computes once more, since their KV
    may be that of another token behind them.
    """
    drafts = vllm_config.speculative_config
    if drafts is None:
        return 0
    # 0.26 has no switch for it.
    drops = getattr(drafts, "use_eagle_block_drop", drafts.use_eagle)
    return 1 if drops() else 0


def draft_slots(vllm_config: Any) -> int:
    """For how many tokens more than it computes vLLM may make room at a step for one request: its
    drafts, and those to come that are made by layers with KV of their own.
    """
    drafts = vllm_config.speculative_config
    if drafts is None:
        return 0
    return int(drafts.num_speculative_tokens) * (2 if drafts_in_cache(vllm_config) else 1)


def untried_drafts(vllm_config: Any) -> list[tuple[bool, str]]:
    """What of speculative decoding is asked for or not, and is not supported."""
    drafts, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if drafts is None:
        return []
    model = vllm_config.model_config
    return [
        (
            drafts.method not in _WITHOUT_KV + _WITH_KV,
            f"speculative decoding by {drafts.method} (tried were "
            f"{', '.join(_WITHOUT_KV + _WITH_KV)})",
        ),
        (
            bool(getattr(drafts, "parallel_drafting", False)),
            "parallel_drafting (all drafts of a request by one pass)",
        ),
        (_mtp_layers(drafts) > 1, "speculative decoding by several MTP layers"),
        (model.is_multimodal_model, "speculative decoding of a multimodal model"),
        (
            model.use_mla and drafts.method not in (*_WITHOUT_KV, "mtp"),
            f"speculative decoding by {drafts.method} over multi-head latent attention",
        ),
        (
            parallel.pipeline_parallel_size > 1,
            "speculative decoding with pipeline parallelism (the last stage has the draft layers)",
        ),
    ]


def _mtp_layers(drafts: Any) -> int:
    """How many layers of the model's own make drafts, each for another place."""
    model = getattr(drafts, "draft_model_config", None)
    return int(getattr(getattr(model, "hf_config", None), "n_predict", None) or 1)
