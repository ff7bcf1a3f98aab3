"""What is refused, as vLLM's own configurations ask for it; and what is close to that and works."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

import torch
from vllm.config.cache import CacheDType
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
)
from vllm.v1.structured_output import StructuredOutputManager
from vllm_programs import connector, engine_options
from vllm_toy import BLOCK_TOKENS, ToyEngine

from forebay.errors import SettingsError
from forebay.vllm.connector import ForebayConnector
from forebay.vllm.names import items_depend_on_steps
from forebay.vllm.refusals import _KV_DTYPES, KINDS, check_cache, check_start

ATTENTION = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
NGRAMS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


def config_of(model: Path, **more: Any) -> Any:
    return EngineArgs(**engine_options(model, **more)).create_engine_config()


def cache_of(*specs: Any, drafts: bool = False) -> KVCacheConfig:
    groups = [
        KVCacheGroupSpec([f"layer {place}"], spec, is_eagle_group=drafts)
        for place, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def test_a_wrong_option_is_told_before_the_model_is_loaded_where_graphs_are_used():
    assert not ForebayConnector.requires_piecewise_for_cudagraph({"host_bytes": "1GiB"})
    with pytest.raises(SettingsError, match="cpu_bytes, which Forebay does not know"):
        ForebayConnector.requires_piecewise_for_cudagraph({"cpu_bytes": "1GiB"})


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"enable_prompt_embeds": True}, "prompt embeddings"),
        ({"enable_prefix_caching": False}, "prefix caching off"),
    ],
)
def test_what_vllm_is_asked_for_and_does_not_work_is_named(
    tiny_llama: Path, asked: dict[str, Any], said: str
):
    check_start(config_of(tiny_llama), "0.32.0")
    with pytest.raises(SettingsError, match=said):
        check_start(config_of(tiny_llama, **asked), "0.32.0")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("speculative_config.method", "medusa", "speculative decoding by medusa"),
        ("speculative_config.method", "ngram_gpu", "speculative decoding by ngram_gpu"),
        ("speculative_config.method", "dflash", "speculative decoding by dflash"),
        ("speculative_config.parallel_drafting", True, "parallel_drafting"),
        (
            "speculative_config.draft_model_config",
            SimpleNamespace(hf_config=SimpleNamespace(n_predict=3)),
            "speculative decoding by several MTP layers",
        ),
        ("parallel_config.pipeline_parallel_size", 2, "speculative decoding with pipeline"),
    ],
)
def test_ways_to_guess_tokens_that_were_not_tried_are_refused(
    tiny_llama: Path, name: str, value: object, said: str
):
    config = config_of(tiny_llama, speculative_config=NGRAMS)
    check_start(config, "0.32.0")
    part, last = name.split(".")
    object.__setattr__(getattr(config, part), last, value)
    with pytest.raises(SettingsError, match=said):
        check_start(config, "0.32.0")


@pytest.mark.parametrize("dtype", sorted(set(get_args(CacheDType)) - set(_KV_DTYPES)))
def test_every_kv_cache_with_scales_in_it_is_refused(tiny_llama: Path, dtype: str):
    config = config_of(tiny_llama)
    config.cache_config.cache_dtype = dtype
    with pytest.raises(SettingsError, match=f"a KV cache of {dtype}"):
        check_start(config, "0.32.0")


def test_sparse_attention_is_refused_before_the_model_is_loaded(tiny_llama: Path):
    config = config_of(tiny_llama)
    config.model_config.hf_text_config.index_topk = 2048
    with pytest.raises(SettingsError, match="sparse attention"):
        check_start(config, "0.32.0")


def test_scales_that_the_first_prompt_sets_are_refused(tiny_llama: Path):
    """An option of 0.26, which later versions do not have."""
    config = config_of(tiny_llama)
    object.__setattr__(config.cache_config, "calculate_kv_scales", True)
    with pytest.raises(SettingsError, match="calculate_kv_scales"):
        check_start(config, "0.26.0")


@pytest.mark.parametrize("dtype", [each for each in _KV_DTYPES if each in get_args(CacheDType)])
def test_kv_caches_without_are_not(tiny_llama: Path, dtype: str):
    config = config_of(tiny_llama)
    config.cache_config.cache_dtype = dtype
    check_start(config, "0.32.0")


def latent(**fields: Any) -> MLAAttentionSpec:
    """Of multi-head latent attention; `fields` may be of another version."""
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    for name, value in fields.items():
        object.__setattr__(spec, name, value)
    return spec


PLAIN = {"stages": 1, "drafts": False}
FULL = FullAttentionSpec(**ATTENTION)
LATENT = latent()
UNEQUAL = UniformTypeKVCacheSpecs(
    block_size=16, kv_cache_specs={"latents": LATENT, "indexer": latent(head_size=132)}
)
WINDOW = SlidingWindowSpec(**ATTENTION, sliding_window=64)
STATES = MambaSpec(block_size=16, shapes=((2, 8),), dtypes=(torch.float32,))
CHUNKS = ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=64)
LONG = SlidingWindowSpec(**{**ATTENTION, "block_size": 32, "num_kv_heads": 1}, sliding_window=64)
WIDE = SlidingWindowSpec(**{**ATTENTION, "num_kv_heads": 4}, sliding_window=64)
OVER_A_WINDOW = FullAttentionSpec(**ATTENTION, sliding_window=64)
QUANTIZED = {**ATTENTION, "kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD}


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        (cache_of(WINDOW), "SlidingWindowSpec"),
        (cache_of(FULL, STATES), "2 KV-cache groups, some of the kind MambaSpec"),
        (cache_of(FULL, WINDOW, CHUNKS), "3 KV-cache groups, some of the kind ChunkedLocal"),
        (cache_of(FULL, LATENT), "2 KV-cache groups, some of the kind MLA"),
        (cache_of(WINDOW, WINDOW), "2 KV-cache groups without full attention"),
        (cache_of(FULL, LONG), "2 KV-cache groups with blocks of different sizes"),
        (cache_of(FULL, WIDE), "2 KV-cache groups with blocks of different sizes"),
        (cache_of(FULL, OVER_A_WINDOW), "of full attention over a window"),
        (cache_of(FULL, WINDOW, drafts=True), "2 KV-cache groups with draft layers"),
        (cache_of(FULL, SlidingWindowSpec(**QUANTIZED, sliding_window=64)), "scales inside"),
        (cache_of(STATES), "MambaSpec"),
        (cache_of(OVER_A_WINDOW), "a window"),
        (cache_of(CHUNKS), "Chunked"),
        (cache_of(UNEQUAL), "layers of several sizes, as with sparse attention"),
        (cache_of(latent(cache_dtype_str="fp8_ds_mla")), "a KV cache of fp8_ds_mla"),
        (cache_of(latent(is_index_group_leader=True)), "sparse attention"),
        (cache_of(latent(tokens_per_state=4)), "latents of several tokens"),
        (cache_of(latent(compress_ratio=4)), "latents of several tokens"),
        (cache_of(latent(model_version="deepseek_v4")), "latents of several tokens"),
    ],
)
def test_layers_of_other_kinds_are_refused(cache: KVCacheConfig, said: str):
    check_cache(cache_of(FULL), **PLAIN)
    check_cache(cache_of(LATENT), **PLAIN)
    check_cache(cache_of(FULL, WINDOW, WINDOW), **PLAIN)
    with pytest.raises(SettingsError, match=said):
        check_cache(cache, **PLAIN)


@pytest.mark.parametrize("spec", [FULL, LATENT])
def test_kinds_are_called_as_vllm_calls_them_in_events(spec: Any):
    assert KINDS[type(spec).__name__] == get_kv_cache_spec_kind(spec).value


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"stages": 2}, "with pipeline parallelism"),
        ({"drafts": True}, "with speculative decoding"),
    ],
)
def test_several_groups_are_refused_with(asked: dict[str, Any], said: str):
    check_cache(cache_of(FULL), **{**PLAIN, **asked})
    with pytest.raises(SettingsError, match=f"2 KV-cache groups {said}"):
        check_cache(cache_of(FULL, WINDOW), **{**PLAIN, **asked})


WHOLE = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)


@pytest.mark.parametrize("mode", KVQuantMode)
def test_layers_that_a_checkpoint_quantizes_may_have_their_scales_with_the_weights(
    mode: KVQuantMode,
):
    cache = cache_of(FullAttentionSpec(**ATTENTION, kv_quant_mode=mode))
    if mode in WHOLE:
        check_cache(cache, **PLAIN)
        return
    with pytest.raises(SettingsError, match="scales inside"):
        check_cache(cache, **PLAIN)


@pytest.fixture(scope="module")
def tiny_sight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model that sees images."""
    import tiny_sights  # noqa: PLC0415 - needs transformers

    folder = tmp_path_factory.mktemp("llava")
    tiny_sights.SIGHTS["llava"].save(folder, 32)
    return folder


