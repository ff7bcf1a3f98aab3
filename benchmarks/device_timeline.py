"""Draws what loads do under decode steps on a GPU, by the device's own events: JSON and PNG.

Conversations of a model of the shape of Llama 3 8B (random weights, bf16) come back to a device
pool that holds half of them. Their second round is drawn from when the first of them is answered,
once for each mode. Needs a CUDA device with 48 GiB, and matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from forebay.config import BatchSettings
from forebay.core.modes import Mode
from forebay.engine.engine import Engine
from forebay.engine.models import LoadedModel
from forebay.engine.request import EngineRequest
from forebay.engine.sampler import SamplingParams
from forebay.engine.settings import EngineSettings
from forebay.machine.memory import read_memory
from forebay.machine.tree import Tree
from forebay.measure.decode import llama_8b
from forebay.timeline.picture import draw
from forebay.timeline.record import Timeline
from forebay.timeline.trace import write_trace

GIB = 1 << 30
USERS, CONTEXT_TOKENS, QUESTION_TOKENS = 8, 4096, 32
ANSWER_TOKENS = (8, 14, 20, 26)  # in turn, so that requests end one after another
TITLES = {
    Mode.SYNCHRONOUS: "Loads stand in front of their steps, and everybody waits",
    Mode.LOOK_AHEAD: "Loads run under the decode steps of other requests",
}
SETTINGS = {
    "device_tokens": 4 * (CONTEXT_TOKENS + 256),
    "host_bytes": 8 * GIB,
    "block_tokens": 16,
    "batch": BatchSettings(step_tokens=2048, max_running=3),
}


def played(model: LoadedModel, mode: Mode) -> Timeline:
    """Both rounds of all users in `mode`; the timeline has the second."""
    timeline = Timeline()
    rng = np.random.default_rng(1)
    with Engine(model, EngineSettings(mode=mode, **SETTINGS), timeline=timeline) as engine:
        prompts = [rng.integers(3, model.vocab_size, CONTEXT_TOKENS) for _ in range(USERS)]
        first = ask(engine, prompts)
        while not engine.settled:
            engine.step()
        questions = rng.integers(3, model.vocab_size, (USERS, QUESTION_TOKENS))
        again = [
            np.concatenate([one.tokens, question])
            for one, question in zip(first, questions, strict=True)
        ]
        ask(engine, again, timeline)
        stats = engine.cache.stats()
    print(f"{mode.value}: {stats.loaded_bytes / 1e9:.2f} GB loaded, {stats.prefetch_bytes}")
    return timeline


def ask(
    engine: Engine,
    prompts: Sequence[np.ndarray],
    timeline: Timeline | None = None,
) -> list[EngineRequest]:
    """All of them at once; returns when all are answered. Clears `timeline` when the first is."""
    requests = [
        engine.submit(
            prompt,
            SamplingParams(max_tokens=ANSWER_TOKENS[user % 4], ignore_eos=True),
            label=f"user {user + 1}",
        )
        for user, prompt in enumerate(prompts)
    ]
    while any(request.finished is None for request in requests):
        engine.step()
        if timeline is not None and any(request.finished for request in requests):
            timeline.clear()
            timeline = None
    return requests


def main() -> int:
    """Plays and draws; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--modes", nargs="+", type=Mode, default=[Mode.LOOK_AHEAD])
    parser.add_argument("--window-s", type=float, default=1.0)
    options = parser.parse_args()
    if (read_memory(Tree()).room_bytes or 0) < 2 * SETTINGS["host_bytes"]:
        print("the host pool of 8 GiB does not fit this machine", file=sys.stderr)
        return 1
    model = llama_8b()
    for mode in options.modes:
        timeline = played(model, mode)
        at = options.out / f"device-timeline-{mode.value}"
        write_trace(timeline, at.with_suffix(".json"))
        draw(
            timeline,
            at.with_suffix(".png"),
            timeline.busiest(options.window_s),
            title=TITLES.get(mode, "Steps, loads and waits"),
            subtitle=f"one H200, Llama 3 8B's shape in bf16, mode {mode.value}; "
            "times are the device's",
            dpi=110,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
