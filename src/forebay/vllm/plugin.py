"""What vLLM calls in each of its processes: the connector's name becomes known."""

from __future__ import annotations

import importlib
from typing import Any

NAME = "ForebayConnector"
GROUP = "vllm.general_plugins"
"""The entry points that vLLM calls, among which is `forebay`."""


def register() -> None:
    """Make `ForebayConnector` known to vLLM, by name; a second call changes nothing."""
    # vLLM itself calls this: not before, since importing the factory takes seconds.
    module = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    factory: Any = module.KVConnectorFactory
    if NAME not in factory._registry:
        factory.register_connector(NAME, "forebay.vllm.connector", NAME)
