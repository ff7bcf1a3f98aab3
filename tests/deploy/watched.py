"""A Prometheus that scrapes a server which is kept busy, for as long as a test looks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "server"))

import raw
from server_rig import serving, tiny_model

from forebay.config import BatchSettings
from forebay.engine.settings import EngineSettings
from forebay.server.settings import ServerSettings

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
KEY = "the-operators-key"
_STARTS_S = 30.0
_TRIES = 3
_USERS = 4
_CONVERSATIONS = 12


def until(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it came to hold in time."""
    end_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.2)
    return True


@contextmanager
def busy_server() -> Iterator[int]:
    """The port of a server over a tiny model that answers all the time: more conversations than its
    device pool holds, with a queue to look along.
    """
    engine = EngineSettings(
        device_tokens=1024,
        host_bytes=1 << 24,
        block_tokens=16,
        batch=BatchSettings(max_running=2, step_tokens=128),
    )
    settings = ServerSettings(port=0, operator_key=KEY)
    with serving(tiny_model(), settings, engine) as served:
        stop = threading.Event()
        users = [
            threading.Thread(target=_talk, args=(served.port, number, stop), daemon=True)
            for number in range(_USERS)
        ]
        for user in users:
            user.start()
        try:
            yield served.port
        finally:
            stop.set()
            for user in users:
                user.join(30)


def _talk(port: int, number: int, stop: threading.Event) -> None:
    turn = number
    while not stop.is_set():
        conversation = turn % _CONVERSATIONS
        prompt = f"{conversation}: " + "what was said before, " * 15 + str(turn)
        body = {"prompt": prompt, "max_tokens": 6, "ignore_eos": True}
        raw.ask(port, "/v1/completions", body)
        turn += _USERS + 1


class Prometheus:
    """One that runs, by its HTTP interface."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer of its API; what it says is wrong, where it refuses."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def values(self, expression: str) -> list[float]:
        """What `expression` is now, one for each series."""
        found = self.get("query", query=expression)
        assert found["resultType"] == "vector", expression
        return [float(each["value"][1]) for each in found["result"]]

    @property
    def ready(self) -> bool:
        """Whether it takes queries."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[Prometheus]:
    """One with our files, in a hurry, that scrapes `target` with the operator's key."""
    config = _configured(folder, target)
    for attempt in range(_TRIES):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        log = folder / f"prometheus-{attempt}.log"
        process = _started(config, folder / f"data-{attempt}", port, log)
        try:
            watching = Prometheus(port)
            until(lambda p=process, w=watching: w.ready or p.poll() is not None, _STARTS_S)
            if process.poll() is None and watching.ready:
                yield watching
                return
        finally:
            _end(process)
    raise AssertionError(f"Prometheus did not start: {log.read_text()[-2000:]}")


def _configured(folder: Path, target: int) -> Path:
    """deploy/'s files, with a server that is here, seconds for minutes, and the key they show."""
    for rules in DEPLOY.glob("rules*.yml"):
        shutil.copy(rules, folder)
    key = folder / "forebay.key"
    key.write_text(KEY)
    text = (DEPLOY / "prometheus.yml").read_text()
    text, targets = re.subn("localhost:8000", f"127.0.0.1:{target}", text)
    text, intervals = re.subn(r"_interval: 15s", "_interval: 1s", text)
    text, lines = re.subn(
        r"^    # (authorization:|  credentials_file: )", r"    \1", text, flags=re.M
    )
    text = text.replace("/etc/prometheus/forebay.key", str(key))
    assert (targets, intervals, lines) == (1, 2, 2)
    config = folder / "prometheus.yml"
    config.write_text(text)
    return config


def _started(config: Path, data: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={data}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            stdout=output,
            stderr=output,
            env=os.environ | {"GOMAXPROCS": "1"},
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
