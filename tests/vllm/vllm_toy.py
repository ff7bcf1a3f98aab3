"""vLLM's real scheduler and block pool, both halves of ours, and a model that is arithmetic.

The KV of a position is a number made of all tokens up to there, read from the KV of the position
before. A token comes from all KV that its request reads. So one wrong block changes an answer.
Each layer keeps all KV, and positions are read from them in turn; a worker has one layer, or, where
workers are stages, those of its stage.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm_real import RealScheduler, output_of, request_of
from vllm_toy_config import BLOCK_BYTES, BLOCK_TOKENS, layers_of, name_of, of_rank, plan_of
from vllm_toy_model import VOCAB, answers, mix, states_of

from forebay.core.slots import SlotState
from forebay.vllm.connector import ForebayConnector

MODEL_LAYERS = 3
"""Of a model of stages: as `tiny_llama` has."""
LANES = (0, 1)
"""Those of each direction."""


@dataclass
class Asked:
    """One request and what came of it."""

    request: Any
    prompt: list[int]
    most: int
    tokens: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    ended: str = ""
    told: dict[str, Any] | None = None
    """The `kv_transfer_params` of the answer."""

    @property
    def first(self) -> int:
        """The state in which the model begins."""
        lora = self.request.lora_request
        return 1 if lora is None else 1 + lora.lora_int_id


class Pass:
    """One step's part of a request: `count` tokens from `start` on, through layer after layer."""

    def __init__(self, asked: Asked, start: int, count: int) -> None:
        self.asked = asked
        self.start, self.end = start, start + count
        self._slots = np.repeat(asked.table, BLOCK_TOKENS)[: self.end]
        self._total = 0

    def through(self, content: NDArray[np.int64], layers: list[int]) -> None:
        """Write and read the KV of these layers, of all that are in `content`."""
        places = np.arange(self.end)
        offsets = places % BLOCK_TOKENS
        for layer in layers:
            mine = content[layer]
            state = (
                int(mine[self._slots, offsets][self.start - 1]) if self.start else self.asked.first
            )
            for place in range(self.start, self.end):
                state = mix(state, self.asked.tokens[place])
                mine[self._slots[place], offsets[place]] = state
            read = places % len(content) == layer
            self._total += int(mine[self._slots[read], offsets[read]].sum())

    def sampled(self) -> list[int]:
        """The token that comes of it, if one does."""
        if self.end < len(self.asked.tokens):
            return []
        token = self._total % VOCAB
        self.asked.tokens.append(token)
        return [token]


