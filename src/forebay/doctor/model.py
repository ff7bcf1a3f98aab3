"""The model's folder: whether it is whole, and what it takes of memory and of a pool."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.doctor.finding import Finding, Level, Machine, Wanted
from forebay.engine.folder import (
    SMOLLM2,
    cache_folder,
    check_folder,
    smollm2_file,
    smollm2_place,
    weight_files,
)
from forebay.errors import ForebayError, ModelError
from forebay.geometry import Geometry, geometry_from_config
from forebay.machine.sizes import show_size

# The built-in model, converted: 542 million bytes in 32 bit.
_CONVERTED_BYTES = 520 << 20
_MOST_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class Weights:
    """What a model takes. `geometry` is None where its configuration does not say."""

    memory_bytes: int
    geometry: Geometry | None


NO_WEIGHTS = Weights(0, None)


def look_at_model(wanted: Wanted, *, element_bytes: int) -> tuple[Weights, list[Finding]]:
    """What `wanted.model` takes, and what is wrong with it; nothing where none was named.

    `element_bytes` is what the engine computes with, whatever the files hold.
    """
    if not wanted.model:
        return NO_WEIGHTS, []
    try:
        folder = _folder(wanted.model)
        if folder is None:
            return NO_WEIGHTS, [_not_here(wanted.model)]
        check_folder(folder)
        weights = Weights(
            sum(_elements(file) for file in weight_files(folder)) * element_bytes,
            _geometry(folder, element_bytes),
        )
    except ModelError as error:
        what, _, todo = str(error).partition(": ")
        return NO_WEIGHTS, [
            Finding("model", Level.FAIL, what, f"{wanted.model} cannot be served", todo)
        ]
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
        todo = "let the user that serves read the folder: chmod -R a+rX FOLDER"
        return NO_WEIGHTS, [Finding("model", Level.FAIL, why, "the model cannot be read", todo)]
    return weights, [Finding("model", Level.OK, _described(folder, weights, element_bytes))]


def check_cache_folder(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """Where converted models are kept: writable, with room."""
    folder = cache_folder()
    if wanted.model == SMOLLM2 and _converted():
        return
    place = next((each for each in (folder, *folder.absolute().parents) if each.exists()), folder)
    todo = "export FOREBAY_CACHE=FOLDER to another one"
    needed = wanted.model == SMOLLM2
    if not os.access(place, os.W_OK | os.X_OK):
        yield Finding(
            "cache folder",
            Level.FAIL if needed else Level.NOTE,
            f"{folder} cannot be written",
            f"{SMOLLM2} is converted there at its first start",
            todo,
        )
        return
    disk = machine.disk(folder)
    if disk is None:
        return
    read = f"{folder}: {show_size(disk.free_bytes)} free"
    if disk.free_bytes < _CONVERTED_BYTES:
        level = Level.FAIL if needed else Level.NOTE
        yield Finding("cache folder", level, read, f"{SMOLLM2} may not fit there", todo)
    else:
        yield Finding("cache folder", Level.OK, read)


def _folder(model: str) -> Path | None:
    """The model's folder, as a server would find it; None where its first start makes it."""
    if model == SMOLLM2:
        folder = smollm2_place(smollm2_file())
        return folder if folder.is_dir() else None
    folder = Path(model)
    if not folder.is_dir():
        # The doctor also works where the hub's client is not installed, and says so elsewhere.
        with suppress(ModuleNotFoundError):
            from forebay.engine.hub import cached_folder, is_hub_id  # noqa: PLC0415

            if is_hub_id(model):
                return cached_folder(model)
    return folder


def _not_here(model: str) -> Finding:
    if model == SMOLLM2:
        read = f"{model} is in its package, and is converted at its first start"
        return Finding("model", Level.OK, read)
    return Finding(
        "model",
        Level.NOTE,
        f"there is no folder {model} here, and nothing of this name in the hub's cache",
        "its size does not count here; a server downloads it at its first start, if the hub has it",
        f"hf download {model.partition('@')[0]}, and ask again",
    )


def _converted() -> bool:
    try:
        return _folder(SMOLLM2) is not None
    except (ForebayError, OSError):
        return False


def _elements(file: Path) -> int:
    """How many numbers a safetensors file holds, by its header.

    Raises ModelError for a file that is cut off or another thing.
    """
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > _MOST_HEADER_BYTES:
            raise ModelError(f"{file} is no safetensors file: copy it anew")
        try:
            header: dict[str, Any] = json.loads(opened.read(size))
            tensors = [each for name, each in header.items() if name != "__metadata__"]
            ends = [each["data_offsets"][1] for each in tensors]
            count = sum(math.prod(each["shape"]) for each in tensors)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ModelError(f"{file} is no safetensors file: copy it anew") from error
    if file.stat().st_size < 8 + size + max(ends, default=0):
        raise ModelError(f"{file} is cut off: copy it anew")
    return count


def _geometry(folder: Path, element_bytes: int) -> Geometry | None:
    """The shape of its KV; None where only the model itself can say. Raises ModelError."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{folder / 'config.json'} is damaged: copy it anew") from error
    try:
        return geometry_from_config(config, element_bytes=element_bytes)
    except (ForebayError, AttributeError):
        return None


def _described(folder: Path, weights: Weights, element_bytes: int) -> str:
    text = f"{folder}: {show_size(weights.memory_bytes)} of weights in {8 * element_bytes} bit"
    if weights.geometry is not None:
        text += f", {show_size(weights.geometry.token_bytes)} of KV a token"
    return text
