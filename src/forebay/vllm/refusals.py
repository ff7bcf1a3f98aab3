"""What does not work together with this connector, said when vLLM starts and not by wrong tokens.

Each line is something that nobody has made to work and tested here. It goes when somebody has.
"""

from __future__ import annotations

import logging
import traceback
from typing import Any

from forebay.errors import SettingsError
from forebay.vllm.adapter import TRIED, TRIED_SPAN, version_of
from forebay.vllm.drafts import untried_drafts
from forebay.vllm.groups import reasons_of

_logger = logging.getLogger("forebay.vllm")

HASH_BYTES = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}
"""Width of a block's hash, by the name of vLLM's algorithm."""

KINDS = {"FullAttentionSpec": "full_attention", "MLAAttentionSpec": "mla_attention"}
"""Kinds of KV cache that are supported, by vLLM's class, and its words for them in KV events."""

_KV_DTYPES = (
    *("auto", "float32", "float16", "half", "bfloat16"),
    # Their scales lie with the weights; those of other quantized ones lie in the cache.
    *("fp8", "fp8_e4m3", "fp8_e5m2"),
)
_INDEXER = " (an indexer has a cache of its own)"
_PREFIX_CACHING_OFF = "prefix caching off, by which vLLM finds what is loaded"
_OF_SEVERAL = {"UniformTypeKVCacheSpecs": ", layers of several sizes, as with sparse attention"}
_WHOLE_BLOCKS = ("NONE", "FP8_PER_TENSOR")
"""vLLM's names of how KV is quantized, where a block in memory is all of it."""


def check_start(config: Any, version: str) -> None:
    """Raises SettingsError with the reason if `config` asks for something that is not supported."""
    reasons = [reason for wrong, reason in _configured(config) if wrong]
    if any(frame.filename.endswith("multi_connector.py") for frame in traceback.extract_stack()):
        reasons.append("MultiConnector: the connectors would answer for each other's requests")
    if reasons:
        raise SettingsError("ForebayConnector does not work with " + "; nor with ".join(reasons))
    _note_version(version)


def check_cache(kv_cache_config: Any, *, stages: int, drafts: bool) -> None:
    """Raises SettingsError with the reason if the KV cache is of a kind that is not supported, for
    a model of so many `stages`, with `drafts` or without.
    """
    asked = _cached(kv_cache_config)
    if len(kv_cache_config.kv_cache_groups) > 1:
        count = f"{len(kv_cache_config.kv_cache_groups)} KV-cache groups"
        asked.append((stages > 1, f"{count} with pipeline parallelism"))
        asked.append((drafts, f"{count} with speculative decoding"))
    reasons = [reason for wrong, reason in asked if wrong]
    if reasons:
        raise SettingsError("ForebayConnector does not work with " + "; nor with ".join(reasons))


def _switched_off_by_vllm(config: Any) -> str:
    if config.model_config.use_mla and config.device_config.device_type == "cpu":
        return " (vLLM switches it off by itself for multi-head latent attention on this CPU)"
    return ""


def _configured(config: Any) -> list[tuple[bool, str]]:
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    return [
        *_role_and_items(config),
        (not cache.enable_prefix_caching, _PREFIX_CACHING_OFF + _switched_off_by_vllm(config)),
        (cache.prefix_caching_hash_algo not in HASH_BYTES, "this prefix_caching_hash_algo"),
        (cache.cache_dtype not in _KV_DTYPES, f"a KV cache of {cache.cache_dtype} (scales inside)"),
        (
            bool(getattr(cache, "calculate_kv_scales", False)),
            "calculate_kv_scales (scales of the first prompt)",
        ),
        *untried_drafts(config),
        # As vLLM tells it.
        (hasattr(model.hf_text_config, "index_topk"), f"sparse attention{_INDEXER}"),
        (model.is_encoder_decoder, "encoder-decoder models"),
        (model.is_diffusion, "diffusion models (they write tokens more than once)"),
        (model.runner_type != "generate", f"the runner {model.runner_type!r}"),
        (model.enable_prompt_embeds, "prompt embeddings"),
        (model.enable_sleep_mode, "sleep mode (KV memory is given back and mapped anew)"),
        # Which sleep mode has too: vLLM gives KV memory back from a pause as well.
        (
            bool(getattr(model, "enable_cumem_allocator", False)) and not model.enable_sleep_mode,
            "enable_cumem_allocator (as with sleep mode)",
        ),
        # 0.26 refuses it by itself.
        (
            getattr(getattr(config, "aux_output_config", None), "enabled", False),
            "enable_return_routed_experts (kept of so many blocks as vLLM's own pool has)",
        ),
        (
            parallel.pipeline_parallel_size > 1 and parallel.distributed_executor_backend != "mp",
            f"pipeline parallelism by the executor {parallel.distributed_executor_backend!r} "
            "(tried was mp, by which the workers of all stages answer)",
        ),
        (
            parallel.data_parallel_size > 1 and model.is_moe,
            "data parallelism of a mixture of experts (its engines step together)",
        ),
        (
            getattr(parallel, "decode_context_parallel_size", 1) > 1
            or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "context parallelism (a block's tokens lie on several devices)",
        ),
        (
            parallel.distributed_executor_backend == "external_launcher"
            and parallel.world_size > 1,
            "external_launcher (each worker has a scheduler, and they would decide differently)",
        ),
        (config.ec_transfer_config is not None, "an encoder-cache connector"),
        (
            config.device_config.device_type not in ("cpu", "cuda"),
            f"devices of {config.device_config.device_type}",
        ),
    ]