class ToyEngine(RealScheduler):
    """An engine over `blocks` device blocks. `lag` steps are scheduled before one's output is in.

    `ranks` workers share it, as `stages` of the model or not; those after the first copy at
    `late_bytes_per_s` (0: as the first). `extra` is the connector's configuration.
    """

    windows: tuple[int, ...] = (0,)
    """Of its groups of layers. 0: full attention."""

    def __init__(
        self,
        model: Path,
        *,
        blocks: int = 40,
        lag: int = 0,
        most_running: int = 4,
        step_tokens: int = 64,
        policy: str = "fcfs",
        ranks: int = 1,
        stages: bool = False,
        late_bytes_per_s: float = 0.0,
        kv_events: bool = False,
        loras: bool = False,
        **extra: Any,
    ) -> None:
        layers = MODEL_LAYERS if stages else ranks
        extra["host_bytes"] = layers * extra.get("host_bytes", 400 * BLOCK_BYTES)
        arguments = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=512,
            max_num_seqs=most_running,
            max_num_batched_tokens=step_tokens,
            block_size=BLOCK_TOKENS,
            enable_prefix_caching=True,
            scheduling_policy=policy,
            async_scheduling=False,
            enable_lora=loras,
            kv_events_config={"enable_kv_cache_events": kv_events, "publisher": "null"},
            kv_transfer_config={
                "kv_connector": "ForebayConnector",
                "kv_connector_module_path": "forebay.vllm.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            },
        )
        config = self.configured(arguments)
        config.cache_config.num_gpu_blocks = blocks
        config.parallel_config.world_size = ranks
        if stages:
            config.parallel_config.pipeline_parallel_size = ranks
            config.parallel_config.distributed_executor_backend = "mp"
        configs = [of_rank(config, rank, late_bytes_per_s) for rank in range(ranks)]
        self.layers = [layers_of(own) if stages else [rank] for rank, own in enumerate(configs)]
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.scheduler = (AsyncScheduler if lag else Scheduler)(
            vllm_config=config,
            kv_cache_config=plan_of(blocks, self.layers[0], self.windows),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
        )
        # As where steps overlap, which vLLM does on a GPU.
        self._overlap = lag > 0 or stages
        self.scheduler.defer_block_free = self._overlap
        self.kv = torch.zeros(layers, blocks, BLOCK_TOKENS, dtype=torch.int64)
        self._content = self.kv.numpy()
        self.workers: list[Any] = []
        for own, mine in zip(configs, self.layers, strict=True):
            plan = plan_of(blocks, mine, self.windows)
            self.workers.append(ForebayConnector(own, KVConnectorRole.WORKER, plan))
            groups = range(len(self.windows))
            caches = {name_of(layer, each): self.kv[layer] for layer in mine for each in groups}
            self.workers[-1].register_kv_caches(caches)
        self._aggregator = KVOutputAggregator(ranks)
        _watch_lookups(self.half, self.pool)
        self.lag = lag
        self.asked: dict[str, Asked] = {}
        self.events: list[Any] = []
        self.scheduler.kv_event_publisher.publish = lambda batch: self.events.extend(batch.events)
        self._scheduled: deque[Any] = deque()
        self.steps = 0
        self.preempted = 0

    def configured(self, arguments: EngineArgs) -> Any:
        """vLLM's configuration by these arguments."""
        return arguments.create_engine_config()

    @property
    def worker(self) -> Any:
        """The connector in the last worker."""
        return self.workers[-1]

    @property
    def mover(self) -> Any:
        """The native core of the last worker's mover, for its hooks."""
        return self.worker.worker_half._mover.core

    def ask(self, prompt: list[int], most: int, **more: Any) -> Asked:
        """Queue a request for `most` tokens. One that does not read the cache (`reads`) is as with
        `prompt_logprobs`.
        """
        name = f"r{len(self.asked)}"
        params, reads = more.pop("params", None), more.pop("reads", True)
        request = request_of(name, prompt, most, params, block_hasher=self._hasher, **more)
        request.skip_reading_prefix_cache = not reads
        asked = self.asked[name] = Asked(request, prompt, most, tokens=list(prompt))
        self.scheduler.add_request(request)
        return asked

    def abort(self, asked: Asked) -> None:
        """The client of a request is gone."""
        if not asked.ended:
            asked.ended = "aborted"
            self.scheduler.finish_requests(asked.request.request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """Schedule one step, run the one that is due, take its output in."""
        if self.scheduler.has_requests():
            self.steps += 1
            self._scheduled.append(self.scheduler.schedule())
        if len(self._scheduled) > self.lag or (
            self._scheduled and not self.scheduler.has_requests()
        ):
            self._run(self._scheduled.popleft())

    def run(self, most_steps: int = 5000) -> None:
        """Step until nothing is left to do."""
        for _ in range(most_steps):
            if not self.scheduler.has_requests() and not self._scheduled:
                return
            self.step()
        raise AssertionError(f"requests are stuck: {list(self.open())}")

    def try_to_reset(self) -> None:
        """Reset vLLM's cache, and preempt for it where nothing else can hold blocks: while loads
        hold some, or have lost one, or a step is under way, vLLM cannot, and would raise an error.
        """
        held = self.half._flights.load_blocks or self.half._device.quarantined or self._overlap
        self.scheduler.reset_prefix_cache(reset_running_requests=not held)

    def open(self) -> Iterator[str]:
        """Names of requests that have not ended."""
        return (name for name, asked in self.asked.items() if not asked.ended)

    def close(self) -> None:
        """Give the host memory back."""
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()

    def _run(self, output: Any) -> None:
        meta = output.kv_connector_metadata
        self.preempted += len(output.preempted_req_ids or ())
        for worker in self.workers:
            worker.handle_preemptions(meta)
            worker.bind_connector_metadata(meta)
        names = list(output.num_scheduled_tokens)
        # As 0.32 does; before it always was the first.
        loads_first = getattr(output, "has_sync_kv_loads", True)
        if loads_first:
            self._start_loads()
        sampled = self._compute(output) if names else []
        if not loads_first:
            self._start_loads()
        self._take(output, [self._told(worker, names, sampled) for worker in self.workers])

    def _take(self, output: Any, told: list[Any]) -> None:
        """Take in what the workers answer to a step; its tokens come from the last one."""
        done = self._aggregator.aggregate(told, output_rank=len(told) - 1)
        for outputs in self.scheduler.update_from_output(output, done).values():
            for each in outputs.outputs:
                asked = self.asked[each.request_id]
                asked.given += each.new_token_ids
                asked.told = each.kv_transfer_params or asked.told
                if each.finish_reason is not None:
                    asked.ended = asked.ended or "finished"

    def _start_loads(self) -> None:
        for worker in self.workers:
            worker.start_load_kv(None)

    def _told(self, worker: Any, names: list[str], sampled: list[list[int]]) -> Any:
        """What a worker answers to a step."""
        if names:
            worker.wait_for_save()
        news = KVConnectorOutput(kv_connector_worker_meta=worker.build_connector_worker_meta())
        worker.clear_connector_metadata()
        return output_of(names, sampled, news)

    def _compute(self, output: Any) -> list[list[int]]:
        passes = self._passes(output)
        for layers in self.layers:
            for each in passes:
                each.through(self._content, layers)
        return [each.sampled() for each in passes]

    def _passes(self, output: Any) -> list[Pass]:
        """What a step is to compute of each of its requests, whose tables are as it has them."""
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self.asked[new.req_id].table = list(new.block_ids[0])
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, blocks, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            table = [] if name in cached.resumed_req_ids else self.asked[name].table
            self.asked[name].table = table + list(blocks[0] if blocks else ())
            starts[name] = start
        return [
            Pass(self.asked[name], starts[name], count)
            for name, count in output.num_scheduled_tokens.items()
        ]

    def answer_to(self, asked: Asked, count: int) -> list[int]:
        """What the model says to a request."""
        return answers(asked.prompt, count, asked.first)

    def kv_of(self, asked: Asked, tokens: Iterable[int]) -> list[list[int]]:
        """The KV of each of `tokens`, the first ones of a request, in each group of layers."""
        return [states_of(tokens, asked.first)]


MakeEngine = Callable[..., ToyEngine]
"""What the fixture `toy` gives: see `ToyEngine`."""


def _watch_lookups(half: Any, pool: Any) -> None:
    """vLLM's scheduler may hold blocks that it has only looked up: nobody may take one then."""
    asked = half.asked

    def watched(request: Any, local_tokens: int) -> bool:
        before = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        again = asked(request, local_tokens)
        after = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        assert before == after, "a look-up changed vLLM's free blocks"
        return again

    half.asked = watched


def wrong_answers(engine: ToyEngine) -> list[str]:
    """Requests whose tokens are not what the model says."""
    return [
        name
        for name, asked in engine.asked.items()
        if asked.given != engine.answer_to(asked, len(asked.given))
        or (asked.ended == "finished" and len(asked.given) != asked.most)
    ]


def assert_nothing_left(engine: ToyEngine) -> None:
    """Every block is free, no lease is held, nothing waits or flies."""
    half = engine.half
    lost = half.stats().quarantined_blocks - half._store.host.tier.quarantined
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1 - lost
    assert not len(half._line)
    assert not len(half._flights)
    assert not half._roster._here
    assert not half._roster.by_id
    assert not half._turns.lack_loads
    # What ended just now is kept for a moment, which holds nobody up.
    half._lately.drop_all()
    everything = np.arange(half._store.max_blocks, dtype=np.int32)
    assert not half._device.leases(everything).any()
    assert half._device.prefetch_leased == 0
    assert not half._device.wanted(everything).any()
    assert (half._device._books.leased_here, half._device._books.wanted_here) == (0, 0)
    # What is in no state is in no slot: another block of that id would have two.
    nowhere = half._device.slot_of(everything) < 0
    assert nowhere[half._device.state(everything) == SlotState.FREE].all()
    half._store.directory.check()
    assert half._store.host.held(everything).sum() <= lost


def prompt_of(seed: int, length: int) -> list[int]:
    """A prompt that is the same for the same `seed`, longer ones beginning like shorter ones."""
    source = random.Random(seed)
    return [source.randrange(VOCAB) for _ in range(length)]