def sees(model: Path, role: str = "kv_producer", **more: Any) -> Any:
    """The configuration of one that does, in a role."""
    more = {"model_impl": "transformers", "skip_tokenizer_init": False, **more}
    return config_of(model, kv_transfer_config={**connector(), "kv_role": role}, **more)


def test_images_come_in_a_role_in_which_vllm_takes_no_embeddings(tiny_sight: Path):
    """With which the tests of what it answers run, too."""
    config = sees(tiny_sight)
    assert not config.model_config.multimodal_config.enable_mm_embeds
    check_start(config, "0.32.0")
    both = sees(tiny_sight, "kv_both")
    items = both.model_config.multimodal_config
    # 0.27 does not know that switch.
    if not getattr(items, "allow_missing_mm_embeddings", False):
        assert not items.enable_mm_embeds
        check_start(both, "0.27.0")
        return
    with pytest.raises(SettingsError, match="takes embeddings from every client"):
        check_start(both, "0.32.0")
    with pytest.raises(SettingsError, match="the kv_role kv_consumer"):
        check_start(sees(tiny_sight, "kv_consumer"), "0.32.0")


def test_a_model_of_text_alone_has_one_role(tiny_llama: Path):
    with pytest.raises(SettingsError, match="kv_role kv_producer"):
        check_start(
            config_of(tiny_llama, kv_transfer_config={**connector(), "kv_role": "kv_producer"}),
            "0.32.0",
        )


