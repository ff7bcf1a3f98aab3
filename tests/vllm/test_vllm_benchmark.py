"""The benchmark inside vLLM, rehearsed on a CPU: all it writes, and what its figures say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "inside_vllm"


def ran(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, PROGRAM, *map(str, arguments)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        },
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    ran("run", folder, "none:no_hits=2+forebay:accuracy,solo,no_hits=2", "--rehearse")
    return folder


@pytest.fixture(scope="module")
def figures(folder: Path) -> dict[str, Any]:
    told = ran("figures", folder, "--json", folder / "figures.json")
    assert "backlog_64_p50: not measured, goal >= 0.8" in told
    made = json.loads((folder / "figures.json").read_text())["figures"]
    return {figure["id"]: figure for figure in made}


def samples(folder: Path, arm: str) -> list[dict[str, Any]]:
    return json.loads((folder / f"{arm}.json").read_text())["samples"]


@pytest.mark.timeout(420)
def test_answers_over_host_memory_are_those_over_the_device(figures: dict[str, Any]):
    """And one block of each load in another's place is far from them."""
    assert figures["divergence"]["value"] == 0.0
    assert figures["divergence_swapped"]["value"] > 0.1
    assert figures["divergence_recomputed"]["value"] < 1e-6
    found = figures["divergence"]["settings"]["cached_tokens"][0]
    assert found["gpu"] == found["host"] == found["swapped"] > 0
    assert found["recomputed"] == 0
    assert len(figures["divergence"]["samples"]) == len(figures["divergence_swapped"]["samples"])


@pytest.mark.timeout(420)
def test_rounds_of_two_arms_alternate(folder: Path):
    began = {
        (sample["began_unix_s"], arm, sample["round"])
        for arm in ("none", "forebay")
        for sample in samples(folder, arm)
        if sample["workload"] == "no_hits"
    }
    order = [(arm, round_) for _, arm, round_ in sorted(began)]
    assert order == [("none", 0), ("forebay", 0), ("forebay", 1), ("none", 1)]


@pytest.mark.timeout(420)
def test_what_was_measured_can_be_told_from_its_file(folder: Path):
    told = json.loads((folder / "forebay.json").read_text())
    assert not told["broken"]
    assert {"machine_start", "versions", "commit", "environment", "sizes"} <= set(told)
    assert told["command"][:3] == ["inside_vllm", "run", "FOLDER"]
    assert told["engine"]["kv_transfer_config"]["kv_connector"] == "ForebayConnector"
    solo = next(sample["raw"] for sample in told["samples"] if sample["workload"] == "solo")
    for kinds in solo.values():
        assert kinds["host_hit"]["cached_tokens"] == kinds["gpu_hit"]["cached_tokens"] > 0
        assert kinds["host_hit"]["tokens"] == kinds["gpu_hit"]["tokens"]
        assert kinds["cold"]["cached_tokens"] == 0
