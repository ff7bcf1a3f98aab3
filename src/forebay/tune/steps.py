"""What a model takes, as the engine runs it, by the host's clock: the same on a CPU and a GPU.

A step's logits are copied to the host as the engine copies them, so on a GPU what that copy waits
for is in it too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from forebay.engine.models import LoadedModel
from forebay.engine.runner import Chunk
from forebay.engine.startup import warm_up
from forebay.geometry import Geometry
from forebay.measure.decode import filled_runner


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """Prefills of `prefill_tokens`, and decode steps of `requests` of `context_tokens` each."""

    requests: int
    context_tokens: int
    prefill_tokens: int

    def within(self, most_tokens: int) -> StepSizes:
        """The same, no longer than a model's context."""
        return replace(
            self,
            context_tokens=min(self.context_tokens, most_tokens),
            prefill_tokens=min(self.prefill_tokens, most_tokens),
        )


class ModelSteps:
    """Steps of `sizes`, lowered to the model's context. Takes a device pool of its own."""

    def __init__(self, loaded: LoadedModel, geometry: Geometry, sizes: StepSizes) -> None:
        self.sizes = sizes = sizes.within(loaded.context_tokens)
        requests, longest = sizes.requests, max(sizes.context_tokens, sizes.prefill_tokens)
        self._runner, tables = filled_runner(loaded, geometry, requests, longest)
        self._decode = [Chunk(np.array([5]), sizes.context_tokens - 1, row) for row in tables]
        self._prefill = [Chunk(np.full(sizes.prefill_tokens, 5), 0, tables[0])]
        warm_up(self._runner)

    def prefill_s(self) -> float:
        """Seconds of one prefill."""
        return self._timed(self._prefill)

    def decode_s(self) -> float:
        """Seconds of one decode step of all requests."""
        return self._timed(self._decode)

    def _timed(self, chunks: list[Chunk]) -> float:
        began_s = time.perf_counter()
        self._runner.on_host(self._runner.forward(chunks))
        return time.perf_counter() - began_s
