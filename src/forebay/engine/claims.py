"""What a model's configuration claims, held against its weights before anything is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from forebay.engine.folder import read_json, weight_files
from forebay.errors import ModelError

_OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def check_claims(folder: Path) -> None:
    """Raises ModelError for damaged weights, and for more layers than there are tensors.

    Layers are made before their weights are missed, in time and memory without bound.
    """
    for name in _OBJECTS:
        if (folder / name).exists() and not isinstance(read_json(folder / name), dict):
            raise ModelError(f"{folder / name} is damaged: copy it anew")
    config = read_json(folder / "config.json")
    tensors = sum(_tensors(file) for file in weight_files(folder))
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        _check_layers(part, tensors, folder)


def _check_layers(config: dict[str, Any], tensors: int, folder: Path) -> None:
    for name in _LAYERS:
        layers = config.get(name)
        if isinstance(layers, int) and layers > tensors:
            raise ModelError(
                f"{folder / 'config.json'} claims {layers} layers, and there are weights for "
                f"{tensors} tensors: they do not belong together"
            )


def _tensors(weights: Path) -> int:
    """How many a file holds. Reads its header alone, which the library checks."""
    try:
        with safe_open(weights, framework="np") as opened:
            return len(opened.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{weights} is damaged: copy it anew ({error})") from error
