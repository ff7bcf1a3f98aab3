"""Saves over a store that computes paths, and a mover that takes note."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from computed_paths import KEY_BYTES, ComputedPaths

from forebay.cache.parts import Parts
from forebay.cache.saves import Saves
from forebay.config import CacheSettings
from forebay.core.store import Store
from forebay.transfer.messages import Transfer

BLOCK_BYTES, SLOTS = 1 << 20, 64


class Sent:
    """A mover that takes note of what it is given."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []

    def submit(self, transfers: Sequence[Transfer]) -> None:
        self.transfers += transfers


class Computed:
    """Saves over a store that computes paths."""

    def __init__(self, *, step_blocks: int = 0, **more: Any) -> None:
        settings = CacheSettings(
            block_tokens=16,
            block_bytes=BLOCK_BYTES,
            device_slots=SLOTS,
            host_slots=SLOTS,
            **more,
        )
        self.store = Store(KEY_BYTES, SLOTS, SLOTS)
        self.sent = Sent()
        parts = Parts.over(settings, self.store, cast("Any", self.sent))
        self.saves = Saves(parts, step_blocks=step_blocks)
        self.compute = ComputedPaths(self.store).compute

    def saved(self) -> list[list[int]]:
        """The device slots of each transfer that a flush starts."""
        self.sent.transfers.clear()
        self.saves.flush(0.0)
        return [each.sources.tolist() for each in self.sent.transfers]
