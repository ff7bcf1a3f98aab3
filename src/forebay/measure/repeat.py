"""Something done again and again by a thread of its own, while something else is measured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from forebay.errors import LinkTimeoutError

_END_S = 60.0
_T = TypeVar("_T")


@contextmanager
def repeated(work: Callable[[], _T], *, every_s: float = 0.0) -> Iterator[list[_T]]:
    """Meanwhile a thread calls `work`, the next time `every_s` after the last call ended.

    Gives the list of what the calls returned so far; it grows until the block is left. What a call
    raised is raised there. Raises LinkTimeoutError when a call does not end.
    """
    results: list[_T] = []
    errors: list[Exception] = []
    stop = threading.Event()

    def run() -> None:
        try:
            while not stop.wait(every_s):
                results.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="repeated-work")
    thread.start()
    try:
        yield results
    finally:
        stop.set()
        thread.join(_END_S)
        # Before what went wrong in the block, which may only follow from it.
        if errors:
            raise errors[0]
        if thread.is_alive():
            raise LinkTimeoutError(f"what is repeated did not end within {_END_S:.0f} s")
