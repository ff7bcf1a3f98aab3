"""What the doctor is asked, what it looks at, and what it finds."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from forebay.engine.settings import EngineSettings
from forebay.machine.driver import Driver, read_driver
from forebay.machine.tree import Tree
from forebay.server.settings import ServerSettings


class Level(StrEnum):
    """OK: nothing to do. NOTE: worth knowing. WARN: it works, worse. FAIL: it will not work."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """`read` is what was seen, `limits` what that means for Forebay, `help` what to do."""

    subject: str
    level: Level
    read: str
    limits: str = ""
    help: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is going to be run here. Sizes are of KV; `model` "" is none in particular."""

    model: str = ""
    device: str = EngineSettings().device
    host_bytes: int = EngineSettings().host_bytes
    device_tokens: int = EngineSettings().device_tokens
    host: str = ServerSettings().host
    port: int = ServerSettings().port
    max_connections: int = ServerSettings().max_connections


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system of a folder. Bytes."""

    total_bytes: int
    free_bytes: int


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _disk(folder: Path) -> Disk | None:
    """Of the nearest folder above that is there."""
    for place in (folder, *folder.absolute().parents):
        try:
            found = os.statvfs(place)
        except OSError:
            continue
        return Disk(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """How the doctor looks at the machine; tests look at another one.

    `limit` gives the soft limit of a `resource.RLIMIT_*`, None for unlimited.
    """

    tree: Tree = field(default_factory=Tree)
    limit: Callable[[int], int | None] = _limit
    disk: Callable[[Path], Disk | None] = _disk
    driver: Driver = field(default_factory=read_driver)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
