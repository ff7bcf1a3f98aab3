"""The calibration file, what is refused of it, and the rules by which advice follows from it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from forebay.calibration.advice import advise, best_block_tokens, best_window, gain
from forebay.calibration.file import (
    calibration_file,
    calibration_folder,
    read_calibration,
    write_calibration,
)
from forebay.calibration.record import (
    Calibration,
    FragmentRate,
    LinkRates,
    Missing,
    ModelRates,
    WindowCost,
)
from forebay.errors import CalibrationError, SettingsError
from forebay.machine.sizes import parse_size

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LINK = LinkRates(
    block_bytes=2 * MIB,
    window_bytes=8 * MIB,
    load_bytes_per_s=50e9,
    save_bytes_per_s=48e9,
    both_bytes_per_s=90e9,
)


def model(**changed: Any) -> ModelRates:
    values: dict[str, Any] = {
        "name": "a model",
        "fingerprint": "f" * 32,
        "dtype": "bfloat16",
        "token_bytes": 128 * KIB,
        "prefill_tokens": 512,
        "prefill_tokens_per_s": 20e3,
        "requests": 8,
        "context_tokens": 512,
        "step_s": 0.01,
        "inflation_load": 1.04,
        "inflation_both": 1.09,
    }
    return ModelRates(**values | changed)


def window(mib: float, rate: float, wait_us: float | None = None) -> WindowCost:
    wait_s = None if wait_us is None else 1e-6 * wait_us
    return WindowCost(
        window_bytes=int(mib * MIB), bytes_per_s=rate, foreign_p50_s=wait_s, foreign_p99_s=wait_s
    )


def fragment(kib: int, rate: float) -> FragmentRate:
    return FragmentRate(fragment_bytes=kib * KIB, fragments=4096 // kib, bytes_per_s=rate)


def calibration(**changed: Any) -> Calibration:
    values: dict[str, Any] = {
        "machine": "A processor, 2 cores",
        "device": "cuda:0 (A GPU)",
        "measured": "2026-01-02 03:04 UTC",
        "version": "0.1.0",
        "link": LINK,
        "fragments": (fragment(32, 40e9), fragment(2048, 50e9)),
        "windows": (window(4, 49e9, 150), window(8, 50e9)),
        "models": (model(),),
        "missing": (Missing(what="both ways", why="no time"),),
    }
    return Calibration(**values | changed)


# -- the file --------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path):
    file = tmp_path / "a" / "b.json"
    for made in (calibration(), calibration(fragments=(), windows=(), models=(), missing=())):
        write_calibration(made, file)
        read = read_calibration(file)
        assert read == made
        assert read.told == f"calibration {file} of 2026-01-02 03:04 UTC"
    assert [each.name for each in file.parent.iterdir()] == ["b.json"]


def spoilt(path: str, value: Any) -> Any:
    """A change of the written object: `value` at a place like "link.block_bytes"; ... takes out."""

    def change(said: dict[str, Any]) -> None:
        *way, last = path.split(".")
        at: Any = said
        for step in way:
            at = at[int(step)] if isinstance(at, list) else at[step]
        key: Any = int(last) if isinstance(at, list) else last
        if value is ...:
            del at[key]
        else:
            at[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (spoilt("format", 2), "its format is 2, and this version reads 1"),
        (spoilt("format", ...), "its format is None"),
        (spoilt("format", "1"), "its format is '1'"),
        (spoilt("machine", ...), "it lacks machine"),
        (spoilt("machine", "a\nb"), "it: machine is 'a.*b', and must be a line of text"),
        (spoilt("more", 1), "it has 'more', which is not known"),
        (spoilt("source", "/etc/passwd"), "it has 'source', which is not known"),
        (spoilt("link", ...), "link is no object"),
        (spoilt("link", []), "link is no object"),
        (spoilt("link.block_bytes", ...), "link lacks block_bytes"),
        (spoilt("link.block_bytes", 2.5), "link: block_bytes is 2.5, and must be a whole"),
        (spoilt("link.load_bytes_per_s", 0), "link: load_bytes_per_s is 0"),
        (spoilt("link.load_bytes_per_s", float("nan")), "load_bytes_per_s is nan"),
        (spoilt("link.load_bytes_per_s", float("inf")), "load_bytes_per_s is inf"),
        (spoilt("link.load_bytes_per_s", "fast"), "load_bytes_per_s is 'fast'"),
        (spoilt("windows", {}), "windows is no list"),
        (spoilt("windows.1", 7), r"windows\[1\] is no object"),
        (spoilt("windows.0.window_bytes", -1), r"windows\[0\]: window_bytes is -1"),
        (spoilt("windows.0.foreign_p99_s", 0), r"windows\[0\]: foreign_p99_s is 0"),
        (spoilt("fragments.0.fragments", 10**30), r"fragments\[0\]: fragments is 1000.* at most"),
        (spoilt("models.0.step_s", True), r"models\[0\]: step_s is True"),
        (spoilt("models.0.fingerprint", ""), r"models\[0\]: fingerprint is ''"),
        (spoilt("missing.0.why", None), r"missing\[0\]: why is None"),
    ],
)
def test_what_is_not_as_it_was_written_is_refused_as_a_whole(
    tmp_path: Path, change: Any, said: str
):
    file = tmp_path / "spoilt.json"
    write_calibration(calibration(), file)
    read = json.loads(file.read_text())
    change(read)
    file.write_text(json.dumps(read))
    with pytest.raises(CalibrationError, match=said) as told:
        read_calibration(file)
    assert str(file) in str(told.value)
    assert "forebay tune" in str(told.value)
    assert len(str(told.value)) < 600


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b"7", b"\xff\xfe", b"[" * 100_000, b" " * (1 << 20) + b"{}"],
    ids=["empty", "cut", "list", "null", "number", "binary", "deep", "long"],
)
def test_what_is_no_calibration_at_all(tmp_path: Path, text: bytes):
    file = tmp_path / "no.json"
    file.write_bytes(text)
    with pytest.raises(CalibrationError, match=r"no\.json is no calibration: .*forebay tune"):
        read_calibration(file)


def test_what_cannot_be_read_or_written(tmp_path: Path):
    with pytest.raises(CalibrationError, match="cannot be read: No such file"):
        read_calibration(tmp_path / "none.json")
    with pytest.raises(CalibrationError, match="cannot be read: Is a directory"):
        read_calibration(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"cannot be written .* another --out"):
        write_calibration(calibration(), tmp_path / "file" / "new.json")


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch):
    assert calibration_folder({"XDG_STATE_HOME": "/s"}) == Path("/s/forebay/calibration")
    monkeypatch.setenv("HOME", "/h")
    for unset in ({}, {"XDG_STATE_HOME": ""}, {"XDG_STATE_HOME": "not/absolute"}):
        assert calibration_folder(unset) == Path("/h/.local/state/forebay/calibration")
    names = {
        calibration_file(machine, device).name
        for machine in ("AMD EPYC 9B14, 2 cores", "AMD EPYC 9B14, 16 cores")
        for device in ("cpu", "cuda:0 (NVIDIA H200)", "cuda:1 (NVIDIA H200)")
    }
    assert len(names) == 6
    assert "amd-epyc-9b14-2-cores-cuda-0-nvidia-h200.json" in names
    assert len(calibration_file("x" * 1000, "cpu").name) < 200


def test_models_of_an_earlier_run_are_kept_unless_measured_again():
    earlier = calibration(models=(model(), model(fingerprint="e", name="other")))
    newer = calibration(models=(model(step_s=0.02),)).with_models_of(earlier)
    assert [each.name for each in newer.models] == ["a model", "other"]
    found = newer.model("f" * 32)
    assert found is not None
    assert found.step_s == 0.02
    assert newer.model("e") == earlier.model("e")
    assert newer.model("unknown") is None


def test_every_field_is_checked():
    for made in (LINK, fragment(32, 1.0), window(1, 1.0), model(), calibration()):
        for field in dataclasses.fields(made):
            with pytest.raises(SettingsError, match=rf"^{field.name} is"):
                dataclasses.replace(made, **{field.name: object()})


# -- advice ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("windows", "best_mib"),
    [
        # Of those within 3 %, the one that others wait least for.
        ([(2, 50.6, 70), (4, 52.9, 150), (8, 54.1, 300), (16, 54.7, 600)], 8),
        ([(2, 53.5, 70), (4, 53.0, 150), (8, 54.1, 300)], 2),
        # Waits that are nearly equal do not count; the smaller window does.
        ([(4, 54.0, 160), (8, 54.1, 140)], 4),
        ([(4, 54.0, 180), (8, 54.1, 140)], 8),
        # The slower one waits less, and is out.
        ([(1, 30.0, 20), (8, 54.1, 300)], 8),
        # Nobody waits: the smallest that is quick enough.
        ([(1, 52.0, None), (4, 54.0, None), (8, 54.1, None)], 4),
        ([(8, 1.0, None)], 8),
    ],
)
def test_the_window(windows: list[tuple[float, float, float | None]], best_mib: int):
    for order in (1, -1):
        found = best_window([window(*each) for each in windows[::order]])
        assert found is not None
        assert found.window_bytes == best_mib * MIB


@pytest.mark.parametrize(
    ("token_kib", "fragments", "tokens"),
    [
        (128, [(64, 52.5), (2048, 54.0)], 16),
        (64, [(64, 20.0), (1024, 50.0), (2048, 54.0)], 32),
        (4, [(32, 46.9), (64, 52.5), (128, 54.0)], 16),
        (4, [(64, 40.0), (4096, 54.0)], 128),
        (1, [(64, 50.0)], 64),
        (1, [(4096, 50.0)], 128),
    ],
)
def test_the_block(token_kib: int, fragments: list[tuple[int, float]], tokens: int):
    rates = [fragment(*each) for each in fragments]
    assert best_block_tokens(rates, token_kib * KIB) == tokens


def test_nothing_measured_is_no_advice():
    assert best_window([]) is None
    assert best_block_tokens([], 1024) is None
    bare = calibration(windows=(), fragments=())
    assert [each.setting for each in advise(bare, model(), GIB)] == ["--host-bytes"]


@pytest.mark.parametrize("room", [3 * MIB, 700 * MIB, 5 * GIB + 1, 3000 * GIB])
def test_what_is_advised_can_be_written_so(room: int):
    for each in advise(calibration(), model(), room):
        number = parse_size(each.value)
        assert number > 0
        assert each.setting != "--host-bytes" or 0.5 * room < number <= 0.8 * room


def test_a_host_pool_only_where_loading_is_quicker_than_computing():
    quick, slow = model(), model(prefill_tokens_per_s=1e6)
    assert gain(calibration(), quick) == pytest.approx(50e9 / (20e3 * 128 * KIB))
    told = {each.setting: each for each in advise(calibration(), quick, 100 * GIB)}
    assert list(told) == ["--window-bytes", "--block-tokens", "--host-bytes"]
    assert told["--window-bytes"].value == "4MiB"
    assert "150 us" in told["--window-bytes"].why
    assert told["--block-tokens"].value == "16"
    assert told["--host-bytes"].value == "80GiB"
    assert "19 times quicker" in told["--host-bytes"].why
    assert "655,360 tokens" in told["--host-bytes"].why
    (none,) = [e for e in advise(calibration(), slow, 100 * GIB) if e.setting == "--host-bytes"]
    assert none.value == "0"
    assert "2.6 times as long" in none.why
    (unknown,) = [e for e in advise(calibration(), quick, None) if e.setting == "--host-bytes"]
    assert unknown.value == ""
