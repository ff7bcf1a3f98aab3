"""All arms of one machine start, in groups, within a bound of time; what was finished is kept.

A group's arms are started one after another, and stay up together: rounds alternate between them.
While an arm is measured no other has work. What would not end in time, by the estimates, is left
out and said to be.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from arms import offline_environment
from estimates import WARM_UP, Group, Planned, round_s, start_s, table, turns
from process import described, end_group, preload, serve
from sizes import Sizes

from forebay.measure import report

_ENDING_S = 15.0
_SLOWEST = 3.0
"""A round that takes so many times its estimate, and `_GRACE_S` more, hangs."""
_GRACE_S = 60.0


@dataclass(slots=True)
class Running:
    """An arm that is up, and all that is known of it."""

    planned: Planned
    process: Any
    pipe: Connection
    document: dict[str, Any]
    file: Path
    broken: bool = False
    samples: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def keep(self) -> None:
        """Write what there is."""
        told = {**self.document, "samples": self.samples, "broken": self.broken}
        self.file.write_text(json.dumps(told), encoding="utf-8")


class Batch:
    """Runs groups of arms of `sizes` into `folder`, until `seconds` are over."""

    def __init__(self, sizes: Sizes, folder: Path, seconds: float) -> None:
        self._sizes = sizes
        self._folder = folder
        self._until_s = time.monotonic() + seconds
        self._start = _machine_start()
        self._context: Any = multiprocessing.get_context("fork")
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, groups: Sequence[Group]) -> None:
        """Run each group whose start leaves time for something."""
        os.environ.update(offline_environment())
        sys.path.insert(0, os.environ["BENCHMARK_FOLDER"])
        paths = [os.environ["BENCHMARK_FOLDER"], os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        print(table(groups, self._sizes, self._left_s()), flush=True)
        began_s = time.monotonic()
        if self._sizes.gpu:
            self._measure_link()
        preload()
        self._say(f"link measured and vLLM imported in {time.monotonic() - began_s:.1f} s")
        for group in groups:
            self._group(group)
        self._say(f"done, {self._left_s():.0f} s left")

    def _group(self, group: Group) -> None:
        names = "+".join(planned.arm.name for planned in group)
        starts_s = sum(start_s(self._sizes, planned.arm) for planned in group)
        first_s = min((self._round_s(*turn) for turn in turns(group)), default=0.0)
        if not self._fits(names, starts_s + first_s):
            return
        up: dict[str, Running] = {}
        try:
            for planned in group:
                one = self._launch(planned, beside=list(up))
                up[planned.arm.name] = one
                self._await_start(one)
            for one in up.values():
                self._work(one, WARM_UP, 0)
            for planned, workload, number in turns(group):
                self._work(up[planned.arm.name], workload, number)
        finally:
            for one in up.values():
                self._end(one)

    def _round_s(self, planned: Planned, workload: str, number: int) -> float:
        return round_s(self._sizes, planned.arm, workload, number)

    def _fits(self, what: str, needs_s: float) -> bool:
        left_s = self._left_s()
        if needs_s > left_s:
            self._say(f"{what}: LEFT OUT, it needs about {needs_s:.0f} s of {left_s:.0f}")
        return needs_s <= left_s

    def _launch(self, planned: Planned, beside: list[str]) -> Running:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=serve, args=(planned.arm, self._sizes, self._folder, theirs)
        )
        process.start()
        theirs.close()
        document = {
            "machine_start": self._start,
            "machine": report.machine(),
            "versions": _versions(),
            "commit": report.commit(),
            "command": ["inside_vllm", *map(self._named, sys.argv[1:])],
            "environment": {
                name: value
                for name, value in {**os.environ, **planned.arm.environment}.items()
                if name.startswith(("VLLM_", "PYTORCH_"))
            },
            "beside": beside,
            **described(planned.arm, self._sizes),
        }
        file = self._folder / f"{planned.arm.name}.json"
        return Running(planned, process, ours, document, file)

    def _named(self, word: str) -> str:
        """A word of the command, without the folders of this machine."""
        return "FOLDER" if Path(word) == self._folder else word

    def _await_start(self, one: Running) -> None:
        told = self._answer(one, "ready", self._left_s())
        if told is not None:
            one.document["start"] = told
            self._say(
                f"{one.planned.arm.name}: up after {told['engine_start_s']:.1f} s, "
                f"its memory there after {told['memory_settled_s']:.1f} more"
            )
        one.keep()

    def _work(self, one: Running, workload: str, number: int) -> None:
        what = f"{one.planned.arm.name}: {workload} {number}"
        needs_s = self._round_s(one.planned, workload, number)
        if one.broken:
            return
        if not self._fits(what, needs_s):
            one.document.setdefault("left_out", []).append(f"{workload} {number}")
            one.keep()
            return
        began_s = time.monotonic()
        one.pipe.send((workload, number))
        most_s = min(self._left_s(), _SLOWEST * needs_s + _GRACE_S)
        told = self._answer(one, "done", most_s)
        if told is not None:
            one.samples.append(told)
            self._say(f"{what} took {time.monotonic() - began_s:.1f} s")
        one.keep()

    def _answer(self, one: Running, wanted: str, most_s: float) -> Any:
        """What it sends; None where it failed, ended, or took longer."""
        why = f"no answer within {most_s:.0f} s"
        try:
            if one.pipe.poll(max(0.0, most_s)):
                kind, told = one.pipe.recv()
                if kind == wanted:
                    return told
                why = str(told)
        except (EOFError, OSError) as error:
            why = f"its process ended: {error!r}"
        one.broken = True
        one.document["failure"] = why
        self._say(f"{one.planned.arm.name}: FAILED: {why[-1500:]}")
        return None

    def _end(self, one: Running) -> None:
        if not one.broken:
            one.pipe.send(None)
        one.process.join(0.0 if one.broken else _ENDING_S)
        if one.process.is_alive():
            end_group(one.process.pid)
            one.process.join(_ENDING_S)
        one.pipe.close()
        one.keep()

    def _measure_link(self) -> None:
        file = self._folder / "link.json"
        program = Path(__file__).with_name("link.py")
        subprocess.run([sys.executable, str(program), str(file)], check=False, timeout=60)

    def _left_s(self) -> float:
        return self._until_s - time.monotonic()

    def _say(self, text: str) -> None:
        print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def _machine_start() -> str:
    """The same for all arms that may be paired."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    known = boot.read_text(encoding="ascii").strip() if boot.exists() else uuid.uuid4().hex
    return f"{socket.gethostname()} {known}"


def _versions() -> dict[str, str]:
    return {**report.versions(), "vllm": importlib.import_module("vllm").__version__}
