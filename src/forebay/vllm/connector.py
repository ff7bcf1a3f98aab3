"""`ForebayConnector`: vLLM's connector interface, in front of the two halves.

The only module that builds on vLLM's classes. Loaded by name where `plugin` registered it, or by
path: `"kv_connector_module_path": "forebay.vllm.connector"`.
"""

# vLLM's classes are of no type that a checker knows where vLLM is not installed.
# pyright: standard

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm import __version__  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # pyright: ignore[reportMissingImports]
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from forebay._native import leak_warnings
from forebay.errors import ProtocolError, SettingsError
from forebay.transfer.host import require_room
from forebay.vllm.adapter import (
    frees_idle,
    last_block,
    loads_come_first,
    missing_parts,
    read_shape,
    read_step,
)
from forebay.vllm.drafts import draft_slots, dropped_blocks
from forebay.vllm.messages import Orders
from forebay.vllm.names import (
    ends_of_prompts_are_misnamed,
    items_depend_on_steps,
    salts_pass_for_loras,
)
from forebay.vllm.options import Options
from forebay.vllm.pair import Pair, check_served
from forebay.vllm.refusals import HASH_BYTES, KINDS, check_cache, check_start
from forebay.vllm.scheduler.agreement import Agreement, Ranked
from forebay.vllm.scheduler.half import SchedulerHalf
from forebay.vllm.scheduler.misnamed import Misnamed
from forebay.vllm.seen.kv_events import as_vllm_events
from forebay.vllm.seen.log import join_log, tell_sizes, warnings_told
from forebay.vllm.seen.measures import Growth, Stopwatch
from forebay.vllm.seen.metrics import ForebayPromMetrics, ForebayStats
from forebay.vllm.side_by_side import lay_side_by_side
from forebay.vllm.tensors import device_of
from forebay.vllm.worker import WorkerHalf

_STATS_S = 0.1
"""To look at all counters costs as much as a step that has nothing to do."""


@dataclass
class ForebayOrders(KVConnectorMetadata):
    """Orders on their way to the worker, of the scheduler with this mark."""

    orders: Orders
    mark: str


