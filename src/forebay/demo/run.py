"""One mode of the demonstration: the users in a closed loop over a fresh engine.

A user comes back a fixed pause after the answer. There are fewer run slots than users, so that
requests queue: the time in which look-ahead has something to do. Answers are greedy and of a fixed
length, so that every mode does the same work.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.cache import CacheStats
from forebay.config import BatchSettings
from forebay.core.ledger import Source
from forebay.core.modes import Mode
from forebay.demo.settings import DemoSettings
from forebay.demo.workload import Script, Turn
from forebay.engine.engine import Engine
from forebay.engine.models import LoadedModel
from forebay.engine.pool import KVPool
from forebay.engine.request import EngineRequest, FinishReason
from forebay.engine.runner import Runner, probe_geometry
from forebay.engine.sampler import SamplingParams
from forebay.engine.settings import EngineSettings
from forebay.engine.startup import measure_prefill
from forebay.errors import RequestError
from forebay.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Answer:
    """What one turn got. `gaps` as in `SampledToken`, one for each token."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]
    ttft_s: float
    tokens_by_source: dict[Source, int]


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
        """The share of the link's time for loads in which no step was held back; None: no loads."""
        load_s = self.stats.load_s
        return 1.0 - self.stall_s / load_s if load_s > 0 else None


def throttled_link(loaded: LoadedModel, settings: DemoSettings) -> tuple[float, float]:
    """(bytes/s of a link that gives the load advantage, prefill tokens/s measured now)."""
    geometry = probe_geometry(loaded)
    blocks = max(2, -(-settings.step_tokens // geometry.block_tokens))
    runner = Runner(loaded, KVPool(geometry, blocks, dtype=loaded.kv_dtype))
    # The best of a few: whatever else runs on this machine can only slow it down.
    prefill = max(measure_prefill(runner, settings.step_tokens) for _ in range(3))
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
    """
    timeline = Timeline()
    sizes = _engine_settings(loaded, mode, settings, link_bytes_per_s)
    with Engine(loaded, sizes, timeline=timeline) as engine:
        engine.mover.windows()  # those of the start's own measurement
        started(engine.startup_line)
        loop = _ClosedLoop(engine, script, settings, answered)
        began_s = time.monotonic()
        loop.run()
        return ModeResult(
            mode=mode,
            startup_line=engine.startup_line,
            answers=loop.answers,
            stats=engine.cache.stats(),
            stall_s=engine.stall_s,
            wall_s=time.monotonic() - began_s,
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


@dataclass(slots=True)
class _ClosedLoop:
    engine: Engine
    script: Script
    settings: DemoSettings
    answered: Callable[[Turn], None]
    answers: dict[Turn, Answer] = field(default_factory=dict[Turn, Answer])
    _due: list[tuple[float, Turn]] = field(default_factory=list[tuple[float, Turn]])
    _open: dict[Turn, EngineRequest] = field(default_factory=dict[Turn, EngineRequest])

    def run(self) -> None:
        now_s = time.monotonic()
        users = range(len(self.script.workload.conversations))
        self._due = [(now_s + self.settings.stagger_s * user, Turn(user, 0)) for user in users]
        while self._due or self._open:
            self._arrive()
            if self.engine.busy:
                self.engine.step()
                self._leave()
            else:
                time.sleep(max(0.0, self._due[0][0] - time.monotonic()))

    def _arrive(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            _, turn = heapq.heappop(self._due)
            params = SamplingParams(
                max_tokens=self.settings.answer_tokens_of(turn), ignore_eos=True
            )
            self._open[turn] = self.engine.submit(
                self.script.prompt(turn), params, label=f"user {turn.user + 1}"
            )

    def _leave(self) -> None:
        for turn, request in list(self._open.items()):
            if request.finished is None:
                continue
            del self._open[turn]
            if request.finished is not FinishReason.LENGTH:
                raise RequestError(f"{turn} got no whole answer: {request.error}")
            self.answers[turn] = _answer(request)
            self.script.offer(turn, self.answers[turn].token_ids)
            self.answered(turn)
            if turn.number + 1 < len(self.script.workload.conversations[turn.user].messages):
                back_s = time.monotonic() + self.settings.pause_s
                heapq.heappush(self._due, (back_s, Turn(turn.user, turn.number + 1)))


def _answer(request: EngineRequest) -> Answer:
    tokens = {
        source: request.sources.get(source, 0) * request.block_tokens
        for source in (Source.DEVICE, Source.HOST)
    }
    tokens[Source.RECOMPUTED] = len(request.prompt_ids) - sum(tokens.values())
    return Answer(
        token_ids=tuple(token.token_id for token in request.drawn),
        gaps=tuple(token.gap for token in request.drawn),
        ttft_s=request.timing.ttft_s,
        tokens_by_source=tokens,
    )
