"""A toy engine over the real cache and batching rules, on the machine made of lists."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fakes import LAYERS, FakeClock, LaunchedStep, Machine

from forebay.cache import Cache
from forebay.config import BatchSettings, CacheSettings
from forebay.core.batch import Batcher
from forebay.core.requests import Request, Ticket
from forebay.errors import RequestError
from forebay.transfer.mover import TransferFailedError

BLOCK_TOKENS = 4
KEY_BYTES = 4 * BLOCK_TOKENS
BLOCK_BYTES = 1024


@dataclass(eq=False)
class ToySequence:
    id: int
    namespace: bytes
    prompt: list[int]
    answer: int
    arrival_s: float
    priority: int = 0
    no_cache: bool = False
    no_save: bool = False
    ticket: Ticket | None = None
    computed_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for token in self.prompt:
            self.append(token)

    @property
    def request_id(self) -> int:
        return self.id

    @property
    def known_tokens(self) -> int:
        return len(self.tokens)

    @property
    def answer_left(self) -> int:
        return len(self.prompt) + self.answer - len(self.tokens)

    def append(self, token: int) -> None:
        before = self.hashes[-1] if self.hashes else hash(self.namespace)
        self.tokens.append(token)
        self.hashes.append(hash((before, token)))

    def keys(self) -> bytes:
        whole = len(self.tokens) // BLOCK_TOKENS * BLOCK_TOKENS
        return np.asarray(self.tokens[:whole], np.int32).tobytes()

    def renew(self) -> Request:
        return Request(
            id=self.id,
            namespace=self.namespace,
            keys=self.keys(),
            tokens=len(self.tokens),
            max_answer_tokens=self.answer_left,
            arrival_s=self.arrival_s,
            priority=self.priority,
            no_cache=self.no_cache,
            no_save=self.no_save,
        )


class World:
    def __init__(
        self,
        settings: CacheSettings,
        batch: BatchSettings,
        *,
        seed: int,
        late: bool = False,
        slowly: bool = False,
        machine: Any = None,
    ) -> None:
        """`late`: reports come one poll late. `slowly`: host memory is readied bit by bit."""
        self.rng = random.Random(seed)
        self.machine = machine or Machine(
            settings.block_tokens,
            settings.device_slots,
            settings.host_slots,
            FakeClock(),
            self.rng,
            late_reports=late,
        )
        self.clock = self.machine.clock
        self.host_open = 0 if slowly else settings.host_slots
        self.cache = Cache(
            settings,
            self.machine,
            key_bytes=KEY_BYTES,
            host_ready=lambda: self.host_open,
            layer_ends=[settings.block_bytes * (i + 1) // LAYERS for i in range(LAYERS)],
            clock=self.clock,
        )
        self.batcher = Batcher(batch, self.cache)
        self.finished = 0
        self.aborted = 0
        self.preempted = 0
        self.torn_steps = 0
        self.next_id = 1
        self.prefixes = [[self.rng.randint(0, 3) for _ in range(24)] for _ in range(3)]
        self.history: list[tuple[bytes, list[int]]] = []

    # -- rules -------------------------------------------------------------------------------------

    def arrive(self, *, priority: int = 0, no_save: bool = False, no_cache: bool = False) -> None:
        namespace = self.rng.choice([b"a", b"a", b"b"])
        prompt = self._prompt(namespace)
        most = self.cache.settings.device_slots * BLOCK_TOKENS
        answer = self.rng.randint(1, 10)
        prompt = prompt[: most - answer - BLOCK_TOKENS]
        sequence = ToySequence(
            self.next_id, namespace, prompt, answer, self.clock.now_s, priority, no_cache, no_save
        )
        self.next_id += 1
        self.batcher.sequences[sequence.id] = sequence
        try:
            self.cache.enqueue(sequence.renew())
        except RequestError:
            assert self.cache.stats().quarantined_blocks, "refused, and the pool is whole"
            self.batcher.remove(sequence)

    def tick(self, *, abandon: bool = False) -> bool:
        """One turn of an engine's loop. True if a step was launched."""
        self.clock.now_s += self.rng.choice([0.0, 0.001, 0.05])
        more = self.rng.randint(0, 2)
        self.host_open = min(self.host_open + more, self.cache.settings.host_slots)
        self.cache.poll(self.batcher.outlook(self.cache.rates), self.batcher.free_run_slots)
        batch = self.batcher.schedule()
        self.preempted += len(batch.preempted)
        work = [item for item in batch.work if item.sequence.ticket is not None]
        lost = self.cache.ready([item.sequence.ticket for item in work])
        for ticket in lost:
            self.batcher.preempt(self.batcher.sequences[ticket.request.id])
        work = [item for item in work if item.sequence.ticket is not None]
        if not work:
            return False
        step = self.cache.begin_step(
            [(item.sequence.ticket, item.start, item.tokens) for item in work]
        )
        if abandon:
            self.cache.step_abandoned(step)
            return False
        try:
            by_layer = self._start_by_layer(work)
        except TransferFailedError:
            self.machine.steps.append(LaunchedStep(step, [], []))
            self.cache.step_launched(step, whole=False)
            for item in work:
                self.batcher.preempt(item.sequence)
            self.torn_steps += 1
            return True
        self._launch(step, work, by_layer=by_layer)
        return True

    def abort_one(self) -> None:
        if self.batcher.sequences:
            sequence = self.batcher.sequences[self.rng.choice(list(self.batcher.sequences))]
            self.cache.abort(sequence.id)
            self.batcher.remove(sequence)
            self.aborted += 1

    def drain(self, most: int = 2000) -> None:
        """Run until nothing is left, in a bounded number of turns."""
        for _ in range(most):
            launched = self.tick()
            while self.machine.run_step():
                pass
            self.machine.make_progress(3)
            if not launched:
                self.cache.wait_news(0.05)
            idle = not self.batcher.sequences and not self.machine.flying
            if idle and not self.machine.steps:
                self.cache.poll()
                self.cache.poll()
                if not self.machine.flying:
                    return
        raise AssertionError(
            f"stuck: {len(self.batcher.running)} running, {len(self.cache.waiting())} waiting, "
            f"{len(self.machine.flying)} in flight"
        )

    # -- inside ------------------------------------------------------------------------------------

    def _start_by_layer(self, work: list) -> bool:
        late = [item for item in work if item.sequence.ticket.band_of_layer]
        for layer in range(LAYERS if late else 0):
            for item in late:
                ticket = item.sequence.ticket
                self.cache.layer(ticket, layer)
                self.machine.read_layer(
                    ticket.slots.tolist(), item.start, item.sequence.hashes[: item.start], layer
                )
        return bool(late)

    def _launch(self, step: int, work: list, *, by_layer: bool) -> None:
        snapshot = []
        waits: list[int] = []
        for item in work:
            sequence = item.sequence
            end = item.start + item.tokens
            snapshot.append((sequence.ticket.slots.tolist(), item.start, sequence.hashes[:end]))
            waits += sorted(sequence.ticket.waits)
        self.machine.steps.append(LaunchedStep(step, waits, snapshot, by_layer))
        self.cache.step_launched(step)
        for item in work:
            sequence = item.sequence
            sequence.computed_tokens = item.start + item.tokens
            if sequence.computed_tokens == sequence.known_tokens:
                sequence.append(self.rng.randint(0, 3))
            self.cache.commit(sequence.ticket, sequence.keys())
            if sequence.answer_left <= 0:
                self.cache.finish(sequence.ticket)
                self.batcher.remove(sequence)
                self.history.append((sequence.namespace, sequence.tokens))
                self.finished += 1

    def _prompt(self, namespace: bytes) -> list[int]:
        kind = self.rng.random()
        mine = [tokens for space, tokens in self.history if space == namespace]
        if mine and kind < 0.5:
            base = self.rng.choice(mine[-8:])
        else:
            base = self.rng.choice(self.prefixes)[: self.rng.randint(0, 24)]
        return list(base) + [self.rng.randint(0, 3) for _ in range(self.rng.randint(1, 8))]
