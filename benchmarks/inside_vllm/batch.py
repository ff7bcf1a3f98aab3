"""All arms of one machine start, in groups, within a bound of time; what was finished is kept.

A group's arms are started one after another, and stay up together: the workloads that need pairs
alternate between them, all others run on one after the other. While an arm is measured no other
has work.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from arms import ARMS, Arm, Sizes, offline_environment
from process import described, end_group, preload, serve

from forebay.measure import report

_ENDING_S = 20.0
_TOGETHER = ("no_hits", "thrash")
"""Workloads whose rounds alternate between the arms of a group."""


@dataclass(frozen=True, slots=True)
class Planned:
    """An arm, and how many rounds of each workload it runs."""

    arm: Arm
    rounds: Mapping[str, int]

    @classmethod
    def parse(cls, text: str) -> Planned:
        """From "forebay:solo=4,backlog_64,no_hits=5"."""
        name, _, told = text.partition(":")
        rounds: dict[str, int] = {}
        for each in told.split(",") if told else []:
            workload, _, count = each.partition("=")
            rounds[workload] = int(count or 1)
        return cls(ARMS[name], rounds)


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

    def run(self, groups: Sequence[Sequence[Planned]], least_s: float) -> None:
        """Run each group for which at least `least_s` seconds are left."""
        os.environ.update(offline_environment())
        sys.path.insert(0, os.environ["BENCHMARK_FOLDER"])
        paths = [os.environ["BENCHMARK_FOLDER"], os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        began_s = time.monotonic()
        if self._sizes.gpu:
            self._measure_link()
        preload()
        self._say(f"link measured and vLLM imported in {time.monotonic() - began_s:.1f} s")
        for group in groups:
            names = "+".join(planned.arm.name for planned in group)
            if self._left_s() < least_s:
                self._say(f"{names}: left out, {self._left_s():.0f} s are too few")
                continue
            self._group(group)
        self._say(f"done, {self._left_s():.0f} s left")

    def _group(self, group: Sequence[Planned]) -> None:
        up: list[Running] = []
        try:
            for planned in group:
                one = self._launch(planned, beside=[each.planned.arm.name for each in up])
                up.append(one)
                self._await_start(one)
            for one in up:
                self._work(one, "warm_up", 0)
            for one in up:
                for workload, rounds in one.planned.rounds.items():
                    if workload not in _TOGETHER:
                        for number in range(rounds):
                            self._work(one, workload, number)
            for workload in _TOGETHER:
                most = max(one.planned.rounds.get(workload, 0) for one in up)
                for number in range(most):
                    # Who is first changes from round to round.
                    order = up if number % 2 == 0 else up[::-1]
                    for one in order:
                        if number < one.planned.rounds.get(workload, 0):
                            self._work(one, workload, number)
        finally:
            for one in up:
                self._end(one)

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
            "command": ["inside_vllm", *sys.argv[1:]],
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

    def _await_start(self, one: Running) -> None:
        told = self._answer(one, "ready")
        if told is not None:
            one.document["start"] = told
            self._say(f"{one.planned.arm.name}: up after {told['engine_start_s']:.1f} s")
        one.keep()

    def _work(self, one: Running, workload: str, number: int) -> None:
        if one.broken:
            return
        began_s = time.monotonic()
        one.pipe.send((workload, number))
        told = self._answer(one, "done")
        if told is not None:
            one.samples.append(told)
            seconds = time.monotonic() - began_s
            self._say(f"{one.planned.arm.name}: {workload} {number} took {seconds:.1f} s")
        one.keep()

    def _answer(self, one: Running, wanted: str) -> Any:
        """What it sends; None where it failed, ended, or took too long."""
        why = f"no answer within {self._left_s():.0f} s"
        try:
            if one.pipe.poll(max(0.0, self._left_s())):
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
