"""What vLLM calls in each of its processes: the connector's name becomes known."""

from __future__ import annotations

import importlib
import logging
from typing import Any

NAME = "ForebayConnector"
_MODULE = "forebay.vllm.connector"
GROUP = "vllm.general_plugins"
"""The entry points that vLLM calls, among which is `forebay`."""

_logger = logging.getLogger("forebay.vllm")


def register() -> None:
    """Make `ForebayConnector` known to vLLM, by name; a second call changes nothing.

    vLLM calls it wherever it is installed, also for who does not use it, and ends where it raises:
    a vLLM that knows connectors in another way is told of in the log.
    """
    try:
        # vLLM itself calls this: not before, since importing the factory takes seconds.
        module = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
        factory: Any = module.KVConnectorFactory
        if NAME not in factory._registry:
            factory.register_connector(NAME, _MODULE, NAME)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        _logger.warning(
            "this vLLM does not take %s by its name (%s): to use it, add "
            '"kv_connector_module_path": "%s"',
            NAME,
            error,
            _MODULE,
        )
