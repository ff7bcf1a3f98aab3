"""What the pages say of Forebay inside vLLM is what the kept results say, met or missed."""

from __future__ import annotations

import importlib
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from pages import ROOT, page, rows

from forebay.measure.report import Figure, read

RESULTS = ROOT / "benchmarks" / "results" / "h200-16-cores" / "vllm"
RUNS = {
    "1": "hits-and-backlogs",
    "2": "no-hits-and-thrash",
    "3": "convoy",
    "4": "beside-all-natives",
    "5": "convoy-and-gpu",
    "6": "hits-and-backlogs-again",
}
BENCHMARK = ROOT / "benchmarks" / "inside_vllm"
LENGTHS = {"16k": "16,384", "32k": "32,768"}
KINDS = {"host_hit": "in host memory", "gpu_hit": "on the GPU", "cold": "computed"}
UNITS = {"nats per token": " nats", "s": " s"}
ARMS = ("forebay", "all_resident", "offloading_v1")
NATIVES = ("offloading_v1", "offloading", "simple")
WAYS = {"no connector": "none", "`b0`": "b0", "`b3`": "b3", "`b4`": "b4"}


@pytest.fixture(scope="module")
def kept() -> dict[str, dict[str, Figure]]:
    """The figures of each run, by id."""
    found = {run: read(RESULTS / f"{name}.json") for run, name in RUNS.items()}
    return {run: {figure.id: figure for figure in figures} for run, figures in found.items()}


@pytest.fixture
def goals(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARK))
    yield importlib.import_module("figures").GOALS
    for file in BENCHMARK.glob("[!_]*.py"):  # Not __main__: that is pytest's own.
        sys.modules.pop(file.stem, None)


def test_every_figure_is_shown_as_it_was_measured(
    kept: Mapping[str, Mapping[str, Figure]], goals: Any
):
    listed = {
        (row[0], row[1].strip("`")): row[3:]
        for row in rows(page("vllm-figures.md"))
        if len(row) == 7
    }
    listed.pop(("run", "figure"))
    assert set(listed) == {(run, id) for run, figures in kept.items() for id in figures}
    for (run, id), (value, rounds, goal, verdict) in listed.items():
        figure, bound = kept[run][id], goals.get(id)
        assert value == f"{figure.value:.3f}{UNITS.get(figure.unit, '')}", id
        assert rounds == _spread(figure.samples), id
        assert goal == str(bound or ""), id
        if bound is not None:
            assert verdict == ("met" if bound.met_by(figure.value) else "**missed**"), id


def test_times_are_those_of_the_rounds(kept: Mapping[str, Mapping[str, Figure]]):
    listed = {row[0]: row[1:] for row in rows(page("vllm-figures.md")) if len(row) == 4}
    for label, rounds in _times(kept).items():
        assert listed[label] == [_milliseconds(each) for each in rounds], label


def test_times_beside_all_natives_are_those_of_the_rounds(
    kept: Mapping[str, Mapping[str, Figure]],
):
    listed = {row[0]: row[1:] for row in rows(page("vllm-figures.md")) if len(row) == 5}
    run: Mapping[str, Any] = {id: figure.settings for id, figure in kept["4"].items()}
    seconds = run["thrash_vs_native"]["seconds"]
    times = {
        "convoy, median": run["convoy"]["median_ttft_ms"],
        "convoy, the last one": run["convoy"]["last_ttft_ms"],
        "thrash, until all are answered": {
            arm: [1e3 * each for each in rounds] for arm, rounds in seconds.items()
        },
    }
    for length, tokens in LENGTHS.items():
        times[f"{tokens} tokens alone, in host memory"] = {
            arm: kinds.get("host_hit", []) for arm, kinds in run[f"hit_{length}"]["ttft_ms"].items()
        }
    for label, rounds in times.items():
        arms = [f"{arm}_small" for arm in (ARMS[0], *NATIVES)]
        assert listed[label] == [_milliseconds(rounds.get(arm, [])) for arm in arms], label


