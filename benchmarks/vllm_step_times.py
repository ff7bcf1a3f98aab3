"""An engine of vLLM on a virtual clock, and the CPU time that its connector takes of each step."""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The engine on a virtual clock is that of the tests.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "vllm"))

_CALLS = ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc")
_CALLS += ("build_connector_meta", "update_connector_output", "request_finished")
_CALLS += ("get_kv_connector_stats", "take_events", "has_pending_push_work")


class Timed:
    """CPU time of a connector's calls, a sample for each step; `quiet` are those of steps in which
    nothing came, moved or was computed.
    """

    def __init__(self, engine: Any) -> None:
        connector = engine.scheduler.connector
        self.steps_ms: list[float] = []
        self.quiet_ms: list[float] = []
        self._half = connector.scheduler_half
        self._taken_s = 0.0
        self._inside = False
        self._busy = True
        self._seen: tuple[int, ...] = ()
        for name in _CALLS:
            setattr(connector, name, self._timed(name, getattr(connector, name)))
        self._half.look = self._timed("look", self._half.look)
        self.pool_s = 0.0
        for name in ("get_new_blocks", "cache_full_blocks", "free_blocks"):
            setattr(engine.pool, name, self._of_pool(getattr(engine.pool, name)))
        for name in ("submit", "cancel", "expedite", "news"):
            setattr(engine.worker, name, self._left_out(getattr(engine.worker, name)))

    def _timed(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def call(*args: Any) -> Any:
            if self._inside:
                return inner(*args)
            self._inside, began_s = True, time.thread_time()
            try:
                return inner(*args)
            finally:
                self._taken_s += time.thread_time() - began_s
                self._inside = False
                self._busy |= name in _CALLS[:3] or name == "request_finished"
                if name == "build_connector_meta":
                    self._step()

        return call

    def _of_pool(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """What vLLM's own pool takes of it."""

        def call(*args: Any, **named: Any) -> Any:
            began_s = time.thread_time()
            try:
                return inner(*args, **named)
            finally:
                self.pool_s += (time.thread_time() - began_s) * self._inside

        return call

    def _left_out(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """The model of the link is no part of what is measured."""

        def call(*args: Any) -> Any:
            began_s = time.thread_time()
            try:
                return inner(*args)
            finally:
                self._taken_s -= time.thread_time() - began_s

        return call

    def _step(self) -> None:
        stats, half = self._half.stats(), self._half
        moved = (stats.loaded_bytes, stats.saved_bytes, stats.evicted_blocks, len(half._flights))
        seen = (*moved, half._store.counters.allocated)
        self.steps_ms.append(self._taken_s * 1e3)
        if not self._busy and seen == self._seen:
            self.quiet_ms.append(self._taken_s * 1e3)
        self._seen, self._taken_s, self._busy = seen, 0.0, False


def start_engine(blocks: int, most_running: int) -> tuple[Any, Timed]:
    """An engine on a virtual clock, and what times its connector."""
    from vllm_sim import SimEngine  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    extra = {"host_bytes": "48GiB"}
    connector = {
        "kv_connector": "ForebayConnector",
        "kv_connector_module_path": "forebay.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    with tempfile.TemporaryDirectory() as folder:
        engine = SimEngine(
            Path(folder), blocks=blocks, most_running=most_running, connector=connector
        )
    return engine, Timed(engine)
