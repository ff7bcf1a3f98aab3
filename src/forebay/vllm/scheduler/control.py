"""The off switch: a file that names the mode, looked at while the engine runs.

It is a file because only the machine's owner writes files there, while requests come from tenants,
and because vLLM has no way from its operator to a connector's half in the scheduler.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from forebay.core.modes import UNSTALLED_MODES, Mode, ModeOf
from forebay.errors import SettingsError

_logger = logging.getLogger("forebay.vllm")

_LOOK_S = 0.1
"""A look costs a system call, and steps may take less than a millisecond."""
_MOST_BYTES = 64
VLLM_MODE = ModeOf(UNSTALLED_MODES)
"""A mode that vLLM's steps can follow."""

_NO_FILE = "it is no ordinary file"

_Stamp = tuple[int, int, int]


class ModeFile:
    """Says which mode the file at `path` asks for: without a file `normal`.

    What it says while it cannot be read or understood is what it said before; the log tells why.
    Raises SettingsError for a path at which there can be none.
    """

    def __init__(self, path: str, normal: Mode) -> None:
        self._path = Path(path) if path else None
        self._normal = self._mode = normal
        self._stamp: _Stamp | None = None
        self._next_s = 0.0
        self._complaint = ""
        if self._path is not None:
            _check(self._path)

    def look(self, now_s: float) -> Mode:
        """The mode to go by from now on. Reads the file where it changed; never waits for it."""
        if self._path is None or now_s < self._next_s:
            return self._mode
        self._next_s = now_s + _LOOK_S
        try:
            self._mode = self._read(self._path)
            self._complaint = ""
        except (OSError, SettingsError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                _logger.error(
                    "Forebay stays in mode %s: %s: %s", self._mode.value, self._path, error
                )
        return self._mode

    def _read(self, path: Path) -> Mode:
        try:
            found = path.stat()
        except FileNotFoundError:
            if self._stamp is not None:
                _logger.warning("Forebay is in mode %s again: %s is gone", self._normal.value, path)
            self._stamp = None
            return self._normal
        # By the time of the last change of any kind: permissions count, too.
        stamp = (found.st_ctime_ns, found.st_size, found.st_ino)
        if stamp == self._stamp:
            return self._mode
        self._stamp = stamp
        if not stat.S_ISREG(found.st_mode):
            raise SettingsError(_NO_FILE)
        # Without waiting: it may have become a pipe since it was looked at.
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            text = os.read(opened, _MOST_BYTES).decode("ascii", "replace").strip()
        finally:
            os.close(opened)
        mode = VLLM_MODE("mode", text)
        _logger.warning("Forebay is in mode %s from now on: %s says so", mode.value, path)
        return mode


def _check(path: Path) -> None:
    """Raises SettingsError, in which it says what to do, if `path` is none for a mode file."""
    try:
        folder, file = _kind(path.parent), _kind(path)
    except (OSError, ValueError) as error:
        # ValueError: it has a character that no path can have.
        raise SettingsError(
            f"mode_file is {str(path)!r}, where nothing can be looked at ({error}): name another"
        ) from error
    if not stat.S_ISDIR(folder):
        raise SettingsError(f"mode_file is {path}, and {path.parent} is no folder: make it first")
    if file and not stat.S_ISREG(file):
        raise SettingsError(f"mode_file is {path}, and {_NO_FILE}: name one")


def _kind(path: Path) -> int:
    """What is at `path`, as the system tells it; 0 for nothing."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
