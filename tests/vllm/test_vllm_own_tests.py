"""vLLM's own tests of its scheduler hold with the connector attached to every scheduler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "vllm_own_tests.py"
NOT_TO_BE_HAD = 77


@pytest.mark.timeout(1200)
def test_what_vllm_tests_of_its_scheduler_holds_with_the_connector():
    done = subprocess.run(
        [sys.executable, SCRIPT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    if done.returncode == NOT_TO_BE_HAD:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