@dataclass
class ForebayReport(KVConnectorWorkerMetadata):
    """Reports on their way to the scheduler with the output of `step`, of one worker or, put
    together, of several.
    """

    step: int
    told: tuple[Ranked, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Reports of the same step, side by side: the scheduler's half counts them."""
        if not isinstance(other, ForebayReport):
            raise ProtocolError(f"a worker of another connector reports: {type(other).__name__}")
        return ForebayReport(max(self.step, other.step), self.told + other.told)


class ForebayConnector(KVConnectorBase_V1, SupportsHMA):
    """See the package. Raises SettingsError for what is not supported."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # vLLM keeps what it started with from being collected (gc.freeze), to the end.
        leak_warnings(on=False)
        join_log()
        check_start(vllm_config, __version__)
        parallel = vllm_config.parallel_config
        check_cache(
            kv_cache_config,
            stages=int(parallel.pipeline_parallel_size),
            drafts=vllm_config.speculative_config is not None,
        )
        self._config = vllm_config
        self._rank, self._ranks = int(parallel.rank), int(parallel.world_size)
        self._options = Options.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._agreement = Agreement(self._ranks)
        self._shape = shape = read_shape(vllm_config, kv_cache_config)
        path = kv_cache_config.kv_cache_groups[shape.groups.path]
        self._kind = KINDS[type(path.kv_cache_spec).__name__]
        if role is KVConnectorRole.WORKER:
            lay_side_by_side(vllm_config, kv_cache_config)
            here = int(parallel.local_world_size)
            if self._rank % here == 0:
                # For all of this machine, before any of them has its part.
                slots = self._options.host_slots(shape.whole_bytes)
                require_room(slots * shape.whole_bytes * here // self._ranks)
        self._pair = Pair.of(vllm_config)
        self._mark = self._served = ""
        # Schedulers whose KV cache is not that which the worker has.
        self._others: set[str] = set()
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._watch = Stopwatch()
        self._growth = Growth()
        self._stats_due_s = 0.0

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No. Where CUDA graphs are used vLLM asks this before it loads the model, so that an
        option that is wrong ends the start there. Raises SettingsError.
        """
        Options.parse(extra_config)
        return False

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Blocks in one piece, where vLLM can lay them out so (0.26)."""
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss, and no reason to drop an answer."""
        return False

    @property
    def scheduler_half(self) -> SchedulerHalf:
        """The half that decides. Raises ProtocolError in a worker."""
        if self._scheduler is None:
            raise ProtocolError(f"{self.role} has no half that decides, or no block pool yet")
        return self._scheduler

    @property
    def worker_half(self) -> WorkerHalf:
        """The half that moves. Raises ProtocolError in the scheduler."""
        if self._worker is None:
            raise ProtocolError(f"{self.role} has no half that moves, or no KV cache yet")
        return self._worker

    # -- in the scheduler ------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """vLLM's block pool, before the first request."""
        config, shape = self._config, self._shape
        missing = missing_parts(gpu_block_pool)
        if missing or gpu_block_pool.hash_block_size != shape.block_tokens:
            raise SettingsError(
                f"the block pool of vLLM {__version__} is not as expected (missing: "
                f"{missing}; blocks are named by {gpu_block_pool.hash_block_size} tokens and have "
                f"{shape.block_tokens}): this version is not supported"
            )
        limits = config.scheduler_config
        with warnings_told():
            settings = self._options.settings(
                block_tokens=shape.block_tokens,
                block_bytes=shape.whole_bytes,
                device_slots=gpu_block_pool.num_gpu_blocks - 1,
                links=self._ranks,
            )
        tell_sizes(settings)
        self._scheduler = SchedulerHalf(
            settings,
            gpu_block_pool,
            key_bytes=HASH_BYTES[config.cache_config.prefix_caching_hash_algo],
            most_running=limits.max_num_seqs,
            step_tokens=limits.max_num_batched_tokens,
            draft_slots=draft_slots(config),
            dropped=dropped_blocks(config),
            by_priority=str(limits.policy) == "priority",
            kept_free=int(limits.watermark * gpu_block_pool.num_gpu_blocks),
            frees_idle=frees_idle(config),
            hint_bounds=self._options.hint_bounds(gpu_block_pool.num_gpu_blocks - 1),
            mode_file=self._options.mode_file,
            events=bool(gpu_block_pool.enable_kv_cache_events),
            links=self._ranks,
            most_loras=0 if config.lora_config is None else int(config.lora_config.max_loras),
            misnamed=Misnamed(
                shape.block_tokens,
                salts=salts_pass_for_loras(config, __version__),
                items=items_depend_on_steps(config),
                tails=ends_of_prompts_are_misnamed(__version__),
            ),
            groups=shape.groups,
            hands=lambda: self._pair.worker,
        )
        self._pair.decided_by(self._scheduler)
        self._mark = self._pair.mark

    def on_new_request(self, request: Any) -> None:
        """A request was queued."""
        with self._watch:
            self.scheduler_half.arrive(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """The last block of a prompt but one token, where vLLM finds all others; or ask again at
        the next step.
        """
        with self._watch:
            return self.scheduler_half.asked(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request starts."""
        block = None
        if num_external_tokens:
            block = last_block(blocks, request.num_tokens, self._shape.block_tokens)
        with self._watch:
            self.scheduler_half.admitted(request, block)

    def build_connector_meta(self, scheduler_output: Any) -> ForebayOrders:
        """The orders that go with a step."""
        with self._watch:
            orders = self.scheduler_half.orders(
                read_step(scheduler_output, self._shape.groups.path)
            )
        loads_come_first(scheduler_output)
        self._watch.step()
        return ForebayOrders(orders, self._mark)

    def update_connector_output(self, connector_output: Any) -> None:
        """A step's output came. That of a step without work only comes if it says something."""
        meta = connector_output.kv_connector_worker_meta
        if not isinstance(meta, ForebayReport):
            return
        with self._watch:
            news = self._agreement.hear(meta.told) if meta.told else None
            self.scheduler_half.heard(meta.step, news)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request ended; its blocks may be freed. Its client is told what came of its wishes.

        An aborted one goes too, whatever its state; vLLM calls this once for each.
        """
        with self._watch:
            answer = self.scheduler_half.finish(request)
        return False, answer

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same."""
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        """Whether vLLM is to go on stepping without requests."""
        return self.scheduler_half.busy

    def has_pending_block_frees(self) -> bool:
        """Whether blocks come back soon, so that nothing need be preempted."""
        return self.scheduler_half.gives_back_soon

    def reset_cache(self) -> bool:
        """Forget all that was saved: the weights may have changed."""
        self.scheduler_half.forget_all()
        return True

    def take_events(self) -> list[Any]:
        """KV events of host memory, where vLLM publishes events."""
        if self._scheduler is None or self._scheduler.events is None:
            return []
        events = self._scheduler.events.take()
        return as_vllm_events(events, self._shape.block_tokens, self._kind, self._shape.groups)

    # -- of either -------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> ForebayStats | None:
        """What was counted since the last time; while there is work, only now and then."""
        if self._worker is not None:
            counters = self._growth.since(self._worker.counters())
            return _if_any(ForebayStats({"counters": counters, "gauges": {}, "samples": {}}))
        if self._scheduler is None:
            return None
        books, now_s = self._scheduler.books, time.monotonic()
        if now_s < self._stats_due_s and (books.computes or self._scheduler.busy):
            return None
        self._stats_due_s = now_s + _STATS_S
        counters, gauges = books.figures()
        samples = {
            "forebay:request_load_wait_seconds": books.take_load_waits(),
            "forebay:scheduler_seconds": self._watch.take(),
        }
        return _if_any(
            ForebayStats(
                {
                    "counters": self._growth.since(counters),
                    "gauges": self._growth.changed(gauges),
                    "samples": {name: taken for name, taken in samples.items() if taken},
                }
            )
        )

    @classmethod
    def build_kv_connector_stats(cls, data: Any = None) -> ForebayStats:
        """What arrived from an engine."""
        return ForebayStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ForebayPromMetrics:
        """Its metrics in vLLM's `/metrics`."""
        return ForebayPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- in the worker ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """vLLM's KV tensors, by layer; new ones replace those before.

        vLLM leaves a worker's connector to the next engine of its process, where the first was not
        shut down: then they are that one's, whose scheduler is made behind them.
        """
        if self._worker is not None:
            self._others, self._served = set(Pair.marked()), ""
        self.shutdown()
        device = device_of(kv_caches)
        on_gpu = device.type == "cuda"
        self._worker = WorkerHalf(
            self._shape,
            self._options,
            kv_caches,
            _current_stream(device) if on_gpu else lambda: 0,
            (lambda: torch.cuda.synchronize(device)) if on_gpu else lambda: None,
        )
        if self._pair.mark not in self._others:
            self._pair.worker = self._worker

    def register_cross_layers_kv_cache(self, kv_cache: Any, cross_layers_attn_backend: Any) -> None:
        """The same, where vLLM laid all layers of a block side by side (0.26)."""
        self.register_kv_caches({"all layers": kv_cache})

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """A step is about to start: called once for each, with its orders. Raises SettingsError if
        it is one of an engine for which this is not the worker.
        """
        mark = kv_connector_metadata.mark
        if mark != self._served:
            slots = self._shape.blocks - 1, self._options.host_slots(self._shape.whole_bytes)
            check_served(mark, self._others, slots)
            self._served = mark
        self.worker_half.begin(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """The forward pass is about to be launched, or a step without one goes on."""
        self.worker_half.make_ready()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No step reads what has not landed."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Saves follow the whole step."""

    def wait_for_save(self) -> None:
        """The step was launched."""
        self.worker_half.launched()

    def build_connector_worker_meta(self) -> ForebayReport | None:
        """The end of a step, also of one without work, in which `wait_for_save` is not called."""
        worker = self.worker_half
        pair = self._pair
        here = pair.worker is worker and pair.mark == self._served
        scheduler = pair.scheduler if here else None
        worker.step_over()
        told: tuple[Ranked, ...] = ()
        if scheduler is not None:
            scheduler.look()
        elif (news := worker.news()) is not None:
            told = ((self._rank, news),)
        # vLLM drops the output of a step without work that says nothing.
        return None if worker.idle and not told else ForebayReport(worker.step, told)

    def shutdown(self) -> None:
        """The process ends."""
        if self._worker is not None:
            worker, self._worker, self._pair.worker = self._worker, None, None
            worker.close()


def _current_stream(device: Any) -> Callable[[], int]:
    """The stream of whoever asks on `device`, as the driver's handle."""
    return lambda: int(torch.cuda.current_stream(device).cuda_stream)


def _if_any(stats: ForebayStats) -> ForebayStats | None:
    return None if stats.is_empty() else stats
