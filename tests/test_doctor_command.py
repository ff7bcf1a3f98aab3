"""The doctor's command: what it prints, how it ends, and that it needs nothing installed."""

from __future__ import annotations

import importlib.machinery
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import machines
import pytest
from machines import GIB, machine_of
from typer.testing import CliRunner

from forebay.cli import app
from forebay.doctor.command import as_json, as_text, main
from forebay.doctor.examine import examine
from forebay.doctor.finding import Wanted

SOURCE = Path(__file__).resolve().parent.parent / "src"


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_text_and_json_say_the_same(tmp_path: Path):
    machine = machine_of(tmp_path, machines.container_v2())
    diagnosis = examine(machine, Wanted(port=0, host_bytes=64 * GIB))
    said = json.loads(as_json(diagnosis))
    assert not said["ok"]
    assert said["host_pool_bytes"] == diagnosis.host_pool_bytes
    text = as_text(diagnosis)
    lines = text.splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert lines[-1] == said["summary"]
    assert "1 thing will fail" in lines[-1]
    for finding in said["findings"]:
        assert f"{finding['level']:<5} {finding['subject']}: " in text


def test_the_exit_status_says_whether_something_fails(
    capsys: pytest.CaptureFixture[str], free_port: int
):
    fine = ["--port", str(free_port), "--host-bytes", "1MiB"]
    assert main(fine) == 0
    assert "host pool up to" in capsys.readouterr().out
    assert main([*fine, "--json", "--host-bytes", "900TiB"]) == 1
    assert not json.loads(capsys.readouterr().out)["ok"]
    for wrong, said in (
        (["--host-bytes", "much"], "write it like"),
        (["--device-tokens", "-5"], "1 or more"),
        (["--max-connections", "0"], "1 or more"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


def test_the_command_line_hands_its_options_over(free_port: int):
    done = CliRunner().invoke(app, ["doctor", "--host-bytes", "900TiB", "--port", str(free_port)])
    assert done.exit_code == 1
    assert "fail  memory" in done.output
    assert "--host-bytes" in CliRunner().invoke(app, ["doctor", "--help"]).output


def run_bare(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In an interpreter that sees no installed package, and the sources without the extension."""
    place = tmp_path / "bare"
    place.mkdir(exist_ok=True)
    if not (place / "forebay").exists():
        (place / "forebay").mkdir()
        for file in (SOURCE / "forebay").iterdir():
            if not file.name.startswith("_native"):
                (place / "forebay" / file.name).symlink_to(file)
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        env={"PYTHONPATH": str(place), "PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_where_nothing_is_installed_the_doctor_says_so(tmp_path: Path, free_port: int):
    done = run_bare(tmp_path, "-m", "forebay", "doctor", "--port", str(free_port), "--json")
    assert done.stderr == ""
    assert done.returncode == 1
    said = {each["subject"]: each for each in json.loads(done.stdout)["findings"]}
    assert said["PyTorch"]["level"] == "fail"
    assert "pip install" in said["PyTorch"]["help"]
    assert said["extension"]["read"] == "not built"
    others = run_bare(tmp_path, "-m", "forebay", "serve")
    assert others.returncode == 2
    assert others.stderr.startswith("error: the command line needs typer: pip install")
    assert run_bare(tmp_path, "-m", "forebay", "--version").stdout == "forebay 0\n"
    assert run_bare(tmp_path, "-m", "forebay.doctor", "--help").returncode == 0


def test_an_extension_for_another_interpreter_is_named(tmp_path: Path, free_port: int):
    run_bare(tmp_path, "-c", "")
    stranger = "_native.cpython-39-x86_64-linux-gnu.so"
    (tmp_path / "bare" / "forebay" / stranger).write_bytes(b"")
    arguments = ("-m", "forebay.doctor", "--json", "--port", str(free_port))
    (said,) = [
        each
        for each in json.loads(run_bare(tmp_path, *arguments).stdout)["findings"]
        if each["subject"] == "extension"
    ]
    assert said["read"] == f"built for another interpreter: {stranger}"
    own = tmp_path / "bare" / "forebay" / f"_native{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    own.write_bytes(b"no library")
    (said,) = [
        each
        for each in json.loads(run_bare(tmp_path, *arguments).stdout)["findings"]
        if each["subject"] == "extension"
    ]
    assert said["read"].startswith("does not load")
