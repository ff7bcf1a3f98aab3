"""vLLM's real scheduler and block pool on a virtual clock, over a modelled GPU and link.

Nothing is moved. Much load runs in seconds, the same each time, so that what the scheduler half
decides can be judged by the times that clients would see. The worker and its mover are models too:
what they do to bytes is not tested here.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.structured_output import StructuredOutputManager
from vllm_real import RealScheduler, output_of, request_of
from vllm_sim_link import ForebayWorker, Link, NoWorker

BLOCK_TOKENS = 16
BLOCK_BYTES = 2 << 20
LAYERS, HEADS, HEAD_SIZE = 32, 8, 128
VOCAB = 128_000
_MOST_IDLE = 5_000
"""Steps without work, one after the other, before requests count as stuck."""
_QUEUE = 2
"""Steps that are scheduled before the output of the first is taken in."""


@dataclass(frozen=True)
class Machine:
    """How long things take. The defaults are an 8B model in bf16 on one H200, fitted to what
    vLLM 0.26 took there for cold prompts of 16k and 32k tokens and for decoding.
    """

    step_s: float = 7.6e-3
    token_s: float = 22.0e-6
    """For each prompt token, besides attention."""
    pair_s: float = 9.45e-10
    """For each pair of a prompt token and a token before it."""
    read_s: float = 33e-9
    """For each token of context that a decoding request reads."""
    link_bytes_per_s: float = 52e9
    cpu_s: float = 1.0e-3
    """Scheduling one step."""
    empty_s: float = 0.3e-3
    """A step without work."""
    pause_s: float = 1.0e-3
    """vLLM sleeps so long behind a step without work."""
    client_s: float = 1.0e-3
    """From an output to the client, and from a client to the queue."""


@dataclass
class Reply:
    """One request and its times."""

    request: Any
    arrived_s: float
    first_s: float = float("nan")
    ended_s: float = float("nan")
    tokens: list[int] = field(default_factory=list[int])
    then: Callable[[Reply], None] | None = None
    cached: int = -1

    @property
    def ttft_s(self) -> float:
        """From the client's sending to its first token."""
        return self.first_s - self.arrived_s


