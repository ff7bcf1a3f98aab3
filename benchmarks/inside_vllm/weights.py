"""Weights for a model that has none, and what only the worker's process can say of itself."""

from __future__ import annotations

import dataclasses
import importlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sizes import Sizes

from forebay.transfer.messages import Direction, Transfer

WEIGHTS_SEED = 1
ATTENTION_GAIN = 2.0
"""Queries, keys and values are this much larger than the rest. Otherwise attention is nearly even
over thousands of tokens, its output nearly nothing, and wrong KV would change no answer."""


def write_model(sizes: Sizes, folder: Path) -> str:
    """The model's shape; and its weights where there is no GPU: a CPU's kernels have weights packed
    as they like, which nobody can fill anew.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(sizes.model), indent=1), encoding="utf-8")
    if not sizes.gpu:
        _save_random(sizes, folder)
    return str(folder)


def _save_random(sizes: Sizes, folder: Path) -> None:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(WEIGHTS_SEED)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                attends = any(part in name for part in ("q_proj", "k_proj", "v_proj"))
                gain = ATTENTION_GAIN if attends else 1.0
                parameter.normal_(0.0, sizes.weights_std * gain)
    model.save_pretrained(folder)


class RandomWeights:
    """Mixed into vLLM's worker, whose methods can then be called by name."""

    def fill_with_random_weights(
        self, std: float, seed: int, attention_gain: float = ATTENTION_GAIN
    ) -> int:
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
                gain = attention_gain if "qkv_proj" in name else 1.0
                parameter.normal_(0.0, std * gain, generator=dice)
        return count

    def seconds_for_kv_memory(self) -> float:
        """How long this worker took to set its KV cache up, with the connector's memory."""
        return float(getattr(self, _SECONDS, 0.0))

    def swap_loaded_blocks(self, on: bool) -> None:
        """From now on (or no more) the middle block of each load of our connector's comes from the
        place of the one before it.
        """
        mover: Any = importlib.import_module("forebay.transfer.native").NativeMover
        if on:
            setattr(mover, _SUBMIT, mover.submit)
            mover.submit = _submit_swapped
        else:
            mover.submit = getattr(mover, _SUBMIT)


_SECONDS = "_seconds_for_kv_memory"
_SUBMIT = "_submit_as_it_is"


def _submit_swapped(mover: Any, transfers: Sequence[Transfer]) -> None:
    getattr(mover, _SUBMIT)([_swapped(each) for each in transfers])


def _swapped(transfer: Transfer) -> Transfer:
    if transfer.direction is not Direction.LOAD or len(transfer.sources) < 2:
        return transfer
    sources, middle = transfer.sources.copy(), len(transfer.sources) // 2
    sources[middle] = sources[middle - 1]
    return dataclasses.replace(transfer, sources=sources)


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
