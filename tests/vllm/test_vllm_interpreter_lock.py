"""vLLM takes requests in with another thread: while it schedules, nothing of ours lets that have
the interpreter lock, which it would keep for milliseconds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

from interpreter_lock import watch
from test_vllm_policy import engine, loaded, saved

CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
)
PREFIX, SUFFIX, CONVOY = 10_240, 128, 50


def test_a_convoy_keeps_the_interpreter_lock(tmp_path: Path) -> None:
    sim = engine(tmp_path, blocks=3_000, most_running=64)
    connector, inside = sim.scheduler.connector, False

    def noted(inner):
        def call(*arguments):
            nonlocal inside
            inside = True
            try:
                return inner(*arguments)
            finally:
                inside = False

        return call

    for name in CALLS:
        setattr(connector, name, noted(getattr(connector, name)))
    for _ in range(2):
        prefix = sim.some(PREFIX)
        saved(sim, [prefix])
        before = loaded(sim)
        with watch(lambda: inside) as found:
            for _ in range(CONVOY):
                sim.ask(prefix + sim.some(SUFFIX), 4)
            sim.run()
        assert loaded(sim) - before == PREFIX // 16
        assert found == []
