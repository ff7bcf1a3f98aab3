"""The figures of Forebay inside vLLM, from raw samples whose figures are known. Needs no vLLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import SettingsError

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "inside_vllm"
TOKEN_BYTES = 1000


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import figures as module  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

    yield module
    for name in ("figures", "arms"):
        sys.modules.pop(name, None)


def reply(ttft_ms: float, cached: int = 0) -> dict[str, Any]:
    return {"ttft_ms": ttft_ms, "cached_tokens": cached, "tokens": [1, 2]}


def solo(gpu_ms: float, host_ms: float, hinted_ms: float) -> dict[str, Any]:
    kinds = {"cold": 900.0, "gpu_hit": gpu_ms, "host_hit": host_ms, "hinted": hinted_ms}
    return {"16384": {kind: reply(ms, 10_000) for kind, ms in kinds.items()}}


def backlog(last_ms: float) -> dict[str, Any]:
    return {"users": [[reply(5000.0), reply(last_ms)] for _ in range(10)]}


def write(folder: Path, arm: str, start: str = "one", **workloads: list[dict[str, Any]]) -> None:
    samples = [
        {"workload": name, "round": number, "raw": raw, "counted": raw.get("counted", {})}
        for name, rounds in workloads.items()
        for number, raw in enumerate(rounds)
    ]
    document = {
        "arm": {"name": arm},
        "machine_start": start,
        "token_bytes": TOKEN_BYTES,
        "samples": samples,
    }
    (folder / f"{arm}.json").write_text(json.dumps(document))


def test_figures_are_those_of_the_samples(figures: Any, tmp_path: Path):
    write(tmp_path, "none", no_hits=[{"seconds": 1.0}, {"seconds": 1.0}])
    write(
        tmp_path,
        "forebay",
        solo=[solo(30.0, 44.0, 33.0)],
        backlog_64=[backlog(1200.0)],
        no_hits=[{"seconds": 1.25}, {"seconds": 1.25}],
        itl=[{"device": {"gaps_ms": [10.0] * 5}, "host": {"gaps_ms": [11.0] * 5}}],
    )
    write(tmp_path, "offloading", solo=[solo(20.0, 88.0, 0.0)], backlog_64=[backlog(2500.0)])
    write(tmp_path, "offloading_v1", backlog_64=[backlog(2000.0)])
    write(tmp_path, "all_resident", backlog_64=[backlog(1000.0)])
    (tmp_path / "link.json").write_text(json.dumps({"gb_per_s": [0.4, 0.5]}))
    made = figures.figures(figures.Start.read(tmp_path), "forebay")
    found = {figure.id: figure.value for figure in made}
    assert found["backlog_64_p50"] == pytest.approx(0.8)
    assert found["backlog_64_vs_native_p90"] == pytest.approx(0.6)
    # 10,000 tokens at 0.5 GB/s take 20 ms, and the lowest hit on the GPU was another arm's.
    assert found["hit_16k"] == pytest.approx(44.0 / 40.0)
    assert found["hit_16k_vs_native"] == pytest.approx(0.5)
    assert found["hinted_hit_16k"] == pytest.approx(1.1)
    assert found["no_hits"] == pytest.approx(0.8)
    assert found["itl"] == pytest.approx(1.1)


def test_loaded_bytes_are_held_against_those_used(figures: Any, tmp_path: Path):
    def round_(seconds: float, name: str, loaded: int) -> dict[str, Any]:
        requests = [reply(1.0, 100), reply(1.0, 100)]
        return {"seconds": seconds, "requests": requests, "counted": {name: loaded}}

    ours = round_(2.0, "forebay:loaded_bytes_total", 220 * TOKEN_BYTES)
    theirs = round_(1.5, "vllm:kv_offload_load_bytes_total", 600 * TOKEN_BYTES)
    write(tmp_path, "forebay_small", thrash=[ours])
    write(tmp_path, "offloading_small", thrash=[theirs])
    made = figures.figures(figures.Start.read(tmp_path), "forebay")
    found = {figure.id: figure for figure in made}
    assert found["thrash_vs_native"].value == pytest.approx(0.75)
    assert found["thrash_bytes"].value == pytest.approx(1.1)
    told = found["thrash_bytes"].settings["loaded_over_used"]
    assert told["offloading_small"] == [pytest.approx(3.0)]


def test_arms_of_two_machine_starts_are_not_paired(figures: Any, tmp_path: Path):
    write(tmp_path, "none")
    write(tmp_path, "forebay", start="another")
    with pytest.raises(SettingsError, match="2 machine starts"):
        figures.Start.read(tmp_path)
