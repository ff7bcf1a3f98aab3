"""Random models that vLLM guesses drafts for, by each of its ways.

Each saves a model in `folder`/model, with what guesses for it, and returns what of vLLM's
`speculative_config` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_models
import torch

Guess = Callable[..., dict[str, Any]]


def by_ngrams(folder: Path, dtype: torch.dtype = torch.float32, **shape: Any) -> dict[str, Any]:
    _llama(dtype, **shape).save_pretrained(folder / "model")
    return {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def by_a_model(folder: Path, dtype: torch.dtype = torch.float32, **shape: Any) -> dict[str, Any]:
    """One that is right most of the time: as the model itself, but for its last layer."""
    model = _llama(dtype, **shape)
    model.save_pretrained(folder / "model")
    for weight in model.model.layers[-1].mlp.parameters():
        weight.data *= 0.9
    model.save_pretrained(folder / "drafts")
    return {"method": "draft_model", "model": str(folder / "drafts")}


def by_eagle(folder: Path, dtype: torch.dtype = torch.float32, **shape: Any) -> dict[str, Any]:
    _llama(dtype, **shape).save_pretrained(folder / "model")
    tiny_models.save_eagle(folder / "drafts", dtype, **shape)
    return {"method": "eagle", "model": str(folder / "drafts")}


def by_eagle3(folder: Path, dtype: torch.dtype = torch.float32, **shape: Any) -> dict[str, Any]:
    _llama(dtype, **shape, num_hidden_layers=8).save_pretrained(folder / "model")
    tiny_models.save_eagle3(folder / "drafts", dtype, **shape)
    return {"method": "eagle3", "model": str(folder / "drafts")}


def by_mtp(folder: Path, dtype: torch.dtype = torch.float32, **shape: Any) -> dict[str, Any]:
    tiny_models.save_with_mtp(folder / "model", dtype, **shape)
    return {"method": "mtp"}


def _llama(dtype: torch.dtype, **shape: Any) -> Any:
    model: Any = tiny_models.build("llama", **shape)
    return model.to(dtype)
