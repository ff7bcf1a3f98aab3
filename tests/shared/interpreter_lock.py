"""Who lets go of the interpreter lock: another thread gets it then, and keeps it as it likes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_NEVER_S = 1e6


@contextmanager
def watch(counts: Callable[[], bool]) -> Iterator[list[str]]:
    """Where this thread let another one have the lock, while `counts` said so: file and line.

    Nobody is made to let go meanwhile, so that whoever does has asked for something that does.
    """
    found: list[str] = []
    stop = threading.Event()
    watched = threading.get_ident()

    def look() -> None:
        while not stop.is_set():
            if counts():
                found.append(_where(sys._current_frames()[watched]))
            time.sleep(0)

    before_s = sys.getswitchinterval()
    thread = threading.Thread(target=look)
    thread.start()
    sys.setswitchinterval(_NEVER_S)
    try:
        yield found
    finally:
        sys.setswitchinterval(before_s)
        stop.set()
        thread.join()


def let_go(call: Callable[[], object], *, times: int) -> list[str]:
    """Where `call` let go of the lock, in so many calls."""
    inside = False
    with watch(lambda: inside) as found:
        for _ in range(times):
            inside = True
            call()
            inside = False
            time.sleep(0.0001)  # lets the other thread wait for the lock
    return found


def _where(frame: FrameType | None) -> str:
    lines: list[str] = []
    while frame is not None and len(lines) < 4:
        lines.append(f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)
