"""A request whose blocks are taken by another one while the mover saves them, and stands still."""

from __future__ import annotations

import threading
import time
from typing import Any

from vllm_toy import LANES, Asked, ToyEngine, prompt_of

from forebay.transfer.messages import Direction


def asked_again_behind_held_saves(engine: ToyEngine, core: Any) -> Asked:
    """Answer a prompt, and one that takes its slots while the mover `core` saves them, in held
    lanes that go on in a moment; then the first one again.
    """
    for lane in LANES:
        core.hold_lane(Direction.SAVE, lane)
    first = engine.ask(prompt_of(1, 200), 1)
    while not first.ended:
        engine.step()
    until_s = time.monotonic() + 30.0
    # Or it is cancelled before a byte of it is copied.
    while core.events_in_use < len(LANES):
        assert time.monotonic() < until_s
        time.sleep(0.001)
    second = engine.ask(prompt_of(2, 200), 1)
    release = threading.Timer(
        0.5, lambda: [core.release_lane(Direction.SAVE, lane) for lane in LANES]
    )
    release.start()
    while not second.ended:
        engine.step()
    release.join()
    engine.run()
    again = engine.ask(prompt_of(1, 200), 4)
    engine.run()
    return again
