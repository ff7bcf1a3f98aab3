#!/usr/bin/env python3
"""Run vLLM's own tests of its scheduler with Forebay's connector attached to every scheduler.

    scripts/vllm_own_tests.py [--cache FOLDER] [--long]

For the environment of `make vllm`. The tests come from vLLM's source distribution, which is pinned
by hash and kept in the cache; nothing of it is in this repository. They run twice, without and with
the connector: whatever passes without must pass with it. Exit status 0: it does; 1: it does not;
77: the sources cannot be had.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path

URL = (
    "https://files.pythonhosted.org/packages/d5/df/"
    "5471312c76e335eaa2b8333e87ea39f0d37bfe24f10a582620e34ff12e33/vllm-0.32.0.tar.gz"
)
SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
NOT_TO_BE_HAD = 77
TESTS = (
    "test_scheduler.py",
    "test_async_scheduler.py",
    "test_deferred_block_free.py",
    "test_priority_preemption_bug.py",
    "test_prefix_replay.py",
)
"""Of `tests/v1/core`: those that drive vLLM's scheduler. Others there test parts of it alone."""
LONG = ("test_priority_scheduler_random.py",)
"""The same, and take minutes."""
OTHERWISE = {
    "test_reset_connector_cache_no_connector_is_no_op_success": "is about having no connector",
    "test_prefix_cache_stats_counted_once_for_retried_then_scheduled_request": (
        "reads the orders of vLLM's example connector"
    ),
}
"""Tests that cannot hold with a connector, and why."""
LEAST_ATTACHED = 80
ROOT = Path(__file__).resolve().parents[1]


def fetch(cache: Path) -> Path:
    """The folder with vLLM's `tests`. Raises OSError where it cannot be had."""
    folder = cache / f"vllm-tests-{SHA256[:16]}"
    if (folder / "tests").is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as place:
        archive = Path(place) / "vllm.tar.gz"
        with urllib.request.urlopen(URL, timeout=60) as source, archive.open("wb") as target:
            shutil.copyfileobj(source, target)
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != SHA256:
            raise OSError(f"{URL} has the hash {found}, and should have {SHA256}")
        with tarfile.open(archive) as packed:
            members = [each for each in packed if each.name.split("/")[1:2] == ["tests"]]
            packed.extractall(place, members, filter="data")
        (unpacked,) = Path(place).glob("vllm-*/tests")
        folder.mkdir(exist_ok=True)
        unpacked.rename(folder / "tests")
    return folder


def run(folder: Path, place: Path, tests: Iterable[str], *, attach: bool) -> tuple[set[str], int]:
    """Names of the tests that passed, and how many schedulers had the connector."""
    report = place / f"attached-{attach}.xml"
    paths = [ROOT / "tests" / "vllm", folder, *(each for each in sys.path if each)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "FOREBAY_ATTACH": str(int(attach)),
        "FOREBAY_ATTACH_FOLDER": str(place / "model"),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # Not their conftest.py: it imports what only vLLM's developers have installed.
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "attach_connector"),
            *("-p", "no:cacheprovider", "-c", os.devnull, "-W", "ignore", "--tb=short"),
            *(f"--rootdir={folder}", f"--junitxml={report}"),
            *(str(folder / "tests" / "v1" / "core" / name) for name in tests),
        ],
        env=environment,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    attached = re.search(r"connectors attached: (\d+)", done.stdout)
    if not report.exists() or attached is None:
        raise RuntimeError(done.stdout[-3000:] + done.stderr[-3000:])
    (place / f"attached-{attach}.log").write_text(done.stdout, encoding="utf-8")
    passed = {
        f"{case.get('classname')}::{case.get('name')}"
        for case in ET.parse(report).iter("testcase")
        if not any(each.tag in ("failure", "error", "skipped") for each in case)
    }
    return passed, int(attached[1])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("--cache", type=Path, default=base / "forebay")
    parser.add_argument("--long", action="store_true", help="those too that take minutes")
    options = parser.parse_args()
    tests = (*TESTS, *(LONG if options.long else ()))
    try:
        folder = fetch(options.cache)
    except OSError as error:
        print(f"vLLM's sources cannot be had: {error}", file=sys.stderr)
        return NOT_TO_BE_HAD
    with tempfile.TemporaryDirectory() as place:
        without, _ = run(folder, Path(place), tests, attach=False)
        with_, attached = run(folder, Path(place), tests, attach=True)
        broken = sorted(
            name for name in without - with_ if name.split("::")[-1].split("[")[0] not in OTHERWISE
        )
        if broken:
            print((Path(place) / "attached-True.log").read_text(encoding="utf-8")[-8000:])
    print(f"{len(without)} of vLLM's tests pass without the connector, {len(with_)} with it; ")
    print(f"attached to {attached} schedulers; broken by it: {broken or 'none'}")
    return 1 if broken or attached < LEAST_ATTACHED else 0


if __name__ == "__main__":
    sys.exit(main())
