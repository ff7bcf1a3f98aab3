"""Models of the Hugging Face hub: downloaded once into its client's own cache, used from there.

What is fetched is configuration, tokenizer and safetensors of the repository's top folder: no code
and no pickled weights. `HF_HUB_OFFLINE`, `HF_HOME`, `HF_ENDPOINT` and `HF_TOKEN` mean what they
mean to every client of the hub.
"""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from forebay.errors import ModelError

_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?(@(?P<revision>[\w.][\w./-]{0,254}))?", re.ASCII)
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
# Other formats lie in sub-folders, and Mistral's own weights beside the others'.
_UNWANTED = ["*/*", "consolidated*"]


def is_hub_id(name: str) -> bool:
    """Whether `name` can be NAME or OWNER/NAME, with or without @REVISION."""
    return _ID.fullmatch(name) is not None and not name.startswith(".") and ".." not in name


def hub_folder(name: str) -> Path:
    """The folder of the snapshot of `name`, downloaded unless it is there. Raises ModelError."""
    repository, _, revision = name.partition("@")
    try:
        folder = Path(
            snapshot_download(
                repository,
                revision=revision or None,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
            )
        )
    except GatedRepoError as error:
        raise ModelError(
            f"{repository} is gated: accept its terms on the hub, and set HF_TOKEN to a token of "
            "that account"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"there is neither a folder {name!r} here nor a model of this name on the hub; for a "
            "private one set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{repository} has no revision {revision or 'main'} on the hub") from error
    except IncompleteSnapshotError as error:
        raise ModelError(
            f"the cached download of {name} is incomplete and the hub cannot be reached: go on "
            "with it where there is a network"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"there is no folder {name!r} here, {name} is not in the hub's cache, and the hub "
            "cannot be reached (is there a network, and HF_HUB_OFFLINE not set?)"
        ) from error
    except HFValidationError as error:
        raise ModelError(f"{name!r} is no folder, and no name that the hub could have") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(f"{name} cannot be downloaded: {_first_line(error)}") from error
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{name} has no safetensors: pickled weights are not read, since reading them runs "
            "their code; take a conversion of the model"
        )
    return folder


def cached_folder(name: str) -> Path | None:
    """The folder of `name` in the hub's cache, without asking the hub; None if it is not there."""
    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, local_files_only=True))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError):
        return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
