"""What is measured: an arm is one way for vLLM to keep KV, on one size of machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sizes import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A connector (or none) and how its engine is set."""

    name: str
    connector: Mapping[str, Any] | None = None
    sized_by: str = ""
    """The connector's option for the bytes of its host memory."""
    pool: str = "blocks"
    """The field of `Sizes` with the blocks of vLLM's pool."""
    host: str = "host_bytes"
    """The one with the bytes of its host memory."""
    running: str = "most_running"
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def ours(self) -> bool:
        """Whether it is Forebay's connector."""
        return self.sized_by == "host_bytes"

    def engine_options(self, sizes: Sizes, model: str) -> dict[str, Any]:
        """The arguments of vLLM's engine."""
        blocks = getattr(sizes, self.pool)
        options: dict[str, Any] = {
            "model": model,
            "skip_tokenizer_init": True,
            "dtype": sizes.dtype,
            "block_size": sizes.block_tokens,
            "max_model_len": sizes.max_model_len,
            "max_num_seqs": getattr(sizes, self.running),
            "max_num_batched_tokens": sizes.step_tokens,
            "enable_prefix_caching": True,
            "worker_extension_cls": "weights.RandomWeights",
            "seed": 0,
            # Whole distributions can be asked for.
            "max_logprobs": -1,
        }
        if sizes.gpu:
            # Exact, and independent of what else is on the GPU.
            options["kv_cache_memory_bytes"] = blocks * sizes.block_tokens * sizes.token_bytes
            options["gpu_memory_utilization"] = 0.2
            # Filled with random numbers once it is up.
            options["load_format"] = "dummy"
        else:
            options["num_gpu_blocks_override"] = blocks
            # Of the machine's memory, which vLLM asks to be free: others use it too.
            options["gpu_memory_utilization"] = 0.3
            options["enforce_eager"] = True
        if self.connector is not None:
            extra = {self.sized_by: getattr(sizes, self.host)}
            options["kv_transfer_config"] = {
                **self.connector,
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
        return options


_FOREBAY = {
    "kv_connector": "ForebayConnector",
    "kv_connector_module_path": "forebay.vllm.connector",
}
_V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
_SMALL: dict[str, Any] = {
    "pool": "small_blocks",
    "host": "small_host_bytes",
    "running": "small_most_running",
}
_RUNNERS: dict[str, dict[str, str]] = {"": {}, "_v1": _V1}
_POOLS: dict[str, dict[str, Any]] = {"": {}, "_small": _SMALL}


def _arms(name: str, connector: Mapping[str, Any], sized_by: str) -> list[Arm]:
    return [
        Arm(
            name=name + runner + size,
            connector=connector,
            sized_by=sized_by,
            environment=environment,
            **places,
        )
        for runner, environment in _RUNNERS.items()
        for size, places in _POOLS.items()
    ]


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in [
        Arm(name="none"),
        Arm(name="none_v1", environment=_V1),
        Arm(name="none_small", **_SMALL),
        Arm(name="all_resident", pool="all_resident_blocks"),
        Arm(name="all_resident_v1", pool="all_resident_blocks", environment=_V1),
        *_arms("forebay", _FOREBAY, "host_bytes"),
        *_arms("offloading", {"kv_connector": "OffloadingConnector"}, "cpu_bytes_to_use"),
        *_arms("simple", {"kv_connector": "SimpleCPUOffloadConnector"}, "cpu_bytes_to_use"),
    ]
}
"""By name; those without `_v1` use the model runner that vLLM chooses."""

NONE = ("none", "none_v1")
RESIDENT = ("all_resident", "all_resident_v1")
OURS = ("forebay", "forebay_v1")
NATIVE = ("offloading", "offloading_v1", "simple", "simple_v1")
"""vLLM's own ways to keep KV in host memory."""


def offline_environment() -> dict[str, str]:
    """Set before vLLM is imported: no network, and the natives' fastest way to pin."""
    here = str(Path(__file__).resolve().parent)
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        # Pins with 16 threads where PyTorch allocates: 13 s for 48 GiB instead of 38 to 48.
        "PYTORCH_CUDA_ALLOC_CONF": (
            "pinned_use_cuda_host_register:True,pinned_num_register_threads:16"
        ),
        "BENCHMARK_FOLDER": here,
    }
