"""The reference engine: the loop that ties cache, batching rules, model and sampler together.

One thread owns an engine. A turn of the loop polls the cache (which plans), chooses a batch, makes
sure that its loads are in place, runs it, and publishes what it wrote. A request that lacks only
its load is stepped over: the others go on.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.cache import Cache
from forebay.core.batch import Batch, Batcher, Work
from forebay.core.directory import Session
from forebay.core.modes import Mode
from forebay.core.requests import NotYet, Ticket
from forebay.engine.by_layer import LayerWaits
from forebay.engine.memory import EngineMemory, device_free_bytes
from forebay.engine.models import LoadedModel, take_model
from forebay.engine.pace import Pace, decode_tokens, prefill_tokens
from forebay.engine.placement import describe_device, dtype_name
from forebay.engine.prompt import Prompt, check_length, check_params, prompt_tokens, several
from forebay.engine.record import StepRecord
from forebay.engine.request import Delta, EngineRequest, FinishReason, Timing, draw
from forebay.engine.runner import Chunk, Runner, probe_geometry
from forebay.engine.sampler import SamplingParams
from forebay.engine.settings import EngineSettings
from forebay.engine.startup import describe, know_machine
from forebay.engine.stats import EngineStats
from forebay.engine.text import chat_prompt
from forebay.engine.verify import BlockVerifier
from forebay.engine.view import EngineView
from forebay.errors import DeviceError, QueueFullError, RequestError
from forebay.geometry import default_block_tokens
from forebay.machine.memory import read_memory
from forebay.machine.tree import Tree
from forebay.timeline.record import Records
from forebay.transfer.mover import TransferFailedError

# The longest wait for the link before the loop looks again, when nothing else can run.
_IDLE_WAIT_S = 0.05

_TOO_SMALL = "copies that never ended took so many slots out of use that it fits no more: restart"


class Engine:
    """A model with its pools, cache and queue. Close it, or use it as a context manager."""

    def __init__(
        self,
        model: str | Path | LoadedModel,
        settings: EngineSettings | None = None,
        *,
        timeline: Records | None = None,
        observer: Callable[[StepRecord], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings = settings or EngineSettings()
        self.loaded = take_model(model, settings)
        self.timeline = timeline
        self._observer = observer
        self._clock = clock
        block_tokens = settings.block_tokens or default_block_tokens(
            probe_geometry(self.loaded, 16).token_bytes
        )
        geometry = probe_geometry(self.loaded, block_tokens)
        sizes = settings.cache_settings(
            geometry, read_memory(Tree()), device_free_bytes(self.loaded.model.device)
        )
        timed = timeline is not None
        self._memory = EngineMemory(self.loaded, geometry, sizes, settings, timed=timed)
        self._trace = self._memory.trace
        self.pool, self.mover = self._memory.pool, self._memory.mover
        self.runner = Runner(self.loaded, self.pool)
        start = know_machine(self._memory, self.runner, sizes, settings)
        self.cache = Cache(
            sizes,
            self.mover,
            key_bytes=4 * block_tokens,
            first_transfer=start.next_transfer,
            host_ready=self._memory.host_ready,
            layer_ends=geometry.layer_ends,
            clock=clock,
        )
        start.tell(self.cache.rates)
        where = f"{describe_device(self._memory.device)}, {dtype_name(self.loaded.kv_dtype)}"
        self.startup_line = f"{where}: {describe(sizes, geometry, start)}"
        self._pace = Pace(self.cache.rates)
        self._batcher = Batcher(settings.batch, self.cache)
        self._verifier = BlockVerifier(self.pool) if settings.check_blocks else None
        self._layers = LayerWaits(
            self.cache, self._memory, settings.wait_timeout_s, clock, self._layer_waited
        )
        self._requests: dict[int, EngineRequest] = {}
        self.view = EngineView(
            self._requests, self._batcher, self.cache.view, self._namespace, clock
        )
        self._next_id = 1
        self.stall_s = 0.0
        self.steps = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0

    # -- requests --------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        salt: str = "",
        follows: Session | None = None,
        label: str = "",
        priority: int = 0,
        no_cache: bool = False,
        no_save: bool = False,
    ) -> EngineRequest:
        """Queue a prompt (text, or token ids). Raises RequestError if it can never be served,
        QueueFullError if it may be later.

        Requests with different `salt` never share a block. `follows` is the `session` of the
        conversation's last turn: what that found need not be looked up again.
        """
        params = check_params(self.loaded, SamplingParams() if params is None else params)
        if self._full:
            raise QueueFullError(
                f"{self.settings.batch.max_waiting} requests wait already; come back later, or "
                "raise max_waiting"
            )
        prompt_ids = prompt_tokens(self.loaded, prompt)
        check_length(self.loaded, len(prompt_ids), params)
        request = EngineRequest(
            id=self._next_id,
            prompt_ids=prompt_ids,
            params=params,
            namespace=self._namespace(salt),
            block_tokens=self.pool.block_tokens,
            timing=Timing(self._clock()),
            tokenizer=self.loaded.tokenizer,
            eos_token_ids=self.loaded.eos_token_ids,
            label=label or f"request {self._next_id}",
            priority=priority,
            no_cache=no_cache,
            no_save=no_save,
            session=follows,
        )
        self.cache.enqueue(request.renew())
        self._next_id += 1
        self._requests[request.id] = request
        self._batcher.sequences[request.id] = request
        return request

    def abort(self, request_id: int) -> None:
        """End a request in any state; its blocks are free at once. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, FinishReason.ABORTED)

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._requests)

    @property
    def settled(self) -> bool:
        """Whether :meth:`step` has nothing to do until something is submitted."""
        return not self._requests and self.cache.quiet

    def set_mode(self, mode: Mode) -> None:
        """Use another mode from now on. Raises SettingsError, changing nothing, if it cannot be."""
        self.cache.set_mode(mode)

    def stats(self) -> EngineStats:
        """Counters and state as they stand."""
        running = len(self._batcher.running)
        return EngineStats(
            mode=self.cache.mode,
            waiting=len(self._requests) - running,
            running=running,
            steps=self.steps,
            stall_s=self.stall_s,
            preemptions=self.preemptions,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            occupancy=self.cache.view.occupancy(),
            cache=self.cache.stats(),
        )

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[EngineRequest]:
        """Answer all `prompts` and return the ended requests, in the same order.

        A text alone is one prompt, not one for each of its letters.
        """
        requests: list[EngineRequest] = []
        try:
            for prompt in several(prompts):
                while self._full:
                    self.step()
                requests.append(self.submit(prompt, params))
            while any(request.finished is None for request in requests):
                self.step()
        finally:
            for request in requests:
                self.abort(request.id)
        return requests

    def chat(
        self, messages: Sequence[Mapping[str, str]], params: SamplingParams | None = None
    ) -> Iterator[str]:
        """Answer a conversation, piece by piece."""
        request = self.submit(chat_prompt(self.loaded.tokenizer, messages), params)
        try:
            while request.finished is None:
                for delta in self.step():
                    if delta.request_id == request.id and delta.text:
                        yield delta.text
        finally:
            self.abort(request.id)

    # -- the loop --------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """One turn of the loop: what it added to which request. Waits a bounded time at most."""
        rates = self.cache.rates
        self.cache.poll(self._batcher.outlook(rates), self._batcher.free_run_slots)
        batch = self._batcher.schedule()
        for sequence in batch.admitted:
            self._started(self._requests[sequence.request_id])
        self.preemptions += len(batch.preempted)
        failed = [self._fail(self._requests[s.request_id], _TOO_SMALL) for s in batch.failed]
        work = self._in_place(batch)
        if work:
            return failed + self._run(work)
        if not failed:
            self._idle(batch)
        return failed

    def close(self) -> None:
        """Abort everything, end the mover's threads and give the host memory back."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self.cache.close()
        self._memory.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------

    def _in_place(self, batch: Batch) -> list[Work]:
        """The batch's work whose loads have arrived. What lost a block waits again."""
        tickets = [work.sequence.ticket for work in batch.work]
        waits = [t for t in tickets if t is not None and t.waits and not t.band_of_layer]
        began_s = self._clock()
        self._trace.wait_begins(expected=bool(waits))
        lost = self.cache.ready(
            [ticket for ticket in tickets if ticket is not None],
            self._memory.stream,
            timeout_s=self.settings.wait_timeout_s,
        )
        self._waited(began_s, bool(waits), in_step=True)
        for ticket in waits:
            self._requests[ticket.request.id].load_wait_s += self._clock() - began_s
        for ticket in lost:
            self._batcher.preempt(self._batcher.sequences[ticket.request.id])
        work = [work for work in batch.work if work.sequence.ticket is not None]
        self._verify([item for item in work if not self._ticket(item).band_of_layer])
        return work

    def _verify(self, work: list[Work]) -> None:
        """Compare what the first step of a request reads, once its loads are in place."""
        for item in work:
            ticket = self._ticket(item)
            if self._verifier is not None and item.start == ticket.cached_tokens:
                self._verifier.read(ticket, self.cache.serials, item.start)

    def _layer_waited(self, ticket: Ticket, began_s: float) -> None:
        self._requests[ticket.request.id].load_wait_s += self._clock() - began_s
        self._waited(began_s, True, in_step=False)

    def _idle(self, batch: Batch) -> None:
        """Nothing can run: wait for the link, if that is what is lacking."""
        if batch.stepped_over or self.busy:
            began_s = self._clock()
            self.cache.wait_news(_IDLE_WAIT_S)
            self._waited(began_s, NotYet.LOADING in batch.stepped_over.values(), in_step=False)

    def _run(self, work: list[Work]) -> list[Delta]:
        began_s = self._clock()
        gate = self._layers.gate([self._ticket(item) for item in work])
        step = self.cache.begin_step([(self._ticket(w), w.start, w.tokens) for w in work])
        try:
            self._trace.step_begins()
            logits = self.runner.forward([self._chunk(item) for item in work], gate)
        except TransferFailedError:
            self._broke_off(step)
            for item in work:
                self._batcher.preempt(item.sequence)
            return []
        except BaseException as error:
            self._broke_off(step)
            for item in work:
                self._fail(self._requests[item.sequence.request_id], repr(error))
            raise
        self._trace.step_ends()
        self.cache.step_launched(step, self._memory.stream)
        if gate is not None:
            self._verify(work)
        generated = self.generation_tokens
        deltas = self._take_tokens(work, logits)
        ended = self.generation_tokens > generated or not self._memory.runs_behind
        if gate is None:  # else its time is mostly that of the loads
            self._pace.stepped(work, began_s, self._clock(), ended=ended)
        self._measure(step, work, began_s)
        return deltas

    def _broke_off(self, step: int) -> None:
        """What its first layers touch is free once they have run: never on a device that broke."""
        with suppress(DeviceError):
            self.cache.step_launched(step, self._memory.stream, whole=False)

    def _take_tokens(self, work: list[Work], logits: torch.Tensor) -> list[Delta]:
        requests = [self._requests[item.sequence.request_id] for item in work]
        rows = [i for i, w in enumerate(work) if w.start + w.tokens == requests[i].known_tokens]
        drawn = draw(requests, self.runner.on_host(logits), rows) if rows else {}
        self.generation_tokens += len(drawn)
        if self._observer is not None:
            self._observer(StepRecord.of(work, self._chunk, self._serials, drawn))
        now_s = self._clock()
        deltas: list[Delta] = []
        for i, (item, request) in enumerate(zip(work, requests, strict=True)):
            request.computed_tokens, request.stepped = item.start + item.tokens, True
            if request.error:
                deltas.append(self._fail(request, request.error))
                continue
            if i in drawn:
                deltas.append(request.accept(drawn[i], now_s))
            ticket = self._ticket(item)
            self.cache.commit(ticket, request.keys())
            if self._verifier is not None:
                self._verifier.wrote(ticket, self.cache.serials)
            if request.finished is not None:
                self._end(request, request.finished)
        return deltas

    def _measure(self, step: int, work: list[Work], began_s: float) -> None:
        now_s = self._clock()
        self.steps += 1
        if self.timeline is not None:
            decode, prefill = decode_tokens(work), prefill_tokens(work)
            self._trace.stepped(
                self.timeline, step, began_s, now_s, decode_tokens=decode, prefill_tokens=prefill
            )
            self.timeline.windows(self.mover.windows())

    def _waited(self, began_s: float, lacked_load: bool, *, in_step: bool) -> None:
        now_s = self._clock()
        if lacked_load:
            self.stall_s += now_s - began_s
            if self.timeline is not None:
                self._trace.waited(self.timeline, began_s, now_s, in_step=in_step)

    def _started(self, request: EngineRequest) -> None:
        if request.ticket is not None and request.start(request.ticket, self._clock()):
            self.prompt_tokens += len(request.prompt_ids)

    def _end(self, request: EngineRequest, reason: FinishReason) -> None:
        """Forget the request; its blocks become ordinary cache."""
        if request.finished is None:
            request.text += request.end(reason, self._clock())
        self.cache.abort(request.id)
        self._batcher.remove(request)
        request.ticket = None
        self.cache.rates.answered(len(request.drawn))
        del self._requests[request.id]
        if self.timeline is not None:
            request.show_on(self.timeline)

    def _fail(self, request: EngineRequest, why: str) -> Delta:
        shown, request.error = len(request.text), why
        self._end(request, FinishReason.FAILED)
        return Delta(request.id, request.text[shown:], (), FinishReason.FAILED)

    def _chunk(self, item: Work) -> Chunk:
        request = self._requests[item.sequence.request_id]
        tokens = request.tokens[item.start : item.start + item.tokens]
        return Chunk(tokens, item.start, self._ticket(item).slots)

    def _ticket(self, item: Work) -> Ticket:
        ticket = item.sequence.ticket
        if ticket is None:
            raise RequestError(f"request {item.sequence.request_id} has no ticket")
        return ticket

    def _serials(self, item: Work) -> NDArray[np.int64]:
        return self.cache.serials(self._ticket(item))

    def _namespace(self, salt: str) -> bytes:
        parts = (salt, self.loaded.fingerprint, str(self.pool.dtype), str(self.pool.geometry))
        return hashlib.sha256("\0".join(parts).encode()).digest()

    @property
    def _full(self) -> bool:
        waiting = len(self._requests) - len(self._batcher.running)
        return waiting >= self.settings.batch.max_waiting
