"""Garbage collection in a process that holds one engine: off while it cannot find anything."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collections_off() -> Iterator[None]:
    """No collection meanwhile: around imports, which only make what stays.

    Those of PyTorch and Transformers would set off many, a seventh of the time that they take.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def out_of_collections() -> Iterator[None]:
    """Enter once the engine is up: what lives by now is not walked by collections meanwhile.

    Otherwise a full collection walks the model and the cache in the middle of a step, for nothing.
    It covers the whole process, which is why a command calls it and no library code does. Given up
    at the end, since what is still kept out when the interpreter ends is never freed.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
