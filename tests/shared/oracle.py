"""Engines over poisoned, shuffled memory, and three judges of what they computed.

(a) the engine's own check of every block that it reads from the cache, (b) the recorded schedule
run again without any cache, every block in a slot of its own, and (c) the model's own forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import invariants
import numpy as np
import torch

from forebay.config import BatchSettings
from forebay.core.modes import Mode
from forebay.core.slots import SlotState
from forebay.engine.attention import PAGED, LayerGate
from forebay.engine.engine import Engine
from forebay.engine.models import LoadedModel
from forebay.engine.pool import KVPool
from forebay.engine.record import StepRecord
from forebay.engine.request import EngineRequest
from forebay.engine.runner import Chunk, Runner, probe_geometry
from forebay.engine.sampler import SamplingParams
from forebay.engine.settings import EngineSettings
from forebay.transfer.messages import Direction

BLOCK_TOKENS = 8
TINY_BLOCK_BYTES = 6144
"""Of 8 tokens of the tiny Llama."""
NEAR_TIE = 1e-3
VOCAB = 320
HOST_MODES = [Mode.SYNCHRONOUS, Mode.ASYNCHRONOUS, Mode.LOOK_AHEAD]


def tiny_settings(**overrides: Any) -> EngineSettings:
    """A pool of 20 blocks of 8 tokens under a host tier of 160: nearly every turn evicts."""
    values: dict[str, Any] = {
        "block_tokens": BLOCK_TOKENS,
        "device_tokens": 20 * BLOCK_TOKENS,
        "host_bytes": 1 << 20,
        "mode": Mode.LOOK_AHEAD,
        "batch": BatchSettings(step_tokens=24, max_running=3),
        "min_load_tokens": BLOCK_TOKENS,
        "check_blocks": True,
        "wait_timeout_s": 10.0,
    }
    return EngineSettings(**{**values, **overrides})


@dataclass
class Recorder:
    """Every step of an engine as it ran, with its logits; wraps the engine's runner."""

    steps: list[StepRecord] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    before_step: list[Callable[[Sequence[Chunk]], None]] = field(default_factory=list)
    _newest: torch.Tensor | None = None

    def __call__(self, record: StepRecord) -> None:
        assert self._newest is not None
        self.steps.append(record)
        self.logits.append(self._newest)

    def attach(self, engine: Engine) -> None:
        forward = engine.runner.forward

        def recorded(chunks: Sequence[Chunk], gate: LayerGate | None = None) -> torch.Tensor:
            for hook in self.before_step:
                hook(chunks)
            self._newest = forward(chunks, gate)
            return self._newest

        engine.runner.forward = recorded


class Rig:
    """An engine whose memory holds NaN wherever nothing valid lies, with its recorder.

    Free slots of both tiers are poisoned again before every step, as is what a step is about to
    write and what lies behind it; the slots start in random order. `check_each_step` looks at the
    whole cache after every step.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: EngineSettings | None = None,
        *,
        seed: int = 0,
        check_each_step: bool = False,
    ) -> None:
        self.recorder = Recorder()
        self.engine = Engine(loaded, settings or tiny_settings(), observer=self.recorder)
        self.recorder.attach(self.engine)
        self.recorder.before_step.append(self._poison)
        self.check_each_step = check_each_step
        self.cache = self.engine.cache
        store = self.cache._store
        pool = self.engine.pool
        host = self.engine._memory._host._arena.blocks(max(1, store.host_slots), pool.block_bytes)
        self.host = torch.from_numpy(host).view(pool.dtype)
        pool.fill_poison()
        self.host.fill_(float("nan"))
        rng = np.random.default_rng(seed)
        for tier in (store.device.tier, store.host.tier):
            rng.shuffle(tier._ready[: tier._ready_count])

    def step(self) -> None:
        self.engine.step()
        if self.check_each_step:
            invariants.check(self.cache)

    def run(self, until: Callable[[], bool] | None = None, *, seconds: float = 30.0) -> None:
        """Step until `until()`, or until nothing is left to do."""
        end_s = time.monotonic() + seconds
        while not until() if until else self.engine.busy:
            assert time.monotonic() < end_s, self.describe()
            self.step()

    def finish(self, requests: Iterable[EngineRequest], **limits: float) -> None:
        waiting = list(requests)
        self.run(lambda: all(request.finished is not None for request in waiting), **limits)

    def settle(self, *, seconds: float = 10.0) -> None:
        """Let copies in flight end, then look for anything that is left over."""
        end_s = time.monotonic() + seconds
        self.cache.poll()
        while len(self.cache._flights) and time.monotonic() < end_s:
            self.cache.wait_news(0.05)
            self.cache.poll()
        invariants.check(self.cache)
        invariants.nothing_left(self.cache)
        assert not self.engine._batcher.sequences
        assert not self.engine._batcher.running
        assert not self.engine._requests

    def describe(self) -> str:
        batcher = self.engine._batcher
        flights = [
            (flight.id, flight.is_load, flight.issued, flight.cancelled, len(flight.blocks))
            for flight in self.cache._flights._flights.values()
        ]
        return (
            f"running {[s.request_id for s in batcher.running]}, waiting "
            f"{[r.id for r in self.cache.waiting()]}, in flight {flights}, {self.cache.stats()}"
        )

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the engine and let go of what refers to itself: no collection need find it."""
        self.engine.close()
        self.recorder.before_step.clear()
        for part in (self.engine.runner, self.engine.mover, self.cache):
            for name in ("forward", "submit", "poll"):
                part.__dict__.pop(name, None)

    def _poison(self, chunks: Sequence[Chunk]) -> None:
        store, pool = self.cache._store, self.engine.pool
        tiers = (store.device.tier, store.host.tier)
        states = [tier.state(np.arange(tier.count, dtype=np.int32)) for tier in tiers]
        device, host = (np.flatnonzero(each == SlotState.FREE) for each in states)
        pool.fill_poison(device)
        self.host[torch.from_numpy(host)] = float("nan")
        for chunk in chunks:
            first, place = divmod(chunk.start, pool.block_tokens)
            for view in (*pool.keys, *pool.values):
                view[int(chunk.slots[first]), place:] = float("nan")
            pool.fill_poison(chunk.slots[first + 1 :])
        if pool.device.type == "cuda":
            # No step's number stands for this: a load could overtake it. Not all streams: a test
            # may hold those of the copies.
            torch.cuda.current_stream(pool.device).synchronize()


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