def test_times_of_the_last_convoy_are_those_of_the_rounds(
    kept: Mapping[str, Mapping[str, Figure]],
):
    listed = {row[0]: row[1:] for row in rows(page("vllm-figures.md")) if len(row) == 4}
    for place, id in (("in host memory", "convoy"), ("on the GPU", "convoy_on_gpu")):
        told: Any = kept["5"][id].settings
        for label, times in (("median", "median_ttft_ms"), ("the last one", "last_ttft_ms")):
            rounds = told[times]
            arms = [f"{arm}_small" for arm in (ARMS[0], f"{ARMS[0]}_v1", ARMS[2])]
            shown = [_milliseconds(rounds[arm]) for arm in arms]
            assert listed[f"prefix {place}: {label}"] == shown


def test_times_of_vllms_own_load_generator_are_those_kept():
    figures = {figure.id: figure.value for figure in read(RESULTS / "bench-serve.json")}
    listed = {row[0]: row[1:] for row in rows(page("vllm-figures.md")) if len(row) == 4}
    for label, way in WAYS.items():
        told = next(row for name, row in listed.items() if name.endswith((label, f"({label})")))
        assert told == [f"{figures[f'bench_serve_{way}_p{q}']:,.0f}" for q in (50, 90, 99)], label


def test_times_with_longer_answers_are_those_kept():
    figures = {figure.id: figure.value for figure in read(RESULTS / "bench-serve-64.json")}
    listed = {row[0]: row[1:] for row in rows(page("vllm-figures.md")) if len(row) == 4}
    for way in ("b3", "b4"):
        told = next(
            row for name, row in listed.items() if name.endswith(f"(`{way}`)") and "64" in name
        )
        assert told == [f"{figures[f'bench_serve_64_{way}_p{q}']:,.0f}" for q in (50, 90, 99)], way


def test_times_of_another_load_generator_are_those_kept():
    figures = {figure.id: figure for figure in read(RESULTS / "aiperf.json")}
    listed = {row[0]: row[1:] for row in rows(page("vllm-figures.md")) if len(row) == 5}
    for label, way in (("switched off (`b0`)", "b0"), ("look-ahead (`b4`)", "b4")):
        told: list[str] = []
        for turn in (1, 2, 3):
            middle, late = (figures[f"aiperf_{way}_turn_{turn}_p{q}"] for q in (50, 90))
            assert middle.value == pytest.approx(statistics.median(middle.samples), abs=0.01)
            told.append(f"{middle.value:,.0f}; {late.value:,.0f}")
        assert listed[label] == [*told, f"{figures[f'aiperf_{way}_tokens_per_s'].value:.0f}"]


def test_the_readme_says_what_was_measured(kept: Mapping[str, Mapping[str, Figure]]):
    _, second, third, fourth, fifth, last = _values(kept)
    listed = [row[1] for row in rows((ROOT / "README.md").read_text()) if len(row) == 2]
    shares = [f"{last[f'backlog_{answer}_p50'] * 100:.0f} %" for answer in (16, 64)]
    assert listed == [
        "measured",
        "{:.2f} with answers of 16 tokens, {:.2f} with 64".format(*_backlogs(last)),
        " and ".join(shares),
        f"{fourth['hit_16k_vs_native']:.2f} with 16,384 tokens, "
        f"{fourth['hit_32k_vs_native']:.2f} with 32,768",
        f"{second['thrash_vs_native']:.2f}; over the best of vLLM's own, in a later run, "
        f"{fourth['thrash_vs_native']:.2f}",
        "{:.2f}, {:.2f} and {:.2f} in the last three runs".format(
            *(run["convoy_vs_native"] for run in (third, fourth, fifth))
        ),
        f"{second['no_hits']:.3f}",
    ]


