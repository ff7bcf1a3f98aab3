"""Tests inside vLLM. They run in the environment of `make vllm`, and skip elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved Llama with random weights, whose heads have a size that vLLM knows on a CPU."""
    import tiny_models  # noqa: PLC0415 - needs transformers, and not all tests here do

    folder = tmp_path_factory.mktemp("llama")
    tiny_models.build("llama", head_dim=32).save_pretrained(folder)
    return folder


@pytest.fixture
def toy(tiny_llama: Path):
    """Makes toy engines, and closes them."""
    from vllm_toy import ToyEngine  # noqa: PLC0415 - needs vLLM, and not all tests here do

    yield from _made(ToyEngine, tiny_llama)


@pytest.fixture
def groups(tiny_llama: Path):
    """Makes toy engines whose models have several groups of layers, and closes them."""
    from vllm_toy_groups import GroupsEngine  # noqa: PLC0415 - the same

    yield from _made(GroupsEngine, tiny_llama)


def _made(kind: Callable[..., Any], model: Path) -> Iterator[Callable[..., Any]]:
    engines: list[Any] = []

    def make(**options: Any) -> Any:
        engines.append(kind(model, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
