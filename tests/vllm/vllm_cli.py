"""The command `vllm`, where its distribution is a build for CPUs under a name of its own.

python vllm_cli.py serve MODEL ...
"""

from __future__ import annotations

import importlib.metadata
import sys

from vllm.version import __version__

_version = importlib.metadata.version


def version(name: str) -> str:
    """The version of a distribution; by that of `vllm` it knows that it is a build for CPUs."""
    return f"{__version__}+cpu" if name == "vllm" else _version(name)


if __name__ == "__main__":
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