def test_what_is_said_in_words_is_in_the_results(kept: Mapping[str, Mapping[str, Figure]]):
    first, second, _, fourth, fifth, last = _values(kept)
    convoys = [
        statistics.median(_convoys(kept, run)[arm + "_small"])
        for run in ("2", "3", "4", "5")
        for arm in (ARMS[0], ARMS[2])
    ]
    starts: Any = kept["2"]["pin_start_s"].settings["offloading_v1_small"]
    hinted = first["hinted_hit_32k"], second["hinted_hit_32k"]
    text = " ".join((page("vllm.md") + page("vllm-figures.md")).split())
    for said in (
        f"with answers of 16 tokens, and {_backlogs(last)[1]:.2f} times with 64",
        f"third turn was {_backlogs(last)[0]:.2f} times that of `OffloadingConnector`",
        "with {:.3f}, and met it in run 2, with {:.3f}".format(*hinted),
        "missed its goal in run 2, with {:.0f} ms against {:.0f}".format(*convoys[:2]),
        "In run 3 it met it, with {:.0f} ms against {:.0f}".format(*convoys[2:4]),
        "missed both goals**, with {:.0f} ms against {:.0f}".format(*convoys[4:6]),
        "missed the other**, with {:.0f} ms against {:.0f}".format(*convoys[6:]),
        f"they lie {fifth['convoy_on_gpu']:.3f} of the median apart with Forebay",
        f"memory it costs {fifth['convoy_vs_on_gpu']:.3f} times what it costs on the GPU",
        f"The last one has it {fourth['convoy_last_vs_native']:.3f} times as late",
        f"by {second['divergence']:g} nats, 72 times of {len(kept['2']['divergence'].samples)}",
        f"moves it by {second['divergence_recomputed']:.3f} nats",
        f"swapped block by {second['divergence_swapped']:.3f}",
        f"waits {second['pin_start_s']:.3f} s longer",
        f"vLLM waited {starts['kv_memory_s']:.1f} s for the 32 GiB",
    ):
        assert said in text


def test_rates_of_another_start_are_told_as_it_was_measured():
    text = " ".join(page("performance.md").split())
    text = text[text.index("Another start, three rounds") :]
    for figure in read(RESULTS.parent / "rates-again.json"):
        if figure.id.startswith(("h2d", "both", "frag_64k", "frag_32k")):
            assert f"{figure.value:.3g} for `{figure.id}`" in text


def _values(kept: Mapping[str, Mapping[str, Figure]]) -> list[dict[str, float]]:
    return [{id: figure.value for id, figure in kept[run].items()} for run in RUNS]


def _backlogs(values: Mapping[str, float]) -> list[float]:
    return [values[f"backlog_{answer}_vs_native_p50"] for answer in (16, 64)]


def _times(kept: Mapping[str, Mapping[str, Figure]]) -> dict[str, list[Sequence[float]]]:
    """The rows of the table of times: milliseconds by round, for each of `ARMS`."""
    found: dict[str, list[Sequence[float]]] = {}
    for run in ("1", "6"):
        for answer, name in itertools.product((16, 64), ("p50", "p90")):
            told: Any = kept[run][f"backlog_{answer}_{name}"].settings["ttft_ms"]
            label = f"backlog, answers of {answer} tokens, third turn, {name}, run {run}"
            found[label] = [told[arm] for arm in ARMS]
        for (length, tokens), (kind, name) in itertools.product(LENGTHS.items(), KINDS.items()):
            told = kept[run][f"hit_{length}"].settings["ttft_ms"]
            label = f"{tokens} tokens alone, {name}, run {run}"
            found[label] = [told[arm].get(kind, []) for arm in ARMS]
    for run in ("2", "3"):
        told = _convoys(kept, run)
        found[f"convoy, median, run {run}"] = [told.get(arm + "_small", []) for arm in ARMS]
    return found


def _convoys(kept: Mapping[str, Mapping[str, Figure]], run: str) -> Any:
    """Median TTFT of each round, in milliseconds, by arm."""
    return kept[run]["convoy"].settings["median_ttft_ms"]


def _milliseconds(rounds: Sequence[float]) -> str:
    return "; ".join(f"{each:,.0f}" for each in rounds)


def _spread(samples: Sequence[float]) -> str:
    if not samples:
        return ""
    return f"{min(samples):.3f} to {max(samples):.3f} ({len(samples)})"