class SimEngine(RealScheduler):
    """An engine over `blocks` device blocks that runs when `run` is called.

    `connector` is the kv_transfer_config, or None; `late` says that a step's report is made when
    the step is launched, otherwise when it ends.
    """

    def __init__(
        self,
        folder: Path,
        *,
        blocks: int = 10_000,
        most_running: int = 8,
        step_tokens: int = 8192,
        policy: str = "fcfs",
        watermark: float = 0.0,
        machine: Machine = Machine(),
        late: bool = True,
        connector: dict[str, Any] | None = None,
    ) -> None:
        self.machine = machine
        self.late = late
        self.now_s = 0.0
        config = EngineArgs(
            model=str(model_folder(folder)),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=36864,
            max_num_seqs=most_running,
            max_num_batched_tokens=step_tokens,
            block_size=BLOCK_TOKENS,
            enable_prefix_caching=True,
            scheduling_policy=policy,
            async_scheduling=False,
            kv_transfer_config=connector,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.watermark = watermark
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.scheduler = AsyncScheduler(
            vllm_config=config,
            kv_cache_config=kv_cache(blocks),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            log_stats=False,
        )
        # As where steps overlap, which vLLM does on a GPU.
        self.scheduler.defer_block_free = connector is not None
        self.link = Link(machine.link_bytes_per_s, BLOCK_BYTES)
        self.worker: Any = NoWorker(self.link)
        if connector is not None and connector["kv_connector"] == "ForebayConnector":
            self.half._clock = lambda: self.now_s
            self.worker = ForebayWorker(
                self.link, self.half, self.half.settings.host_slots, self.half._clock
            )
            self.scheduler.connector._pair.worker = self.worker
        elif connector is not None:
            self.worker = self.scheduler.connector.model_worker(self.link)
        self._dice = random.Random(1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._queue: deque[tuple[Any, float, Any]] = deque()
        self._gpu_free_s = 0.0
        self._names = itertools.count()
        self.replies: dict[str, Reply] = {}
        self.open = 0
        self.steps = 0
        self.busy_s = 0.0
        self.durations: list[float] = []
        """Of the steps that computed something, in order."""

    # -- clients ---------------------------------------------------------------------------------

    def some(self, count: int) -> list[int]:
        """Tokens that nobody has sent before."""
        return self._dice.choices(range(VOCAB), k=count)

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Call it when the clock is there."""
        heapq.heappush(self._events, (time_s, next(self._count), call))

    def ask(
        self,
        prompt: list[int],
        most: int,
        *,
        at_s: float | None = None,
        then: Callable[[Reply], None] | None = None,
        priority: int = 0,
        params: dict[str, Any] | None = None,
    ) -> Reply:
        """A client sends a request now, or at `at_s`; `then` is called with the whole reply."""
        sent_s = self.now_s if at_s is None else at_s
        request = request_of(
            f"r{next(self._names)}",
            prompt,
            most,
            params,
            arrival_time=sent_s,
            priority=priority,
            block_hasher=self._hasher,
        )
        reply = self.replies[request.request_id] = Reply(request, sent_s, then=then)
        self.open += 1
        self.at(sent_s + self.machine.client_s, lambda: self.scheduler.add_request(request))
        return reply

    # -- the loop --------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Until nothing is asked and nothing moves, or `until` says so."""
        worked = self.steps
        while self.steps < worked + _MOST_IDLE:
            if until is not None and until():
                return
            if self._queue and self._queue[-1][0].total_num_scheduled_tokens:
                worked = self.steps
            self._happen()
            if self.scheduler.has_requests() or self._queue:
                computes = self._turn()
                if not computes and self.scheduler.has_requests():
                    self.now_s += self.machine.pause_s
            elif self._events:
                self.now_s = max(self.now_s, self._events[0][0])
            else:
                return
        raise AssertionError("requests are stuck")

    def settle(self) -> None:
        """Empty vLLM's prefix cache, once nothing moves."""
        self.run()
        if not self.scheduler.reset_prefix_cache():
            raise AssertionError("vLLM could not reset its cache")

    def _happen(self) -> None:
        while self._events and self._events[0][0] <= self.now_s:
            heapq.heappop(self._events)[2]()

    def _turn(self) -> bool:
        """As vLLM's engine core does with a queue of two batches. Returns whether a step that
        computes was launched.
        """
        computes = False
        if self.scheduler.has_requests():
            self.now_s += self.machine.cpu_s
            output = self.scheduler.schedule()
            self.steps += 1
            computes = output.total_num_scheduled_tokens > 0
            self._launch(output)
            if len(self._queue) < _QUEUE and (computes or self.scheduler.has_requests()):
                return computes
        output, end_s, news = self._queue.popleft()
        self._wait(end_s)
        self._take(output, news if self.late else self.worker.report())
        return computes

    def _wait(self, end_s: float) -> None:
        self.now_s = max(self.now_s, end_s)

    def _launch(self, output: Any) -> None:
        machine, tokens = self.machine, output.total_num_scheduled_tokens
        self.now_s = self.worker.begin(output, self.now_s)
        if tokens:
            took_s = self._duration(output)
            self.durations.append(took_s)
            end_s = max(self.now_s, self._gpu_free_s) + took_s
            self._gpu_free_s, self.busy_s = end_s, self.busy_s + took_s
        else:
            end_s = self.now_s = self.worker.idled(self.now_s + machine.empty_s)
        self.worker.launched(output, end_s)
        news = self.worker.report() if self.late else None
        self._queue.append((output, end_s, news))

    def _duration(self, output: Any) -> float:
        machine = self.machine
        took_s = machine.step_s
        for start, count in parts(output):
            if count == 1:
                took_s += start * machine.read_s
            else:
                pairs = count * start + count * count / 2
                took_s += count * machine.token_s + pairs * machine.pair_s
        return took_s

    def _take(self, output: Any, news: Any) -> None:
        names = list(output.num_scheduled_tokens)
        done = output_of(names, self._sampled(output, names), news)
        for outputs in self.scheduler.update_from_output(output, done).values():
            for each in outputs.outputs:
                self._told(self.replies[each.request_id], each)

    def _sampled(self, output: Any, names: list[str]) -> list[list[int]]:
        ends = {name: start + output.num_scheduled_tokens[name] for name, start in starts(output)}
        prompts = {name: self.replies[name].request for name in names}
        return [
            [self._dice.randrange(VOCAB)] if ends[n] >= prompts[n].num_prompt_tokens else []
            for n in names
        ]

    def _told(self, reply: Reply, output: Any) -> None:
        told_s = self.now_s + self.machine.client_s
        if output.new_token_ids and not reply.tokens:
            reply.first_s = told_s
        reply.tokens += output.new_token_ids
        if output.finish_reason is not None:
            reply.ended_s = told_s
            self.open -= 1
            if reply.then is not None:
                then = reply.then
                self.at(told_s, lambda: then(reply))


def starts(output: Any) -> Iterator[tuple[str, int]]:
    """Each request of a step, and where it goes on."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)


def parts(output: Any) -> Iterator[tuple[int, int]]:
    """Where each request of a step goes on, and by how many tokens."""
    for name, start in starts(output):
        yield start, output.num_scheduled_tokens[name]


def kv_cache(blocks: int) -> KVCacheConfig:
    """The shape of the pool."""
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16
    )
    names = [f"layer{layer}" for layer in range(LAYERS)]
    size = blocks * BLOCK_BYTES
    if "layers" in KVCacheTensor.__dataclass_fields__:
        page = BLOCK_BYTES // LAYERS
        tensors = [
            KVCacheTensor(size=size, layers=names, layer_stride=page * blocks, block_stride=page)
        ]
    else:
        tensors = [KVCacheTensor(size=size // LAYERS, shared_by=[name]) for name in names]
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
    )


def model_folder(folder: Path) -> Path:
    """A folder with the configuration of an 8B Llama, and no weights."""
    path = folder / "llama8b"
    path.mkdir(exist_ok=True)
    text = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCAB,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(text))
    return path
