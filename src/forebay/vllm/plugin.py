"""What vLLM calls in each of its processes: the connector's name becomes known."""

from __future__ import annotations

NAME = "ForebayConnector"


def register() -> None:
    """Make `ForebayConnector` known to vLLM, by name; a second call changes nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,  # pyright: ignore[reportMissingImports]
    )

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "forebay.vllm.connector", NAME)
