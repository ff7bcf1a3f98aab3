#!/usr/bin/env python3
"""Run the tests of the half in the scheduler against another vLLM's real scheduler and block pool.

    .venv-vllm/bin/python scripts/vllm_of_source.py FOLDER [PYTEST ARGUMENTS]

FOLDER has that vLLM's package `vllm`, unpacked from its wheel or source distribution; what it was
compiled to is not needed. It runs in the environment of `make vllm`, with the packages that are
there. By default all tests run that compute no real model.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "policy",
    "resets",
    "schedules",
    "groups",
    "stages",
    "near",
    "idle_lives",
    "mixed_lives",
    "hangs",
    "drafts",
    "hints",
    "loras",
    "items",
    "seen",
    "pitfalls",
    "refused",
    "options",
)


def main(folder: str, arguments: list[str]) -> int:
    """Run them there. The status is pytest's."""
    if not (Path(folder) / "vllm" / "__init__.py").is_file():
        raise SystemExit(f"{folder} has no package vllm: name the folder that it lies in")
    sys.path.insert(0, folder)
    own = [folder, str(ROOT / "src"), str(ROOT / "tests" / "shared")]
    # vLLM looks at models in processes of its own.
    os.environ["PYTHONPATH"] = os.pathsep.join([*own, os.environ.get("PYTHONPATH", "")])
    _be_for_a_cpu()
    import pytest  # noqa: PLC0415 - after the path is what it should be
    import vllm  # noqa: PLC0415

    print(f"vLLM {vllm.__version__} from {Path(vllm.__file__).parent}", flush=True)
    files = [str(ROOT / "tests" / "vllm" / f"test_vllm_{name}.py") for name in TESTS]
    return int(pytest.main(arguments or ["-q", "-p", "no:cacheprovider", *files]))


def _be_for_a_cpu() -> None:
    """By its version vLLM tells what it was built for, and sources were built for nothing."""
    told = importlib.metadata.version

    def version(name: str) -> str:
        return "0+cpu" if name == "vllm" else told(name)

    importlib.metadata.version = version


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
