"""A pytest plugin for vLLM's own tests of its scheduler: every scheduler gets Forebay's connector.

Every one, that is, to which its test gives no connector itself and whose KV cache is supported. Its
worker says of each copy at once that it is done, and prefix caching is on. What the tests expect of
vLLM must hold all the same. With `FOREBAY_ATTACH=0` only prefix caching is switched on: what fails
then, fails without us. Models are replaced by one that needs no network.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig, ModelConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput

from forebay.transfer.messages import Completion, Outcome, Report
from forebay.vllm.connector import ForebayReport
from forebay.vllm.messages import News, Orders
from forebay.vllm.plugin import NAME

HOST_SLOTS = 64
MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 64,
    "ffn_dim": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 50272,
    "word_embed_proj_dim": 64,
    "max_position_embeddings": 20000,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
_attached = 0


def pytest_configure(config: pytest.Config) -> None:
    """Before any test is imported."""
    folder = Path(os.environ["FOREBAY_ATTACH_FOLDER"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    _replace_model(str(folder))
    _attach(ours=os.environ.get("FOREBAY_ATTACH") != "0")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How often it was attached."""
    terminalreporter.write_line(f"connectors attached: {_attached}")


def _replace_model(folder: str) -> None:
    made = ModelConfig.__init__

    def offline(self: Any, *arguments: Any, **more: Any) -> None:
        if not Path(more.get("model", folder)).is_dir():
            more |= {"model": folder, "skip_tokenizer_init": True}
        made(self, *arguments, **more)

    ModelConfig.__init__ = offline  # pyright: ignore[reportAttributeAccessIssue]


def _attach(*, ours: bool) -> None:
    construct, update = Scheduler.__init__, Scheduler.update_from_output

    def with_connector(self: Any, *arguments: Any, **more: Any) -> None:
        global _attached  # noqa: PLW0603
        config = more["vllm_config"]
        config.cache_config.enable_prefix_caching = True
        given = config.kv_transfer_config
        if given is None or given.kv_connector == NAME:
            # A test may make a second scheduler from the configuration of its first.
            supported = ours and _supported(config, more)
            config.kv_transfer_config = (
                _transfer_config(more["kv_cache_config"]) if supported else None
            )
            _attached += supported
        construct(self, *arguments, **more)

    def with_news(self: Any, output: Any, done: Any) -> Any:
        orders = getattr(output.kv_connector_metadata, "orders", None)
        if orders is not None and done.kv_connector_output is None:
            done.kv_connector_output = KVConnectorOutput(
                kv_connector_worker_meta=ForebayReport(orders.step, ((0, _at_once(orders)),))
            )
        return update(self, output, done)

    Scheduler.__init__ = with_connector
    Scheduler.update_from_output = with_news


def _supported(config: Any, more: dict[str, Any]) -> bool:
    groups = more["kv_cache_config"].kv_cache_groups
    return (
        len(groups) == 1
        and type(groups[0].kv_cache_spec) is FullAttentionSpec
        and config.speculative_config is None
        and config.ec_transfer_config is None
        and config.parallel_config.pipeline_parallel_size == 1
        and config.model_config.runner_type == "generate"
        and not config.model_config.is_multimodal_model
        and not config.model_config.is_diffusion
    )


def _transfer_config(kv_cache_config: Any) -> KVTransferConfig:
    """Ours; and the pool's tensors, which the tests leave away, since they compute nothing."""
    (group,) = kv_cache_config.kv_cache_groups
    page_bytes = group.kv_cache_spec.page_size_bytes
    if not kv_cache_config.kv_cache_tensors:
        size_bytes = page_bytes * kv_cache_config.num_blocks
        kv_cache_config.kv_cache_tensors = [
            KVCacheTensor(
                size=size_bytes,
                layers=group.layer_names,
                layer_stride=size_bytes,
                block_stride=page_bytes,
            )
        ]
    return KVTransferConfig(
        kv_connector=NAME,
        kv_connector_module_path="forebay.vllm.connector",
        kv_role="kv_both",
        kv_connector_extra_config={"host_bytes": HOST_SLOTS * page_bytes},
    )


def _at_once(orders: Orders) -> News:
    """What a worker says whose copies take no time."""
    ended = tuple(
        Completion(each.id, Outcome.DONE, len(each.sources), len(each.sources), 1, 0.0, 1e-6, "")
        for each in orders.submit
    )
    return News(Report(tuple(each.id for each in ended), ended, orders.step), HOST_SLOTS)
