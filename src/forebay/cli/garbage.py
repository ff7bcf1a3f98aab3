"""Garbage collection in a process that holds one engine: off while it cannot find anything.

A full collection walks every object there is, for nothing: half a second for what PyTorch and
Transformers leave, and in the middle of a step for the model and the cache. What stays for good is
kept out of them. That covers the whole process, which is why a command does it and no library code.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def few_collections() -> Iterator[None]:
    """Around a command: what is kept out meanwhile is given up in the end.

    What is still kept out when the interpreter ends would never be freed.
    """
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def imports_kept_out() -> Iterator[None]:
    """Around imports: no collection meanwhile, and none walks what they made.

    Those of PyTorch and Transformers would set off many, a seventh of the time that they take.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def keep_out() -> None:
    """Call it once the engine is up: what lives by now is not walked by later collections."""
    gc.collect()
    gc.freeze()
