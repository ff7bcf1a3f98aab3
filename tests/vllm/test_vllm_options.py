"""What may be asked of the connector, and what is refused at start. Needs no vLLM."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.core.modes import Mode
from forebay.errors import SettingsError
from forebay.vllm import plugin
from forebay.vllm.adapter import KVShape, read_shape, version_of
from forebay.vllm.options import Options
from forebay.vllm.refusals import check_cache, check_start
from forebay.vllm.scheduler.wishes import Wishes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "vllm.md"


def test_sizes_are_text_or_bytes():
    assert Options.parse({"host_bytes": "2GiB"}).host_bytes == 2 << 30
    assert Options.parse({"host_bytes": 4096, "mode": "b0"}).mode is Mode.RECOMPUTE


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "needs host_bytes"),
        ({"host_bytes": "1GiB", "cpu_bytes_to_use": 5}, "cpu_bytes_to_use, which"),
        ({"host_bytes": 1, 5: 6, "cpu": 7}, "5, cpu, which"),
        ({"host_bytes": "64G"}, "host_bytes: '64G' is no size"),
        ({"host_bytes": 0}, "host_bytes is 0"),
        (
            {"host_bytes": 1, "mode": "b7"},
            "must be one of b0 (recompute), b3 (asynchronous), b4 (look_ahead)",
        ),
        ({"host_bytes": 1, "prefetch_share": 1.5}, "prefetch_share is 1.5"),
    ],
)
def test_what_cannot_work_is_refused_by_name(extra: dict[Any, Any], said: str):
    with pytest.raises(SettingsError, match=re.escape(said)):
        Options.parse(extra)


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        (Mode.SYNCHRONOUS, "stalls steps"),
        (Mode.LAYERED, "layers one by one"),
        (Mode.HINTS, "hints too"),
        (Mode.ORACLE, "virtual clock"),
    ],
)
def test_a_mode_that_vllm_cannot_follow_is_refused_with_those_that_it_can(mode: Mode, why: str):
    for given in (mode, mode.value):
        with pytest.raises(SettingsError, match=f"{mode.value} .*{why}.*; use one of") as refused:
            Options.parse({"host_bytes": 1, "mode": given})
    named = set(re.findall(r"\bb\d\b", str(refused.value))) - {mode.value}
    assert named
    for other in named:
        Options.parse({"host_bytes": 1, "mode": other})


def test_times_that_are_no_floats_are_left_out():
    """vLLM 0.26 lets them through, where its engine runs in the process of who asks."""
    asked = {"hint": {"eta_s": 10**400, "expiry_s": 10**400}}
    request: Any = SimpleNamespace(
        kv_transfer_params={"forebay": asked}, skip_reading_prefix_cache=False, max_tokens=1
    )
    wishes = Wishes.of(request)
    assert wishes.hint is None
    assert set(wishes.complaints()) == {"hint.eta_s", "hint.expiry_s"}


def test_host_memory_for_less_than_a_block_is_refused():
    with pytest.raises(SettingsError, match="one block of this model takes 4096"):
        Options.parse({"host_bytes": 4095}).host_slots(4096)


def test_a_small_host_pool_has_small_windows():
    options = Options.parse({"host_bytes": 1 << 20})
    assert options.window(4096, 256) == 1 << 18
    assert options.window(1 << 19, 2) == 1 << 19


def test_every_option_is_documented_with_its_default():
    table = PAGE.read_text().partition("| option |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| *`?([^`|]*?)`? *\|", table, flags=re.MULTILINE)
    there = {
        each.name: "" if each.default is MISSING else str(each.default) for each in fields(Options)
    }
    assert {name: default.strip() for name, default in rows} == there


@pytest.mark.parametrize("factory", [None, object()])
def test_a_vllm_that_knows_no_such_plug_in_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, factory: object
):
    """It calls all that are installed, used or not."""
    there = SimpleNamespace() if factory is None else SimpleNamespace(KVConnectorFactory=factory)
    with monkeypatch.context() as patch:
        patch.setattr(plugin.importlib, "import_module", lambda name: there)
        plugin.register()
    assert "kv_connector_module_path" in caplog.text


def config(**changes: Any) -> Any:
    """What `check_start` reads of vLLM's configuration, as it is by default on a CPU."""
    settings: dict[str, Any] = {
        "model_config.is_multimodal_model": False,
        "model_config.is_encoder_decoder": False,
        "model_config.use_mla": False,
        "model_config.hf_text_config": SimpleNamespace(),
        "model_config.is_diffusion": False,
        "model_config.runner_type": "generate",
        "model_config.is_moe": False,
        "model_config.enable_prompt_embeds": False,
        "model_config.enable_sleep_mode": False,
        "cache_config.enable_prefix_caching": True,
        "cache_config.prefix_caching_hash_algo": "sha256",
        "cache_config.cache_dtype": "auto",
        "cache_config.calculate_kv_scales": False,
        "parallel_config.pipeline_parallel_size": 1,
        "parallel_config.data_parallel_size": 1,
        "parallel_config.distributed_executor_backend": "uni",
        "parallel_config.world_size": 1,
        "device_config.device_type": "cpu",
        "speculative_config": None,
        "ec_transfer_config": None,
        "kv_transfer_config.kv_role": "kv_both",
    }
    made = SimpleNamespace()
    for name, value in {**settings, **changes}.items():
        at = made
        *parents, last = name.split(".")
        for parent in parents:
            at.__dict__.setdefault(parent, SimpleNamespace())
            at = getattr(at, parent)
        setattr(at, last, value)
    return made


