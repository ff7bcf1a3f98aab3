"""What Forebay says in vLLM's log: in its form and at its level, and once how large all is."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager

from forebay.config import CacheSettings
from forebay.machine.sizes import show_size
from forebay.release import installed_version

_logger = logging.getLogger("forebay.vllm")


def join_log() -> None:
    """Give what Forebay logs to vLLM's handlers, which by themselves take only what vLLM logs.

    A process that has set up logging of its own is left as it is. Idempotent.
    """
    ours, theirs = logging.getLogger("forebay"), logging.getLogger("vllm")
    if ours.hasHandlers() or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = False


@contextmanager
def warnings_told() -> Generator[None]:
    """Log what is warned of here, which would be a line of its own form on standard error."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        yield
    for each in said:
        _logger.warning("Forebay: %s", each.message)


def tell_sizes(settings: CacheSettings) -> None:
    """Log the cache's sizes."""
    _logger.info(
        "Forebay %s in mode %s: host memory for %s tokens (%s), vLLM's own for %s; blocks of %d",
        installed_version(),
        settings.mode.value,
        f"{settings.host_slots * settings.block_tokens:,}",
        show_size(settings.host_slots * settings.block_bytes),
        f"{settings.device_slots * settings.block_tokens:,}",
        settings.block_tokens,
    )
