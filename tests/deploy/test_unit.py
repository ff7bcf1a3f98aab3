"""The systemd unit: valid for systemd, and its commands are ours."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from forebay.cli import app
from forebay.config import MIB
from forebay.doctor.command import options_of
from forebay.doctor.finding import Wanted
from forebay.server.settings import ServerSettings

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "forebay.service"
TEXT = UNIT.read_text()


def command(key: str) -> list[str]:
    (line,) = re.findall(rf"^{key}=(.+)$", TEXT, re.MULTILINE)
    program, *words = shlex.split(line)
    assert program == "/opt/forebay/bin/forebay"
    return words


def test_systemd_takes_it(tmp_path: Path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / UNIT.name
    unit.write_text(TEXT.replace("/opt/forebay/bin/forebay", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_its_server_starts_with_options_that_there_are():
    name, *words = command("ExecStart")
    serve = get_command(app).commands[name]  # pyright: ignore[reportAttributeAccessIssue]
    options = serve.make_context(name, words).params
    assert options["drain_s"] == ServerSettings().drain_s
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", TEXT, re.MULTILINE)
    assert int(stop_s) > options["drain_s"] + 5


def test_its_doctor_looks_at_what_is_started():
    name, *words = command("ExecStartPre")
    assert name == "doctor"
    wanted = options_of(words)[0]
    serve = command("ExecStart")
    assert wanted == Wanted(model="smollm2", host_bytes=8192 * MIB, port=8000)
    for option, value in (("--model", "smollm2"), ("--host-bytes", "8GiB"), ("--port", "8000")):
        assert serve[serve.index(option) + 1] == value
