"""Garbage collection in a process that holds one engine for the rest of its life."""

from __future__ import annotations

import gc


def keep_out_of_collections() -> None:
    """Call once the engine is up: what lives by now is not walked by collections any more.

    Otherwise a full collection walks the model and the cache in the middle of a step, for nothing.
    It covers the whole process, which is why a command calls it and no library code does.
    """
    gc.collect()
    gc.freeze()
