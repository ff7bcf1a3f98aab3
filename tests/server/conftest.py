from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from server_rig import Served, serving, tiny_model

from forebay.config import BatchSettings
from forebay.engine.models import LoadedModel
from forebay.engine.settings import EngineSettings
from forebay.server.settings import ServerSettings


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    return tiny_model()


@pytest.fixture
def serve(tiny: LoadedModel) -> Iterator[Callable[..., Served]]:
    """`serve(batch=..., engine options, settings=...)`: a server of the test's own."""
    open_servers: list[Any] = []

    def start(
        settings: ServerSettings | None = None,
        batch: BatchSettings | None = None,
        **options: Any,
    ) -> Served:
        options = {"device_tokens": 4096, "host_bytes": 1 << 24, "block_tokens": 16} | options
        engine = EngineSettings(batch=batch or BatchSettings(), **options)
        context = serving(tiny, settings or ServerSettings(port=0), engine)
        served = context.__enter__()
        open_servers.append(context)
        return served

    yield start
    for context in open_servers:
        context.__exit__(None, None, None)


@pytest.fixture(scope="module")
def served(tiny: LoadedModel) -> Iterator[Served]:
    """One server for a module's tests: no keys, on loopback."""
    engine = EngineSettings(device_tokens=4096, host_bytes=1 << 24, block_tokens=16)
    with serving(tiny, ServerSettings(port=0), engine) as served:
        yield served