def prompt(length: int, seed: int, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, vocab, length)


def roomy(**overrides: Any) -> EngineSettings:
    """A pool in which nothing is evicted."""
    return tiny_settings(device_tokens=64 * BLOCK_TOKENS, **overrides)


def ids(request: EngineRequest) -> list[int]:
    return [token.token_id for token in request.drawn]


# -- (b) the same schedule without a cache ---------------------------------------------------------


def replay_difference(loaded: LoadedModel, recorder: Recorder, block_tokens: int) -> str | None:
    """Run the recorded schedule with a slot for every block that ever was.

    Returns None if all logits, and the greedy tokens, are the same bit for bit; else what differs
    first.
    """
    names = np.unique(np.concatenate([s for step in recorder.steps for s in step.serials]))
    pool = KVPool(
        probe_geometry(loaded, block_tokens),
        len(names),
        dtype=loaded.kv_dtype,
        device=loaded.model.device,
    )
    pool.fill_poison()
    runner = Runner(loaded, pool)
    for number, (step, logits) in enumerate(zip(recorder.steps, recorder.logits, strict=True)):
        chunks = [
            Chunk(tokens, start, np.searchsorted(names, serials).astype(np.int32))
            for tokens, start, serials in zip(
                step.token_ids, step.starts, step.serials, strict=True
            )
        ]
        again = runner.forward(chunks)
        if torch.equal(again, logits):
            continue
        rows = (again != logits).any(1).nonzero().flatten().tolist()
        who = [step.request_ids[row] for row in rows]
        same = again.argmax(1).tolist() == logits.argmax(1).tolist()
        return f"step {number + 1}: other logits for requests {who}, tokens equal: {same}"
    return None


# -- (c) the model's own forward pass --------------------------------------------------------------


@dataclass
class Agreement:
    """Tokens compared with the model's own, and how many of them were near-ties that differed."""

    tokens: int = 0
    near_ties: int = 0


def compare_with_recompute(loaded: LoadedModel, requests: Iterable[EngineRequest]) -> Agreement:
    """Each greedy token against the model's own choice behind the same tokens.

    They may differ only where the model's two best logits are less than NEAR_TIE apart.
    """
    agreement = Agreement()
    for request in requests:
        own = plain_logits(loaded, request.tokens)
        first = len(request.prompt_ids) - 1
        for place, drawn in enumerate(request.drawn):
            best = own[first + place].topk(2)
            agreement.tokens += 1
            if int(best.indices[0]) != drawn.token_id:
                gap = float(best.values[0] - best.values[1])
                assert gap < NEAR_TIE, (
                    f"request {request.id}, token {place}: {drawn.token_id} instead of "
                    f"{int(best.indices[0])}, which leads by {gap}"
                )
                agreement.near_ties += 1
    return agreement


