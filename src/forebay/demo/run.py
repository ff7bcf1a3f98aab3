"""One mode of the demonstration: a fresh server, and its users as HTTP clients in a closed loop.

A user comes back a fixed pause after the answer. There are fewer run slots than users, so that
requests queue: the time in which look-ahead has something to do. Answers are greedy and of a fixed
length, so that every mode does the same work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

from forebay.cache import CacheStats
from forebay.config import BatchSettings
from forebay.core.modes import Mode
from forebay.demo.client import Answer, ask
from forebay.demo.settings import DemoSettings
from forebay.demo.workload import Script, Turn
from forebay.engine.engine import Engine
from forebay.engine.models import LoadedModel
from forebay.engine.pool import KVPool
from forebay.engine.runner import Runner, probe_geometry
from forebay.engine.settings import EngineSettings
from forebay.engine.startup import measure_prefill
from forebay.errors import ForebayError
from forebay.server.run import Server
from forebay.server.settings import ServerSettings
from forebay.timeline.record import Timeline

_START_S = 30.0
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class ModeResult:
    """One mode, from cold to the last answer."""

    mode: Mode
    startup_line: str
    answers: dict[Turn, Answer]
    stats: CacheStats
    stall_s: float
    wall_s: float
    timeline: Timeline

    @property
    def hidden_share(self) -> float | None:
        """The share of the link's time for loads in which no step was held back; None: no loads.

        0 where steps were held back for longer than the copies took.
        """
        load_s = self.stats.load_s
        return max(0.0, 1.0 - self.stall_s / load_s) if load_s > 0 else None


def throttled_link(loaded: LoadedModel, settings: DemoSettings) -> tuple[float, float]:
    """(bytes/s of a link that gives the load advantage, prefill tokens/s measured now).

    The first is 0, which is no throttle, on a GPU: it has a link of its own.
    """
    geometry = probe_geometry(loaded)
    blocks = max(2, -(-settings.step_tokens // geometry.block_tokens))
    device = loaded.model.device
    runner = Runner(loaded, KVPool(geometry, blocks, dtype=loaded.kv_dtype, device=device))
    # The best of a few: whatever else runs on this machine can only slow it down.
    prefill = max(measure_prefill(runner, settings.step_tokens) for _ in range(3))
    if device.type != "cpu":
        return 0.0, prefill
    return settings.load_advantage * prefill * geometry.token_bytes, prefill


def run_mode(
    loaded: LoadedModel,
    mode: Mode,
    script: Script,
    settings: DemoSettings,
    link_bytes_per_s: float,
    *,
    started: Callable[[str], None] = lambda _: None,
    answered: Callable[[Turn], None] = lambda _: None,
) -> ModeResult:
    """Hold all conversations of `script` in `mode`. The first mode's answers go into `script`.

    `started` is told the engine's startup line, `answered` every turn that got its answer.
    Raises what a client does, SettingsError if no port can be had.
    """
    timeline = Timeline()
    sizes = _engine_settings(loaded, mode, settings, link_bytes_per_s)
    engine = Engine(loaded, sizes, timeline=timeline)
    engine.mover.windows()  # those of the start's own measurement
    started(engine.startup_line)
    with _serving(engine) as server:
        began_s = time.monotonic()
        answers = _Users(server, script, settings).talk(answered)
        wall_s = time.monotonic() - began_s
    stats = server.front.stats
    return ModeResult(
        mode=mode,
        startup_line=engine.startup_line,
        answers=answers,
        stats=stats.cache,
        stall_s=stats.stall_s,
        wall_s=wall_s,
        timeline=timeline,
    )


def _engine_settings(
    loaded: LoadedModel, mode: Mode, settings: DemoSettings, link_bytes_per_s: float
) -> EngineSettings:
    token_bytes = probe_geometry(loaded).token_bytes
    return EngineSettings(
        device_tokens=settings.device_tokens,
        host_bytes=settings.host_tokens * token_bytes,
        mode=mode,
        link_bytes_per_s=link_bytes_per_s,
        batch=BatchSettings(step_tokens=settings.step_tokens, max_running=settings.max_running),
    )


@contextmanager
def _serving(engine: Engine) -> Iterator[Server]:
    """A server on a free port of this machine, in a thread, to the end of the block."""
    try:
        server = Server(engine, ServerSettings(port=0, drain_s=0.0))
    except ForebayError:
        engine.close()
        raise
    thread = threading.Thread(target=server.run, name="demo-server", daemon=True)
    thread.start()
    try:
        until_s = time.monotonic() + _START_S
        while not server.started:
            if not thread.is_alive() or time.monotonic() > until_s:
                raise ForebayError("the server did not start; what it logged says why")
            time.sleep(0.01)
        yield server
    finally:
        server.should_exit = True
        thread.join(_END_S)
        server.socket.close()


class _Users:
    """All users of a script, each on a thread of their own, as clients of `server`."""

    def __init__(self, server: Server, script: Script, settings: DemoSettings) -> None:
        self._address: tuple[str, int] = server.socket.getsockname()[:2]
        self._script = script
        self._settings = settings
        self._stopped = threading.Event()
        self._news: SimpleQueue[tuple[Turn, Answer] | Future[None]] = SimpleQueue()

    def talk(self, answered: Callable[[Turn], None]) -> dict[Turn, Answer]:
        """All answers. Raises what the first client did that failed; then nobody goes on."""
        users = range(len(self._script.workload.conversations))
        pool = ThreadPoolExecutor(len(users), thread_name_prefix="demo-user")
        try:
            for user in users:
                pool.submit(self._converse, user).add_done_callback(self._news.put)
            return self._answers(len(users), answered)
        finally:
            self._stopped.set()
            # The server ends first: whoever still listens to it is told so.
            pool.shutdown(wait=False)

    def _answers(self, talking: int, answered: Callable[[Turn], None]) -> dict[Turn, Answer]:
        answers: dict[Turn, Answer] = {}
        while talking:
            news = self._news.get()
            if isinstance(news, Future):
                news.result()
                talking -= 1
            else:
                turn, answers[turn] = news
                answered(turn)
        return answers

    def _converse(self, user: int) -> None:
        pause_s = self._settings.stagger_s * user
        for number in range(len(self._script.workload.conversations[user].messages)):
            if self._stopped.wait(pause_s):
                return
            turn = Turn(user, number)
            answer = ask(
                self._address,
                self._script.messages(turn),
                self._settings.answer_tokens_of(turn),
                f"user {user + 1}",
            )
            self._script.offer(turn, answer.text)
            self._news.put((turn, answer))
            pause_s = self._settings.pause_s
