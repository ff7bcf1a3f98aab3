"""Does what a page says, from top to bottom: the server that was started last goes on running.

The first page starts a process with its own model, the others a tiny model in this process, through
the same command line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT, Block
from typer.main import get_command

import forebay.cli.serve
import forebay.engine.models
from forebay.cli import app
from forebay.engine.models import LoadedModel
from forebay.server.run import Server

BIN = Path(sys.executable).parent
_PORT = re.compile(r"(?<=--port )\d+")
_SERVED_PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+")
_PATIENCE_S = 60.0


class Reader:
    """Runs blocks in `folder`. `tiny` None: servers are processes, with the models they name."""

    def __init__(self, folder: Path, tiny: LoadedModel | None, patch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._tiny = tiny
        self._patch = patch
        self._serving = contextlib.ExitStack()
        self._port = 0

    def close(self) -> None:
        self._serving.close()

    def run(self, block: Block) -> None:
        if block.starts_server:
            self._serving.close()
            command = _PORT.sub("0", block.text)
            start = self._start_process if self._tiny is None else self._start_here
            self._port = self._serving.enter_context(start(command))
            return
        text = _SERVED_PORT.sub(str(self._port), block.text)
        if block.language == "python":
            exec(compile(text, "a block of the documentation", "exec"), {"__name__": "block"})
        else:
            self._run_shell(text)

    def _run_shell(self, text: str) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self._folder,
            env=_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"

    @contextlib.contextmanager
    def _start_process(self, command: str) -> Any:
        process = subprocess.Popen(
            shlex.split(command, comments=True),
            cwd=self._folder,
            env=_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            said = process.stdout.readline() + process.stdout.readline()
            found = re.search(r"serving on http://127\.0\.0\.1:(\d+)/v1", said)
            assert found, said
            yield int(found[1])
        finally:
            process.terminate()
            # It ends in order, then by the signal that asked for it.
            try:
                assert process.wait(_PATIENCE_S) == -signal.SIGTERM
            finally:
                process.kill()

    @contextlib.contextmanager
    def _start_here(self, command: str) -> Any:
        words = shlex.split(command, comments=True)[1:]
        told: queue.Queue[Server | BaseException] = queue.Queue()

        class Told(Server):
            async def startup(self, sockets: Any = None) -> None:
                await super().startup(sockets)
                told.put(self)

        def load(name: str, *_: object) -> LoadedModel:
            assert self._tiny is not None
            return dataclasses.replace(self._tiny, name=name)

        def serve() -> None:
            try:
                get_command(app).main(words, standalone_mode=False)
            except BaseException as error:
                told.put(error)

        self._patch.setattr(forebay.cli.serve, "Server", Told)
        self._patch.setattr(forebay.engine.models, "load_model", load)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        server = told.get(timeout=_PATIENCE_S)
        assert isinstance(server, Server), server
        try:
            yield server.socket.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(_PATIENCE_S)
            assert not thread.is_alive()


def _environment() -> dict[str, str]:
    return os.environ | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
    }
