"""What is measured: an arm is one way for vLLM to keep KV, on one size of machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GIB = 1 << 30

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
"""The shape of Llama 3.1 8B."""

TINY: dict[str, Any] = {
    **LLAMA_3_8B,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 4096,
}
"""For rehearsals on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large everything is. Lengths are in tokens."""

    model: Mapping[str, Any]
    dtype: str
    block_tokens: int
    host_bytes: int
    step_tokens: int
    max_model_len: int
    gpu: bool

    blocks: int
    all_resident_blocks: int
    small_blocks: int
    most_running: int
    small_most_running: int

    solo_lengths: tuple[int, ...]
    hint_lead_s: float
    users: int
    turns: int
    context: int
    question: int
    no_hit_requests: int
    no_hit_prompt: int
    no_hit_answer: int
    itl_running: int
    itl_answer: int
    itl_arrivals: int
    itl_prompt: int
    itl_gap_s: float
    thrash_requests: int
    thrash_prompt: int
    thrash_answer: int
    convoy_requests: int
    convoy_prefix: int
    convoy_suffix: int

    @property
    def token_bytes(self) -> int:
        """KV of one token in all layers."""
        width = {"bfloat16": 2, "float32": 4}[self.dtype]
        shape = self.model
        per_layer = 2 * shape["num_key_value_heads"] * shape["head_dim"] * width
        return shape["num_hidden_layers"] * per_layer


FULL = Sizes(
    model=LLAMA_3_8B,
    dtype="bfloat16",
    block_tokens=16,
    host_bytes=48 * GIB,
    step_tokens=8192,
    max_model_len=36864,
    gpu=True,
    blocks=10_000,
    all_resident_blocks=20_000,
    small_blocks=4_000,
    most_running=8,
    small_most_running=64,
    solo_lengths=(16_384, 32_768),
    hint_lead_s=0.1,
    users=24,
    turns=3,
    context=12_288,
    question=256,
    no_hit_requests=24,
    no_hit_prompt=4_096,
    no_hit_answer=64,
    itl_running=4,
    itl_answer=240,
    itl_arrivals=12,
    itl_prompt=8_192,
    itl_gap_s=0.1,
    thrash_requests=40,
    thrash_prompt=8_000,
    thrash_answer=64,
    convoy_requests=50,
    convoy_prefix=10_240,
    convoy_suffix=128,
)

REHEARSAL = Sizes(
    model=TINY,
    dtype="float32",
    block_tokens=32,
    host_bytes=64 << 20,
    step_tokens=256,
    max_model_len=768,
    gpu=False,
    blocks=80,
    all_resident_blocks=400,
    small_blocks=60,
    most_running=4,
    small_most_running=16,
    solo_lengths=(256, 512),
    hint_lead_s=0.1,
    users=6,
    turns=3,
    context=256,
    question=32,
    no_hit_requests=6,
    no_hit_prompt=128,
    no_hit_answer=4,
    itl_running=2,
    itl_answer=40,
    itl_arrivals=3,
    itl_prompt=256,
    itl_gap_s=0.05,
    thrash_requests=20,
    thrash_prompt=480,
    thrash_answer=4,
    convoy_requests=8,
    convoy_prefix=320,
    convoy_suffix=32,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A connector (or none) and how its engine is set; `small` is a pool of few blocks."""

    name: str
    connector: Mapping[str, Any] | None = None
    sized_by: str = ""
    """The connector's option for the bytes of its host memory."""
    pool: str = "blocks"
    """The field of `Sizes` with the blocks of vLLM's pool."""
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
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": sizes.dtype,
            "block_size": sizes.block_tokens,
            "max_model_len": sizes.max_model_len,
            "max_num_seqs": getattr(sizes, self.running),
            "max_num_batched_tokens": sizes.step_tokens,
            "enable_prefix_caching": True,
            "worker_extension_cls": "weights.RandomWeights",
            "seed": 0,
        }
        if sizes.gpu:
            # Exact, and independent of what else is on the GPU.
            options["kv_cache_memory_bytes"] = blocks * sizes.block_tokens * sizes.token_bytes
            options["gpu_memory_utilization"] = 0.2
        else:
            options["num_gpu_blocks_override"] = blocks
            options["enforce_eager"] = True
        if self.connector is not None:
            extra = {self.sized_by: sizes.host_bytes}
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
_SMALL: dict[str, Any] = {"pool": "small_blocks", "running": "small_most_running"}
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


def write_model(shape: Mapping[str, Any], folder: Path) -> str:
    """A model without weights: its shape."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape, indent=1), encoding="utf-8")
    return str(folder)
