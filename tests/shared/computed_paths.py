"""Paths of blocks that a store computes and nobody leases any more."""

from __future__ import annotations

from forebay.core.arrays import Ids
from forebay.core.device_pool import LeaseKind
from forebay.core.store import Store

KEY_BYTES = 16


class ComputedPaths:
    """Computes paths in `store`, whose keys have `KEY_BYTES` bytes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._count = 0

    def compute(self, blocks: int) -> Ids:
        """A path of its own, root first, on the device alone."""
        made = self._store.compute(blocks, protected=False)
        assert made is not None
        self._count += 1
        keys = b"".join(f"{self._count:8}{each:8}".encode() for each in range(blocks))
        self._store.publish(b"", keys, 0, made)
        self._store.release(made, LeaseKind.HARD)
        return made
