"""vLLM with the connector on one GPU, a request at a time: what it answers over KV that is on the
GPU still, and over the same KV from host memory.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_programs import asked, connector, engine_options, served

BLOCK_TOKENS = 16
POSITIONS = 4096
# One at a time: then a hit runs the same kernels over the same shapes, wherever its KV was.
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "block_size": BLOCK_TOKENS,
    "max_num_seqs": 1,
    "num_gpu_blocks_override": 900,
    "max_model_len": POSITIONS,
    "max_num_batched_tokens": 1024,
    "gpu_memory_utilization": 0.2,
    # So that vLLM does not measure what is free, which others may change meanwhile.
    "kv_cache_memory_bytes": 256 << 20,
}
RUNNERS = {"V1 runner": "0", "V2 runner": "1"}
"""vLLM's two model runners: what chooses each."""


class Hits(NamedTuple):
    """The answers of the same requests by name, and all that `vllm_programs.served` told."""

    on_gpu: dict[str, list[int]]
    in_host: dict[str, list[int]]
    broken: dict[str, list[int]]
    """Over loads that bring something else, or nothing."""
    told: dict[str, Any]


def prompts(lengths: Sequence[int], *, seed: int, vocabulary: int) -> list[list[int]]:
    """Random ones of so many tokens each."""
    dice = random.Random(seed)
    return [[dice.randrange(3, vocabulary) for _ in range(length)] for length in lengths]


def plain(prompts: Sequence[list[int]], answer: int) -> list[dict[str, Any]]:
    """A request for each, with an answer of so many tokens."""
    return [asked(f"{place}", prompt, answer) for place, prompt in enumerate(prompts)]


def options(folder: Path, **engine: Any) -> dict[str, Any]:
    """`ENGINE` over `folder`/model with the connector, and what else is said of the engine."""
    transfer = connector(host_bytes="256MiB", min_load_tokens=0)
    return engine_options(folder / "model", kv_transfer_config=transfer, **{**ENGINE, **engine})


def hits(
    folder: Path,
    wanted: list[dict[str, Any]],
    runner: str,
    broken: Mapping[str, bool],
    **engine: Any,
) -> Hits:
    """`wanted` computed, found on the GPU, found in host memory, and found there by an engine that
    is `broken` in that way: the tokens of the second and the third are the same, and all blocks
    are free in the end.
    """
    ways: list[Mapping[str, bool]] = [{}, {}, {"reset": True}, {"reset": True, **broken}]
    told = served(
        folder,
        [{"requests": wanted, **way} for way in ways],
        options(folder, **engine),
        timeout_s=170,
        environment={"VLLM_USE_V2_MODEL_RUNNER": runner},
    )
    _, on_gpu, in_host, wrong = told["rounds"]
    assert [len(answer) for answer in on_gpu.values()] == [each["answer"] for each in wanted]
    assert in_host == on_gpu
    assert told["free"] == told["blocks"] - 1
    return Hits(on_gpu, in_host, wrong, told)


def differing(found: Hits) -> int:
    """Requests that a broken engine answers in another way."""
    return sum(found.broken[name] != answer for name, answer in found.in_host.items())
