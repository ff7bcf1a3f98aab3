"""Builds and runs the C++ tests: plain, under the thread sanitizer, under address and undefined."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake and a compiler")


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (
        f"{' '.join(command)}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    )


def build_and_test(sanitize: str) -> None:
    build = f"build/native-tests-{sanitize.split(',', maxsplit=1)[0] or 'plain'}"
    run(
        "cmake", "-S", ".", "-B", build, "-DFOREBAY_PYTHON=OFF", "-DFOREBAY_TESTS=ON",
        f"-DFOREBAY_SANITIZE={sanitize}",
    )  # fmt: skip
    run("cmake", "--build", build, "--parallel", "2")
    run("ctest", "--test-dir", build, "--output-on-failure")


@pytest.mark.timeout(600)
def test_core() -> None:
    build_and_test("")


@pytest.mark.timeout(600)
def test_core_under_the_thread_sanitizer() -> None:
    build_and_test("thread")


@pytest.mark.timeout(600)
def test_core_under_the_address_and_undefined_sanitizers() -> None:
    build_and_test("address,undefined")