def test_a_user_who_did_not_switch_prefix_caching_off_is_told_who_did():
    off = {"cache_config.enable_prefix_caching": False}
    with pytest.raises(SettingsError, match=r"loaded$"):
        check_start(config(**off), "0.32.0")
    with pytest.raises(SettingsError, match=r"vLLM switches it off by itself for multi-head"):
        check_start(config(**off, **{"model_config.use_mla": True}), "0.32.0")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model_config.is_encoder_decoder", True, "encoder-decoder"),
        ("model_config.is_diffusion", True, "diffusion"),
        ("model_config.runner_type", "pooling", "pooling"),
        ("model_config.enable_prompt_embeds", True, "prompt embeddings"),
        ("model_config.enable_sleep_mode", True, "sleep mode"),
        ("model_config.enable_cumem_allocator", True, "enable_cumem_allocator"),
        ("aux_output_config.enabled", True, "enable_return_routed_experts"),
        ("cache_config.enable_prefix_caching", False, "prefix caching off"),
        ("cache_config.prefix_caching_hash_algo", "md5", "hash_algo"),
        ("cache_config.cache_dtype", "nvfp4", "nvfp4"),
        ("cache_config.calculate_kv_scales", True, "calculate_kv_scales"),
        ("parallel_config.decode_context_parallel_size", 2, "context parallelism"),
        ("parallel_config.prefill_context_parallel_size", 2, "context parallelism"),
        ("device_config.device_type", "xpu", "xpu"),
        ("speculative_config", SimpleNamespace(method="medusa"), "speculative decoding by medusa"),
        ("ec_transfer_config", object(), "encoder-cache"),
        ("kv_transfer_config.kv_role", "kv_producer", "kv_role kv_producer"),
    ],
)
def test_what_is_not_supported_is_refused_with_the_reason(name: str, value: Any, said: str):
    check_start(config(), "0.32.0")
    with pytest.raises(SettingsError, match=said):
        check_start(config(**{name: value}), "0.32.0")


@pytest.mark.parametrize(
    ("method", "name", "said"),
    [
        ("eagle", "use_mla", "speculative decoding by eagle over multi-head latent attention"),
        ("ngram", "is_multimodal_model", "speculative decoding of a multimodal model"),
    ],
)
def test_models_over_which_drafts_were_not_tried_are_refused(method: str, name: str, said: str):
    items = SimpleNamespace(is_multimodal_pruning_enabled=lambda: False)
    drafts = {
        "speculative_config": SimpleNamespace(method=method),
        "model_config.multimodal_config": items,
        "model_config.is_mm_prefix_lm": False,
    }
    check_start(config(**drafts), "0.32.0")
    with pytest.raises(SettingsError, match=said):
        check_start(config(**drafts, **{f"model_config.{name}": True}), "0.32.0")


def test_engines_side_by_side_are_refused_only_where_they_step_together():
    check_start(config(**{"parallel_config.data_parallel_size": 2}), "0.32.0")
    moe = {"parallel_config.data_parallel_size": 2, "model_config.is_moe": True}
    with pytest.raises(SettingsError, match="mixture of experts"):
        check_start(config(**moe), "0.32.0")


def test_workers_that_each_have_a_scheduler_are_refused_where_there_are_several():
    """As `torchrun` starts them: loads would be on their way for ever, in each engine others."""
    launcher = {"parallel_config.distributed_executor_backend": "external_launcher"}
    check_start(config(**launcher), "0.32.0")
    check_start(config(**{"parallel_config.world_size": 2}), "0.32.0")
    with pytest.raises(SettingsError, match="external_launcher"):
        check_start(config(**launcher, **{"parallel_config.world_size": 2}), "0.32.0")


def test_stages_are_refused_where_earlier_ones_may_not_answer():
    """Ray's own way to run stages brings back what the last one says."""
    backend = "parallel_config.distributed_executor_backend"
    stages = {"parallel_config.pipeline_parallel_size": 2, "parallel_config.world_size": 2}
    check_start(config(**stages, **{backend: "mp"}), "0.32.0")
    by_ray = config(**stages, **{backend: "ray"})
    with pytest.raises(SettingsError, match="pipeline parallelism by the executor 'ray'"):
        check_start(by_ray, "0.32.0")