def test_images_whose_kv_depends_on_steps_are_known(
    tiny_sight: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
):
    config = sees(tiny_sight)
    assert not items_depend_on_steps(config)
    config.model_config.multimodal_config.video_pruning_rate = 0.5
    assert items_depend_on_steps(config)
    config.model_config.multimodal_config.video_pruning_rate = None
    seen = property(lambda self: True)
    monkeypatch.setattr(type(config.model_config), "is_mm_prefix_lm", seen)
    assert items_depend_on_steps(config)
    check_start(config, "0.32.0")
    # One that sees nothing has no such images.
    assert not items_depend_on_steps(config_of(tiny_llama))


def test_it_is_not_one_of_several_connectors(tiny_llama: Path):
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [connector(), connector()]},
    }
    config = config_of(tiny_llama, kv_transfer_config=several)
    config.cache_config.num_gpu_blocks = 8
    with pytest.raises(SettingsError, match="MultiConnector"):
        Scheduler(
            vllm_config=config,
            kv_cache_config=cache_of(FULL),
            structured_output_manager=StructuredOutputManager(config),
            block_size=16,
        )


def test_new_weights_find_nothing_of_the_old_ones(toy: Any):
    """What vLLM does between a pause and new weights; and it may be asked for transfers of them."""
    engine: ToyEngine = toy(lag=2)
    config = engine.scheduler.vllm_config
    config.weight_transfer_config = object()
    check_start(config, "0.32.0")
    for seed in (1, 2):
        engine.ask([seed] * 200, 1)
    engine.run()
    assert engine.half.stats().saved_bytes > 0
    running = engine.ask([1] * 100, 40)
    while not running.given:
        engine.step()
    while engine.half._flights.load_blocks:
        engine.step()
    engine.abort(running)
    engine.run()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    before = engine.half.stats()
    for seed in (1, 2):
        engine.ask([seed] * 200, 1)
    engine.run()
    after = engine.half.stats()
    assert after.loaded_bytes == before.loaded_bytes
    recomputed = after.misses["absent"] - before.misses["absent"]  # pyright: ignore
    assert recomputed == 2 * (200 // BLOCK_TOKENS)


def test_how_blocks_are_to_lie_is_said_to_workers_alone(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
):
    """Before they allocate: the scheduler's plan is another one, which nobody carries out."""
    told: list[Any] = []
    monkeypatch.setattr("forebay.vllm.connector.lay_side_by_side", lambda *plan: told.append(plan))
    engine = ToyEngine(tiny_llama, ranks=2)
    ranks = [config.parallel_config.rank for config, _ in told]
    assert ranks == [0, 1]
    engine.close()
