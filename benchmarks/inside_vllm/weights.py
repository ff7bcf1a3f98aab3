"""Weights for a model that has none, and what only the worker's process can say of itself."""

from __future__ import annotations

import time
from typing import Any

import torch

ATTENTION_GAIN = 2.0
"""Queries, keys and values are this much larger than the rest. Otherwise attention is nearly even
over thousands of tokens, its output nearly nothing, and wrong KV would change no answer."""


class RandomWeights:
    """Mixed into vLLM's worker, whose methods can then be called by name."""

    def fill_with_random_weights(self, std: float, seed: int) -> int:
        """Fill every matrix anew, in place; vectors (norms) become ones. Returns how many."""
        worker: Any = self
        count = 0
        with torch.no_grad():
            for name, parameter in worker.model_runner.get_model().named_parameters():
                count += 1
                if parameter.ndim < 2:
                    parameter.fill_(1.0)
                    continue
                dice = torch.Generator(parameter.device).manual_seed(seed + count)
                gain = ATTENTION_GAIN if "qkv_proj" in name else 1.0
                parameter.normal_(0.0, std * gain, generator=dice)
        return count

    def seconds_for_kv_memory(self) -> float:
        """How long this worker took to set its KV cache up, with the connector's memory."""
        return float(getattr(self, _SECONDS, 0.0))


_SECONDS = "_seconds_for_kv_memory"


def time_kv_memory(worker_class: Any) -> None:
    """Take the time of that in every worker of the class from now on."""
    set_up = worker_class.initialize_from_config

    def timed(self: Any, *arguments: Any, **more: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return set_up(self, *arguments, **more)
        finally:
            setattr(self, _SECONDS, time.perf_counter() - began_s)

    worker_class.initialize_from_config = timed
