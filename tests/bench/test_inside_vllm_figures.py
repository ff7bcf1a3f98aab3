"""The figures of Forebay inside vLLM, from raw samples whose figures are known. Needs no vLLM."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.errors import SettingsError
from forebay.measure.report import document

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FOLDER = BENCHMARKS / "inside_vllm"
KEPT = sorted(file for file in BENCHMARKS.glob("results/*/vllm/*") if file.is_dir())
STOPPED = {"beside-all-natives": ["simple_small"]}
"""Arms that did not reach their end, and are told so on the page of figures."""
TOKEN_BYTES = 1000
ASKED = 1000


@pytest.fixture
def module_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the benchmark, as the benchmark itself would."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for file in FOLDER.glob("[!_]*.py"):  # Not __main__: that is pytest's own.
        sys.modules.pop(file.stem, None)


@pytest.fixture
def figures(module_of: Any) -> Any:
    return module_of("figures")


@pytest.fixture
def start_of(module_of: Any) -> Any:
    return module_of("start").Start


def reply(ttft_ms: float, cached: int = 0) -> dict[str, Any]:
    return {"ttft_ms": ttft_ms, "cached_tokens": cached, "tokens": [1, 2]}


def solo(gpu_ms: float, host_ms: float, hinted_ms: float) -> dict[str, Any]:
    kinds = {"cold": 900.0, "gpu_hit": gpu_ms, "host_hit": host_ms, "hinted": hinted_ms}
    kinds["rested"] = gpu_ms + 3.0
    return {"16384": {kind: reply(ms, 10_000) for kind, ms in kinds.items()}}


def beside(device_ms: list[float], host_ms: list[float]) -> dict[str, Any]:
    """Gaps beside hits on either. Without any, decoding had ended."""
    gaps = {"device": device_ms, "host": host_ms}
    return {
        kind: {"gaps_ms": each, "decoding_ended_first": not each} for kind, each in gaps.items()
    }


def backlog(last_ms: float) -> dict[str, Any]:
    return {"users": [[reply(5000.0), reply(last_ms)] for _ in range(10)]}


def write(
    folder: Path,
    arm: str,
    start: str = "one",
    begun: dict[str, Any] | None = None,
    **workloads: list[dict[str, Any]],
) -> None:
    samples = [
        {"workload": name, "round": number, "raw": raw, "counted": raw.get("counted", {})}
        for name, rounds in workloads.items()
        for number, raw in enumerate(rounds)
    ]
    document = {
        "arm": {"name": arm},
        "machine_start": start,
        "command": ["inside_vllm", "run", "FOLDER", "none:solo=2"],
        "commit": "abc123",
        "machine": {"gpus": ["a GPU"]},
        "versions": {"vllm": "0.26.0"},
        "token_bytes": TOKEN_BYTES,
        "sizes": {"host_bytes": ASKED},
        "beside": [],
        "start": begun,
        "samples": samples,
    }
    (folder / f"{arm}.json").write_text(json.dumps(document))


def test_figures_are_those_of_the_samples(figures: Any, start_of: Any, tmp_path: Path):
    write(tmp_path, "none", no_hits=[{"seconds": 1.5}, {"seconds": 1.5}])
    write(tmp_path, "none_v1", no_hits=[{"seconds": 1.0}, {"seconds": 1.0}])
    write(
        tmp_path,
        "forebay",
        solo=[solo(30.0, 44.0, 33.0)],
        backlog_64=[backlog(1200.0)],
        no_hits=[{"seconds": 1.25}, {"seconds": 1.25}],
        itl=[beside([10.0] * 5, [11.0] * 5), beside([10.0], [])],
    )
    write(tmp_path, "offloading", solo=[solo(20.0, 88.0, 0.0)], backlog_64=[backlog(2500.0)])
    write(tmp_path, "offloading_v1", backlog_64=[backlog(2000.0)])
    write(tmp_path, "all_resident", backlog_64=[backlog(1100.0)])
    write(tmp_path, "all_resident_v1", backlog_64=[backlog(1000.0)])
    (tmp_path / "link.json").write_text(json.dumps({"gb_per_s": [0.4, 0.5]}))
    made = figures.figures(start_of.read(tmp_path), "forebay")
    found = {figure.id: figure.value for figure in made}
    assert found["backlog_64_p50"] == pytest.approx(0.8)
    assert found["backlog_64_vs_native_p90"] == pytest.approx(0.6)
    # 10,000 tokens at 0.5 GB/s take 20 ms, and the lowest hit on the GPU was another arm's.
    assert found["hit_16k"] == pytest.approx(44.0 / 40.0)
    assert found["hit_16k_vs_native"] == pytest.approx(0.5)
    assert found["hinted_hit_16k"] == pytest.approx(1.1)
    assert found["hinted_hit_16k_rested"] == pytest.approx(1.0)
    assert found["no_hits"] == pytest.approx(0.8)
    assert found["itl"] == pytest.approx(1.1)


def test_loaded_bytes_are_held_against_those_used(figures: Any, start_of: Any, tmp_path: Path):
    def round_(seconds: float, name: str, loaded: int) -> dict[str, Any]:
        requests = [reply(1.0, 100), reply(1.0, 100)]
        return {"seconds": seconds, "requests": requests, "counted": {name: loaded}}

    ours = round_(2.0, "forebay:loaded_bytes_total", 220 * TOKEN_BYTES)
    theirs = round_(1.5, "vllm:kv_offload_load_bytes_total", 600 * TOKEN_BYTES)
    write(tmp_path, "forebay_small", thrash=[ours])
    write(tmp_path, "offloading_small", thrash=[theirs])
    made = figures.figures(start_of.read(tmp_path), "forebay")
    found = {figure.id: figure for figure in made}
    assert found["thrash_vs_native"].value == pytest.approx(0.75)
    assert found["thrash_bytes"].value == pytest.approx(1.1)
    told = found["thrash_bytes"].settings["loaded_over_used"]
    assert told["offloading_small"] == [pytest.approx(3.0)]


def test_arms_of_two_machine_starts_are_not_paired(start_of: Any, tmp_path: Path):
    write(tmp_path, "none")
    write(tmp_path, "forebay", start="another")
    with pytest.raises(SettingsError, match="2 machine starts"):
        start_of.read(tmp_path)


def begun(kv_memory_s: float, **taken: int) -> dict[str, Any]:
    """What an arm says once it is up, `taken` being what it took of memory."""
    before = {"resident": 100, "MemAvailable": 9000}
    after = {"resident": 100 + taken["resident"], "MemAvailable": 9000 - taken["machine"]}
    return {
        "engine_start_s": 40.0,
        "kv_memory_s": [kv_memory_s],
        "memory_before": before,
        "memory_started": after,
        "memory_settled_s": 1.0,
    }


@pytest.mark.parametrize(
    ("resident", "machine", "ratio", "seen_as"),
    [(1210, 1300, 1.01, "resident"), (250, 1530, 1.03, "MemAvailable")],
)
def test_host_memory_is_looked_for_where_it_shows(
    figures: Any,
    start_of: Any,
    tmp_path: Path,
    resident: int,
    machine: int,
    ratio: float,
    seen_as: str,
):
    write(tmp_path, "none", begun=begun(1.5, resident=200, machine=500))
    write(tmp_path, "forebay", begun=begun(2.0, resident=resident, machine=machine))
    made = {each.id: each for each in figures.figures(start_of.read(tmp_path), "forebay")}
    assert made["pin_start_s"].value == pytest.approx(0.5)
    assert made["pin_memory"].value == pytest.approx(ratio)
    assert made["pin_memory"].settings["seen_as"] == seen_as


def test_host_memory_that_shows_nowhere_is_no_figure(figures: Any, start_of: Any, tmp_path: Path):
    write(tmp_path, "none", begun=begun(1.5, resident=200, machine=500))
    write(tmp_path, "forebay", begun=begun(2.0, resident=210, machine=510))
    made = {each.id for each in figures.figures(start_of.read(tmp_path), "forebay")}
    assert made == {"pin_start_s"}


def test_divergence_is_that_of_all_tokens(figures: Any, start_of: Any, tmp_path: Path):
    raw = {
        "divergences": {"host": [0.0, 0.002], "swapped": [0.5, 1.5], "recomputed": [0.01]},
        **dict.fromkeys(("prompts", "answer", "attention_gain", "cached_tokens", "same_best"), 1),
    }
    write(tmp_path, "forebay", accuracy=[raw])
    made = {each.id: each for each in figures.figures(start_of.read(tmp_path), "forebay")}
    assert made["divergence"].value == pytest.approx(0.001)
    assert figures.GOALS["divergence"].met_by(made["divergence"].value)
    assert made["divergence_swapped"].value == pytest.approx(1.0)
    assert figures.GOALS["divergence_swapped"].met_by(1.0)
    assert not figures.GOALS["divergence_swapped"].met_by(0.001)


def convoy(*first_ms: float) -> dict[str, Any]:
    """All sent at once, with the first token of each."""
    requests = [reply(ms, 10_240) for ms in first_ms]
    return {"first_s": [ms / 1e3 for ms in first_ms], "requests": requests}


def test_a_convoy_is_set_beside_the_natives_and_the_same_on_the_gpu(
    figures: Any, start_of: Any, tmp_path: Path
):
    mine = convoy(300.0, 400.0, 440.0) | {"on_gpu": convoy(200.0, 500.0, 500.0)}
    write(tmp_path, "forebay_small", convoy=[mine])
    write(tmp_path, "forebay_v1_small", convoy=[convoy(380.0, 380.0, 380.0)])
    write(tmp_path, "offloading_small", convoy=[convoy(800.0, 800.0, 800.0)])
    write(tmp_path, "offloading_v1_small", convoy=[convoy(390.0, 390.0, 400.0)])
    made = {each.id: each.value for each in figures.figures(start_of.read(tmp_path), "forebay")}
    assert {id: round(value, 6) for id, value in made.items()} == {
        "convoy": 0.35,
        "convoy_vs_native": round(400 / 390, 6),
        "convoy_best_runner_vs_native": round(380 / 390, 6),
        "convoy_last_vs_native": 1.1,
        "convoy_last_best_runner_vs_native": 0.95,
        "convoy_on_gpu": 0.6,
        "convoy_vs_on_gpu": 0.8,
    }


def test_rounds_alternate_and_what_does_not_fit_is_told(module_of: Any):
    estimates, sizes = module_of("estimates"), module_of("sizes")
    groups = estimates.parse(["none:no_hits=3+forebay:solo,no_hits=2"])
    order = [(each.arm.name, work, number) for each, work, number in estimates.turns(groups[0])]
    assert order == [
        ("none", "no_hits", 0),
        ("forebay", "no_hits", 0),
        ("forebay", "no_hits", 1),
        ("none", "no_hits", 1),
        ("none", "no_hits", 2),
        ("forebay", "solo", 0),
    ]
    *plan, total = estimates.table(groups, sizes.FULL, 10_000.0).splitlines()
    assert not [line for line in plan if "FIT" in line]
    short = estimates.table(groups, sizes.FULL, float(total.split()[0]) - 1).splitlines()
    assert [line for line in short if "FIT" in line] == [short[-2]]
    for wrong, known in (
        ("none:nothing", "no_hits"),
        ("nobody:solo", "forebay"),
        ("none:solo=x", "solo"),
    ):
        with pytest.raises(SettingsError, match=known):
            estimates.parse([wrong])


def test_divergence_is_zero_only_between_equals(module_of: Any):
    accuracy = module_of("accuracy")
    one = np.log(np.array([0.5, 0.25, 0.25], np.float32))
    other = np.log(np.array([0.25, 0.5, 0.25], np.float32))
    assert accuracy.divergences([one], [one]) == [0.0]
    assert accuracy.divergences([one], [other]) == [pytest.approx(0.25 * np.log(2.0))]


def test_what_makes_figures_void_is_told(figures: Any, start_of: Any, tmp_path: Path):
    missed = solo(30.0, 500.0, 33.0)
    missed["16384"]["host_hit"]["cached_tokens"] = 0
    failed = {"forebay:failed_transfers_total{direction=save}": 7.0}
    write(tmp_path, "forebay", solo=[solo(30.0, 44.0, 33.0), {**missed, "counted": failed}])
    # The counters of a sample stand beside what it measured.
    file = tmp_path / "forebay.json"
    told = json.loads(file.read_text())
    told["samples"][1]["raw"].pop("counted")
    file.write_text(json.dumps({**told, "left_out": ["itl 0"]}))
    write(tmp_path, "offloading", itl=[beside([10.0], [])])
    assert figures.faults(start_of.read(tmp_path)) == [
        "forebay: itl 0 was left out",
        "forebay: solo 1: forebay:failed_transfers_total{direction=save} grew by 7",
        "forebay: solo 1: host_hit of 16384 tokens found 0",
        "offloading: itl 0: decoding ended before hits on the host did",
    ]


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_figures_that_are_kept_are_those_of_their_raw_samples(
    figures: Any, start_of: Any, folder: Path
):
    start = start_of.read(folder)
    kept = json.loads(folder.with_suffix(".json").read_text())
    assert document(figures.figures(start, "forebay"), start.origin) == kept
    broke = [told.partition(" broke:")[0] for told in figures.faults(start)]
    assert broke == STOPPED.get(folder.name, []), "arms broke, or figures are not what they say"
    assert kept["machine"]["gpus"]


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_raw_samples_say_of_which_commit_they_are_and_name_no_folder(folder: Path):
    arms = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    arms = [told for told in arms if "arm" in told]
    assert {re.fullmatch("[0-9a-f]{40}", told["commit"]) is not None for told in arms} == {True}
    for told in arms:
        assert not [word for word in told["command"] if "/" in word]
