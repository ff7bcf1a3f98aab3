"""`forebay tune`, on a CPU with a tiny model, and a server that starts from what it kept."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import build
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).resolve().parent / "demo"))

from talker import save_talker

import forebay.cli.tune
from forebay.calibration.file import read_calibration, write_calibration
from forebay.calibration.record import Calibration, ModelRates
from forebay.cli import app
from forebay.engine.calibrated import find_calibration, own_file
from forebay.engine.engine import Engine
from forebay.engine.models import LoadedModel, adopt_model
from forebay.engine.settings import EngineSettings
from forebay.errors import CalibrationError, SettingsError
from forebay.machine.cpus import machine_name
from forebay.tune.parts import several
from forebay.tune.run import TuneSettings, tune
from forebay.tune.steps import StepSizes

CPU = torch.device("cpu")
SMALL = TuneSettings(
    sizes=StepSizes(requests=2, context_tokens=64, prefill_tokens=10_000),
    most_pool_bytes=32 << 20,
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return adopt_model(build("llama"), name="tiny llama")


@pytest.fixture(scope="module")
def parts() -> list[str]:
    return []


@pytest.fixture(scope="module")
def found(loaded: LoadedModel, parts: list[str]) -> Calibration:
    return tune(loaded, SMALL, parts.append)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel) -> None:
    """The command measures little."""
    measured = forebay.cli.tune.tune
    monkeypatch.setattr(
        forebay.cli.tune, "tune", lambda model, begun: measured(model, SMALL, begun)
    )


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_everything_that_a_cpu_has_is_measured_and_the_rest_named(
    found: Calibration, loaded: LoadedModel, parts: list[str]
):
    assert parts == ["fragments", "link and windows", "model"]
    assert (found.machine, found.device) == (machine_name(), "cpu")
    link = found.link
    assert min(link.load_bytes_per_s, link.save_bytes_per_s, link.both_bytes_per_s) > 0
    assert [each.window_bytes >> 10 for each in found.windows] == [256, 512, 1024, 2048, 4096, 8192]
    assert all(each.foreign_p99_s is None for each in found.windows)
    assert {each.fragment_bytes * each.fragments for each in found.fragments} == {4 << 20}
    (model,) = found.models
    assert (model.name, model.fingerprint) == ("tiny llama", loaded.fingerprint)
    assert (model.dtype, model.token_bytes) == ("float32", 768)
    # Lowered to the model's context.
    assert (model.prefill_tokens, model.requests, model.context_tokens) == (512, 2, 64)
    lacking = {each.what for each in found.missing}
    assert lacking == {"the link to a GPU", "what others' copies wait for a window"}


def test_too_little_memory_is_told(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("forebay.tune.run.device_free_bytes", lambda _: 50 << 20)
    with pytest.raises(SettingsError, match=r"two pools of 32 MiB do not fit the 50 MiB"):
        tune(loaded, SMALL)


def test_several_is_at_least_one_and_ends():
    assert several(lambda: 1.0, rounds=3, most_s=60.0) == [1.0] * 3
    assert several(lambda: 1.0, rounds=10**9, most_s=0.0) == [1.0]


@pytest.mark.usefixtures("quick")
def test_the_command_shows_keeps_and_says_who_reads(tmp_path: Path, state: Path):
    folder = save_talker(tmp_path / "talker")
    done = run("tune", "--model", folder, "--device", "cpu")
    assert done.exit_code == 0, done.output
    file = own_file(CPU)
    assert file.is_relative_to(state)
    for said in (
        "loads, by window",
        "tokens/s",
        "GB/s",
        "--window-bytes ",
        "--block-tokens ",
        "--host-bytes ",
        "not measured: the link to a GPU: ",
        f"kept in {file}; rates and window are read from there by: forebay serve\n",
    ):
        assert said in done.stdout, said
    assert [each.name for each in read_calibration(file).models] == [str(folder)]
    other = save_talker(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    assert run("tune", "--model", other, "--device", "cpu").exit_code == 0
    assert [each.name for each in read_calibration(file).models] == [str(other), str(folder)]


@pytest.mark.usefixtures("quick")
def test_the_command_writes_where_it_is_told(tmp_path: Path):
    folder = save_talker(tmp_path / "talker")
    file = tmp_path / "my file.json"
    file.write_text("no calibration, and in the way")
    done = run("tune", "--model", folder, "--device", "cpu", "--out", file)
    assert done.exit_code == 0, done.output
    assert f"from there by: forebay serve --calibration '{file}'" in done.stdout
    assert read_calibration(file).models
    assert not own_file(CPU).exists()
    done = run("tune", "--model", folder, "--out", tmp_path / "no" / "folder.json")
    assert done.exit_code == 2
    assert done.stderr == (
        f"error: there is no folder {tmp_path / 'no'}: make it, or give another --out\n"
    )


# -- reading ---------------------------------------------------------------------------------------


def rates(loaded: LoadedModel, **changed: Any) -> ModelRates:
    values: dict[str, Any] = {
        "name": "tiny llama",
        "fingerprint": loaded.fingerprint,
        "dtype": "float32",
        "token_bytes": 768,
        "prefill_tokens": 512,
        "prefill_tokens_per_s": 1234.0,
        "requests": 8,
        "context_tokens": 512,
        "step_s": 0.0625,
        "inflation_load": 1.0,
        "inflation_both": 1.0,
    }
    return ModelRates(**values | changed)


def calibrated(found: Calibration, *models: ModelRates) -> Calibration:
    link = dataclasses.replace(found.link, load_bytes_per_s=987e6)
    window = dataclasses.replace(found.windows[0], window_bytes=96 << 10)
    return dataclasses.replace(found, link=link, windows=(window,), models=models)


def test_an_engine_starts_from_it(found: Calibration, loaded: LoadedModel):
    known = calibrated(found, rates(loaded))
    settings = EngineSettings(device_tokens=512, host_bytes=8 << 20, calibration=known)
    with Engine(loaded, settings) as engine:
        assert engine.cache.rates.link_bytes_per_s.value == 987e6
        assert engine.cache.rates.prefill_tokens_per_s.value == 1234.0
        assert engine.cache.rates.step_s.value == 0.0625
        assert "windows of 96 KiB" in engine.startup_line
        assert f"(link and model by calibration {known.machine} of " in engine.startup_line
        assert len(engine.generate([[5, 6, 7]])[0].drawn) > 0


def test_what_it_lacks_is_measured(found: Calibration, loaded: LoadedModel):
    known = calibrated(found, rates(loaded, fingerprint="another"))
    settings = EngineSettings(device_tokens=512, host_bytes=8 << 20, calibration=known)
    with Engine(loaded, settings) as engine:
        assert engine.cache.rates.link_bytes_per_s.value == 987e6
        assert engine.cache.rates.prefill_tokens_per_s.value != 1234.0
        assert "(link by calibration " in engine.startup_line
    slowed = dataclasses.replace(settings, link_bytes_per_s=100e6, window_bytes=1 << 16)
    with Engine(loaded, slowed) as engine:
        assert engine.cache.rates.link_bytes_per_s.value != 987e6
        assert "windows of 64 KiB" in engine.startup_line
        assert "calibration" not in engine.startup_line


def test_a_window_is_no_larger_than_the_host_pool(found: Calibration, loaded: LoadedModel):
    known = calibrated(found, rates(loaded))
    settings = EngineSettings(
        device_tokens=512, host_bytes=70_000, block_tokens=32, calibration=known
    )
    with pytest.warns(UserWarning, match="smaller than the device pool"):
        engine = Engine(loaded, settings)
    with engine:
        assert "windows of 48 KiB" in engine.startup_line


def test_which_file_is_taken(found: Calibration, tmp_path: Path, recwarn: Any):
    assert find_calibration("auto", CPU) is None
    write_calibration(found, own_file(CPU))
    assert find_calibration("none", CPU) is None
    taken = find_calibration("auto", CPU)
    assert taken == found
    named = tmp_path / "named.json"
    write_calibration(found, named)
    taken = find_calibration(str(named), CPU)
    assert taken is not None
    assert taken.source == str(named)
    assert not recwarn


def test_a_damaged_one_is_refused_where_it_was_named(tmp_path: Path):
    named = tmp_path / "named.json"
    named.write_text("{}")
    with pytest.raises(CalibrationError, match="its format is None"):
        find_calibration(str(named), CPU)
    own_file(CPU).parent.mkdir(parents=True)
    own_file(CPU).write_text("{")
    with pytest.warns(UserWarning, match="is no calibration.*this start measures instead"):
        assert find_calibration("auto", CPU) is None


def test_one_of_another_machine_is_taken_and_told(found: Calibration, tmp_path: Path):
    named = tmp_path / "named.json"
    write_calibration(dataclasses.replace(found, device="cuda:0 (A GPU)"), named)
    with pytest.warns(UserWarning, match=r"was measured on .* with cuda:0 \(A GPU\), and this is"):
        assert find_calibration(str(named), CPU) is not None


@pytest.mark.parametrize(
    ("text", "said"), [(None, "cannot be read: No such file"), ("[]", "is no calibration")]
)
def test_a_server_does_not_start_from_what_is_none(tmp_path: Path, text: str | None, said: str):
    file = tmp_path / "it.json"
    if text is not None:
        file.write_text(text)
    done = run("serve", "--device", "cpu", "--calibration", file)
    assert done.exit_code == 2
    assert re.match(rf"error: .*{said}.*forebay tune.*\n$", done.stderr)