def _role_and_items(config: Any) -> list[tuple[bool, str]]:
    """What a role asks for beside saving and loading, which a connector does whatever its role."""
    model = config.model_config
    role = getattr(config.kv_transfer_config, "kv_role", None)
    if not model.is_multimodal_model:
        return [
            (role not in (None, "kv_both"), f"the kv_role {role} (it saves and loads: kv_both)")
        ]
    items = model.multimodal_config
    return [
        (role not in (None, "kv_both", "kv_producer"), f"the kv_role {role} (take kv_producer)"),
        # From 0.28 on; 0.32 sets that for all models, 0.33 where images may come.
        (
            getattr(items, "allow_missing_mm_embeddings", False),
            f"multimodal models in the kv_role {role}, for which vLLM takes embeddings from "
            "every client, or none where there should be some, and may end by them: "
            "say kv_producer, with which this connector saves and loads as well",
        ),
    ]


def _cached(kv_cache_config: Any) -> list[tuple[bool, str]]:
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if not specs:
        return [(True, "models without a KV cache")]
    quantized = [getattr(spec, "kv_quant_mode", None) for spec in specs]
    return [
        *(reasons_of(kv_cache_config) if len(specs) > 1 else _alone(specs[0])),
        (
            any(bool(getattr(spec, "non_causal", False)) for spec in specs),
            "attention that is not causal",
        ),
        # A checkpoint may ask for it where cache_dtype is "auto".
        (
            any(each is not None and each.name not in _WHOLE_BLOCKS for each in quantized),
            "a quantized KV cache (scales inside)",
        ),
        (
            bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False)),
            "KV caches that vLLM zeroes",
        ),
    ]


def _alone(spec: Any) -> list[tuple[bool, str]]:
    """Of the one group of a model."""
    kind = type(spec).__name__
    windows = ("sliding_window", "attention_chunk_size")
    return [
        (kind not in KINDS, f"KV caches of the kind {kind}{_OF_SEVERAL.get(kind, '')}"),
        *(_latents(spec) if kind == "MLAAttentionSpec" else ()),
        (any(getattr(spec, each, None) for each in windows), "attention over a window"),
    ]


def _latents(spec: Any) -> list[tuple[bool, str]]:
    """Of multi-head latent attention: where a block is not plainly its tokens' latents."""
    numbers = str(getattr(spec, "cache_dtype_str", None))
    # By its name in 0.26, and that in later versions.
    for_each = (getattr(spec, "compress_ratio", 1), getattr(spec, "tokens_per_state", 1))
    return [
        # A model may choose it where cache_dtype is "auto".
        (numbers.endswith("ds_mla"), f"a KV cache of {numbers} (scales inside)"),
        (bool(getattr(spec, "is_index_group_leader", False)), f"sparse attention{_INDEXER}"),
        (
            for_each != (1, 1) or getattr(spec, "model_version", None) is not None,
            "latents of several tokens together",
        ),
    ]


def _note_version(version: str) -> None:
    if version_of(version) not in TRIED:
        said = "vLLM %s was not tried with this version of Forebay; tried was %s"
        _logger.warning(said, version, TRIED_SPAN)