def plain_logits(loaded: LoadedModel, tokens: np.ndarray) -> torch.Tensor:
    """Logits of one undivided forward pass with the model's usual attention, ``[n, vocab]``."""
    model: Any = loaded.model
    model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            ids = torch.from_numpy(np.array(tokens)).unsqueeze(0).to(model.device)
            return model(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(PAGED)


# -- conversations ---------------------------------------------------------------------------------


@dataclass
class Conversations:
    """Users who share a system prompt and ask in rounds: all of them queue at once.

    After every `abort_every` steps some request is aborted, after every `preempt_every` a running
    one is preempted; 0 is never.
    """

    rig: Rig
    users: int = 6
    turns: int = 3
    system_tokens: int = 40
    question_tokens: int = 9
    answer_tokens: int = 11
    vocab: int = VOCAB
    seed: int = 0
    abort_every: int = 0
    preempt_every: int = 0
    requests: list[EngineRequest] = field(default_factory=list)
    aborted: int = 0
    preempted: int = 0
    _steps: int = 0

    def play(self, *, seconds: float = 200.0) -> list[EngineRequest]:
        """All turns of all users. Returns the requests that were answered."""
        rng = np.random.default_rng(self.seed)
        system = rng.integers(3, self.vocab, self.system_tokens)
        history = [np.concatenate([system, self._question(rng)]) for _ in range(self.users)]
        end_s = time.monotonic() + seconds
        for _ in range(self.turns):
            asked = [self._ask(prompt) for prompt in history]
            while any(request.finished is None for request in asked):
                assert time.monotonic() < end_s, self.rig.describe()
                self.rig.step()
                self._disturb(rng, [r for r in asked if r.finished is None])
            history = [np.concatenate([r.tokens, self._question(rng)]) for r in asked]
        return [r for r in self.requests if len(r.drawn) == self.answer_tokens]

    def _ask(self, prompt: np.ndarray) -> EngineRequest:
        request = self.rig.engine.submit(prompt, greedy(self.answer_tokens))
        self.requests.append(request)
        return request

    def _disturb(self, rng: np.random.Generator, alive: list[EngineRequest]) -> None:
        running = self.rig.engine._batcher.running
        self._steps += 1
        if running and self.preempt_every and self._steps % self.preempt_every == 0:
            self.rig.engine._batcher.preempt(running[int(rng.integers(len(running)))])
            self.preempted += 1
        if alive and self.abort_every and self._steps % self.abort_every == 0:
            self.rig.engine.abort(alive[int(rng.integers(len(alive)))].id)
            self.aborted += 1

    def _question(self, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(3, self.vocab, self.question_tokens)


# -- what comes back over the link -----------------------------------------------------------------


class Returning:
    """An engine with some prompts in host memory alone, whose link a test can stop.

    `patient`: loads look worth any wait, so that nobody recomputes before the test is done.
    """

    def __init__(self, loaded: LoadedModel, *, patient: bool = True, **overrides: Any) -> None:
        self.loaded = loaded
        values = {"window_bytes": TINY_BLOCK_BYTES, **overrides}
        self.rig = Rig(loaded, tiny_settings(**values), seed=6)
        self.engine = self.rig.engine
        self.core = self.engine.mover.core
        self.prompts = [prompt(72, 20 + i) for i in range(6)]
        self.rig.finish([self.engine.submit(each, greedy(2)) for each in self.prompts])
        self.rig.settle()
        if patient:
            for average, value in (
                (self.rig.cache.rates.prefill_tokens_per_s, 0.1),
                (self.rig.cache.rates.link_bytes_per_s, 100.0),
            ):
                average.value, average.weight = value, 0.0

    def host_only(self) -> list[np.ndarray]:
        store, found = self.rig.cache._store, []
        for each in self.prompts:
            keys = each[:64].astype(np.int32).tobytes()
            blocks = store.match(self.engine._namespace(""), keys).ids
            if len(blocks) == 8 and not store.resident(blocks).any():
                found.append(each)
        assert found, "every prompt has something on the device"
        return found

    def ask(self, which: int = 0, count: int = 4) -> EngineRequest:
        tokens = np.concatenate([self.host_only()[which], [9, 9]])
        return self.engine.submit(tokens, greedy(count))

    def hold(self, direction: Direction = Direction.LOAD) -> None:
        for lane in (0, 1):
            self.core.hold_lane(direction, lane)

    def release(self, direction: Direction = Direction.LOAD) -> None:
        for lane in (0, 1):
            self.core.release_lane(direction, lane)

    def judge(self, requests: list[EngineRequest]) -> None:
        assert replay_difference(self.loaded, self.rig.recorder, BLOCK_TOKENS) is None
        compare_with_recompute(self.loaded, requests)

    def steps_of(self, request: EngineRequest) -> int:
        return sum(request.id in step.request_ids for step in self.rig.recorder.steps)


def judge(loaded: LoadedModel, rig: Rig, talk: Conversations) -> None:
    """Play, let the oracles look, and see that there was something to look at."""
    answered = talk.play()
    rig.settle()
    assert replay_difference(loaded, rig.recorder, BLOCK_TOKENS) is None
    agreement = compare_with_recompute(loaded, answered)
    assert agreement.tokens == len(answered) * talk.answer_tokens > 0
    assert agreement.near_ties <= agreement.tokens // 100
    something_to_look_at(rig)


def something_to_look_at(rig: Rig) -> None:
    """Blocks were evicted, shared, and brought back from where the mode says."""
    engine, stats = rig.engine, rig.cache.stats()
    assert engine._verifier.compared > 50
    assert stats.evicted_blocks > 10
    assert sum(stats.misses.values()) == stats.sources["recomputed"]
    assert stats.sources["device"] > 0, "no prefix was shared"
    assert stats.quarantined_blocks == 0
    if engine.settings.mode in HOST_MODES:
        assert stats.saved_bytes > 0
        assert stats.loaded_bytes > 0
        assert stats.sources["host"] > 0
    else:
        assert stats.loaded_bytes == stats.saved_bytes == 0