class FullAttentionSpec(SimpleNamespace):
    """By its name, as vLLM's class of that name."""


class SlidingWindowSpec(SimpleNamespace):
    """The same."""


class MambaSpec(SimpleNamespace):
    """The same."""


def cache(*specs: Any, sizes: tuple[int, ...] = (4096,), layers: int = 2, **more: Any) -> Any:
    names = [f"layer {each}" for each in range(layers)]
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=names) for spec in specs]
    return SimpleNamespace(
        kv_cache_groups=groups,
        kv_cache_tensors=[SimpleNamespace(size=size) for size in sizes],
        num_blocks=4,
        **more,
    )


@pytest.mark.parametrize(
    ("kv_cache", "said"),
    [
        (cache(), "without a KV cache"),
        (cache(FullAttentionSpec(), MambaSpec()), "2 KV-cache groups, some of the kind MambaSpec"),
        (cache(SlidingWindowSpec()), "SlidingWindowSpec"),
        (cache(FullAttentionSpec(sliding_window=64)), "a window"),
        (cache(FullAttentionSpec(attention_chunk_size=64)), "a window"),
        (cache(FullAttentionSpec(non_causal=True)), "not causal"),
        (cache(FullAttentionSpec(kv_quant_mode=SimpleNamespace(name="NVFP4"))), "quantized"),
        (cache(FullAttentionSpec(), needs_kv_cache_zeroing=True), "zeroes"),
    ],
)
def test_kv_caches_of_other_kinds_are_refused(kv_cache: Any, said: str):
    plain: dict[str, Any] = {"stages": 1, "drafts": False}
    check_cache(cache(FullAttentionSpec()), **plain)
    with pytest.raises(SettingsError, match=said):
        check_cache(kv_cache, **plain)


@pytest.mark.parametrize("sizes", [(4096,), (2048, 2048)])
def test_the_shape_is_that_of_all_layers(sizes: tuple[int, ...]):
    """One tensor for all layers (0.32), or one for each (0.26)."""
    shape = read_shape(workers(), cache(FullAttentionSpec(block_size=16), sizes=sizes))
    assert shape == KVShape(16, 1024, 4, 1024)


def workers(count: int = 1, stages: tuple[int, ...] = (2,), rank: int = 0) -> Any:
    """vLLM's configuration in the worker of this rank; `stages` have so many layers each."""
    of_stage = stages[rank * len(stages) // count]
    model = SimpleNamespace(
        get_num_layers=lambda parallel: of_stage,  # pyright: ignore[reportUnknownLambdaType]
        get_total_num_hidden_layers=lambda: sum(stages),
    )
    parallel = SimpleNamespace(pipeline_parallel_size=len(stages), world_size=count)
    return SimpleNamespace(parallel_config=parallel, model_config=model)


@pytest.mark.parametrize(
    ("count", "stages", "whole"),
    [(2, (2,), 4), (2, (1, 2), 3), (4, (1, 2), 6), (3, (4, 5, 4), 13)],
    ids=["heads", "layers", "heads and layers", "three stages"],
)
def test_workers_share_the_host_memory_by_what_they_have_of_a_block(
    count: int, stages: tuple[int, ...], whole: int
):
    """All have as many host slots, and together take no more than was asked for."""
    spec, layer_bytes = FullAttentionSpec(block_size=16), 512
    layers = [stages[rank * len(stages) // count] for rank in range(count)]
    shapes = [
        read_shape(
            workers(count, stages, rank),
            cache(spec, sizes=(4 * layer_bytes * own,), layers=own),
        )
        for rank, own in enumerate(layers)
    ]
    assert [shape.block_bytes for shape in shapes] == [layer_bytes * own for own in layers]
    assert {shape.whole_bytes for shape in shapes} == {layer_bytes * whole}
    options = Options.parse({"host_bytes": "1MiB"})
    slots = {options.host_slots(shape.whole_bytes) for shape in shapes}
    (one,) = slots
    taken = sum(one * shape.block_bytes for shape in shapes)
    assert (1 << 20) - layer_bytes * whole < taken <= 1 << 20


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_a_stage_whose_layers_do_not_all_have_kv_is_refused(layers: int):
    with pytest.raises(SettingsError, match=f"this stage has 2 layers, and {layers} with KV"):
        read_shape(
            workers(2, stages=(2, 2)), cache(FullAttentionSpec(block_size=16), layers=layers)
        )


def test_an_unknown_version_is_told_and_works(caplog: pytest.LogCaptureFixture):
    check_start(config(), "0.32.1+cpu")
    assert not caplog.messages
    check_start(config(), "0.99.0")
    assert "0.99.0 was not tried" in caplog.text
    assert version_of("dev") is None
