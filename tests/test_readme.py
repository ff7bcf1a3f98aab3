"""What the README shows runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^make ([a-z-]+)", README, flags=re.MULTILINE)
LINKS = re.findall(r"\]\((?!https?://)([^)#]+)\)", README)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_python_examples_run(number, tmp_path):
    file = tmp_path / "example.py"
    file.write_text(EXAMPLES[number], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(file)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


def test_the_commands_shown_are_targets():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert COMMANDS
    assert set(COMMANDS) <= set(targets)


@pytest.mark.parametrize("link", LINKS)
def test_links_lead_to_files(link):
    assert (ROOT / link).exists()
