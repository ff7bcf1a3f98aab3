"""What is built to be installed has everything that the package reads from its folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("scikit_build_core", reason="the build backend is not installed")

ROOT = Path(__file__).resolve().parent.parent
BUILD = """
from scikit_build_core.build import build_sdist, build_wheel
build_sdist("dist")
build_wheel("dist", {"wheel.cmake": "false"})
"""
BUILT = ("*.so", "__pycache__", "*.pyc")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Source archive and wheel, without the native part: that needs a compiler and minutes."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "CMakeLists.txt", ".gitignore"):
        shutil.copy(ROOT / name, source)
    for name in ("src", "native"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns(*BUILT))
    done = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return source / "dist"


def of_the_package() -> set[str]:
    files = {path.relative_to(ROOT / "src") for path in (ROOT / "src" / "forebay").rglob("*")}
    return {
        str(file)
        for file in files
        if (ROOT / "src" / file).is_file() and not any(file.match(each) for each in BUILT)
        if "__pycache__" not in file.parts
    }


def test_a_wheel_has_every_file_of_the_package(dist: Path):
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        inside = {name for name in opened.namelist() if name.startswith("forebay/")}
    wanted = of_the_package()
    assert {"forebay/server/page/index.html", "forebay/py.typed"} <= wanted
    assert inside == wanted


def test_a_source_archive_can_be_built_from_and_has_no_more_than_it_needs(dist: Path):
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    assert {f"src/{file}" for file in of_the_package()} <= inside
    assert {"CMakeLists.txt", "native/CMakeLists.txt", "LICENSE", "README.md"} <= inside
    assert not any(name.startswith(("tests/", "dist/", "docs/")) for name in inside)
