"""Each ordering rule on the device: held 10 times of 10, and by its mutant never."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)
def test_every_rule_holds_and_every_mutant_is_caught(tmp_path):
    configure = ["cmake", "-S", ROOT, "-B", tmp_path, "-DFOREBAY_PYTHON=OFF", "-DFOREBAY_TESTS=ON"]
    subprocess.run(configure, check=True, capture_output=True, timeout=120)
    build = ["cmake", "--build", tmp_path, "--parallel", "4", "--target", "forebay_cuda_tests"]
    subprocess.run(build, check=True, capture_output=True, timeout=400)
    program = tmp_path / "native" / "tests" / "forebay_cuda_tests"
    ran = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "skipped" not in ran.stdout
    assert ran.stdout.count("ok ") == 11
