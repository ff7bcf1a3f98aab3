"""What keeps the code liveable: what decides and moves stays light, files stay short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "forebay"
FRAMEWORKS = (
    "torch",
    "transformers",
    "tokenizers",
    "fastapi",
    "starlette",
    "pydantic",
    "msgspec",
    "typer",
    "rich",
    "matplotlib",
    "vllm",
)
USERS = {"engine", "server", "replay", "vllm", "cli", "demo", "measure", "bench", "tune"}
PICTURE = Path("timeline") / "picture.py"
LONGEST_FILE = 420


def light_modules():
    """Every module but those of the packages that use the core, and the one that draws."""
    for file in sorted(SOURCE.rglob("*.py")):
        inside = file.relative_to(SOURCE)
        if inside.parts[0] not in USERS and inside != PICTURE:
            words = ["forebay", *inside.with_suffix("").parts]
            yield ".".join(words[:-1] if words[-1] == "__init__" else words)


def test_importing_what_decides_moves_and_ties_loads_no_framework():
    modules = list(light_modules())
    assert {"forebay", "forebay.core", "forebay.transfer", "forebay.timeline"} <= set(modules)
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(*sorted(set(sys.modules) & set({FRAMEWORKS!r})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def source_files():
    for folder, pattern in (
        ("src", "*.py"),
        ("native", "*.[ch]pp"),
        ("native", "*.h"),
        ("benchmarks", "*.py"),
    ):
        yield from sorted((ROOT / folder).rglob(pattern))


@pytest.mark.parametrize("file", list(source_files()), ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_is_short_enough_to_read(file):
    lines = len(file.read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST_FILE, f"{lines} lines: split it by what it does"
