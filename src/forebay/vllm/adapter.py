"""vLLM's own objects: the parts of them that are used, and what differs between its versions.

Nothing is imported from vLLM here. Its block pool and requests are described as protocols, its step
output and configuration are read by name, once, into values of our own. Read and tried: the
versions in `TRIED`; the fields used are the same in all of them except where noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from forebay.errors import SettingsError

TRIED = ((0, 26), (0, 32), (0, 33))
"""Release lines whose sources this was written against; 0.32 is the one that the tests run."""

GROUP = 0
"""The one KV-cache group that is supported."""

_GROUP_BYTES = 4
"""What vLLM appends to a block's hash to name its group."""


class Block(Protocol):
    """vLLM's `KVCacheBlock`."""

    block_id: int
    ref_cnt: int
    is_null: bool

    @property
    def block_hash(self) -> bytes | None:
        """The hash under which it is cached, followed by its group."""
        ...

    @property
    def next_free_block(self) -> Block | None:
        """The next one of the free queue."""
        ...


class BlockPool(Protocol):
    """vLLM's `BlockPool`: ids from 0, of which 0 stands for no block."""

    num_gpu_blocks: int
    enable_caching: bool
    hash_block_size: int
    blocks: Sequence[Block]
    null_block: Block
    metrics_collector: Any
    free_block_queue: Any

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        """Take blocks from the head of the free queue; what was cached in them is gone."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Give a reference back on each; cached ones go to the tail of the free queue."""
        ...

    def touch(self, blocks: Sequence[Block]) -> None:
        """Take a reference on each."""
        ...

    def get_num_free_blocks(self) -> int:
        """Blocks without a reference."""
        ...

    def get_cached_block(
        self, block_hash: bytes, kv_cache_group_ids: list[int]
    ) -> list[Block] | None:
        """A block that holds this content, in each group."""
        ...

    def cache_full_blocks(
        self,
        request: Any,
        blocks: Sequence[Block],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None:
        """Let others find `blocks[num_cached_blocks:num_full_blocks]` by the request's hashes."""
        ...


class VllmRequest(Protocol):
    """vLLM's `Request`."""

    request_id: str
    priority: int
    arrival_time: float
    num_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    max_tokens: int
    block_hashes: list[bytes]
    all_token_ids: Sequence[int]
    kv_transfer_params: object
    skip_reading_prefix_cache: bool


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request of one step: it computes `tokens` from `start` on.

    `blocks` are new ones of its table, or, if `whole`, all of them.
    """

    request: str
    start: int
    tokens: int
    blocks: Sequence[int]
    whole: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What a `SchedulerOutput` says of one step."""

    scheduled: tuple[Scheduled, ...]
    preempted: frozenset[str]
    tokens: int


def read_step(output: Any) -> Step:
    """The step in vLLM's `SchedulerOutput`.

    A resumed request is a new one where the second model runner is used, a cached one elsewhere.
    """
    counts: dict[str, int] = output.num_scheduled_tokens
    scheduled = [
        Scheduled(
            new.req_id, new.num_computed_tokens, counts[new.req_id], new.block_ids[GROUP], True
        )
        for new in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    for name, blocks, start in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        whole = name in cached.resumed_req_ids
        ids = blocks[GROUP] if blocks is not None else ()
        scheduled.append(Scheduled(name, start, counts[name], ids, whole))
    preempted = frozenset(output.preempted_req_ids or ())
    return Step(tuple(scheduled), preempted, output.total_num_scheduled_tokens)


@dataclass(frozen=True, slots=True)
class KVShape:
    """One pool of one group of full-attention layers."""

    block_tokens: int
    block_bytes: int
    """Of all layers together."""
    blocks: int


def read_shape(kv_cache_config: Any) -> KVShape:
    """The shape of the pool. One tensor for each layer (0.26), or one for all."""
    groups = kv_cache_config.kv_cache_groups
    blocks = int(kv_cache_config.num_blocks)
    total = sum(int(tensor.size) for tensor in kv_cache_config.kv_cache_tensors)
    if len(groups) != 1 or total % blocks:
        raise SettingsError(
            f"the model has {len(groups)} KV-cache groups over {total} bytes in {blocks} blocks; "
            "only one group of equal blocks is supported"
        )
    return KVShape(int(groups[GROUP].kv_cache_spec.block_size), total // blocks, blocks)


def version_of(text: str) -> tuple[int, int] | None:
    """The release line of a version such as "0.32.0+cpu"; None if it is something else."""
    parts = text.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    return int(parts[0]), int(parts[1])


def missing_parts(pool: BlockPool) -> list[str]:
    """Parts of the block pool that this needs and that are not there, by name."""
    names = ["blocks", "null_block", "metrics_collector", "free_block_queue", "hash_block_size"]
    names += ["get_new_blocks", "free_blocks", "touch", "get_num_free_blocks"]
    names += ["get_cached_block", "cache_full_blocks"]
    return [name for name in names if not hasattr(pool, name)]


def frees_idle(vllm_config: Any) -> bool:
    """Whether vLLM frees a block only when no step under way may touch it: where steps overlap it
    defers that for connectors that load (`Scheduler.defer_block_free`).
    """
    overlap = vllm_config.max_concurrent_batches > 1
    return not overlap or bool(vllm_config.kv_transfer_config.is_kv_consumer)


def hash_of(block: Block) -> bytes | None:
    """The hash of the content under which `block` is cached; None if it is not."""
    key = block.block_hash
    return None if key is None else key[:-_GROUP_BYTES]


def cached_block(pool: BlockPool, content: bytes) -> Block | None:
    """A block of `pool` that holds `content`."""
    found = pool.get_cached_block(content, [GROUP])
    return found[0] if found else None


def next_free(pool: BlockPool, count: int) -> list[Block]:
    """The first `count` blocks of the free queue, in the order in which they are handed out."""
    found: list[Block] = []
    block = pool.free_block_queue.fake_free_list_head.next_free_block
    while len(found) < count and block is not None and block.block_id >= 0:
        found.append(block)
        block = block.next_free_block
    return found


def to_tail(pool: BlockPool, blocks: Sequence[Block]) -> None:
    """Free blocks with content go to the tail of the free queue, the last of them last."""
    pool.touch(blocks)
    pool.free_blocks(blocks)


def cache_run(
    pool: BlockPool, request: VllmRequest, first: int, run: Sequence[Block], block_tokens: int
) -> None:
    """Let vLLM find `run` as the blocks `first`... of the request's prompt."""
    # Only the places of the run are looked at.
    places = [pool.null_block] * first + list(run)
    pool.cache_full_blocks(request, places, first, len(places), block_tokens, GROUP)


class HandedOut:
    """Takes note of every block that vLLM's pool hands out, and of resets of its cache.

    It is the pool's collector of residency metrics, which is told of both in all versions, and
    passes everything on to the one that was there.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._ids: list[int] = []
        self._accessed = 0
        self._reset = False

    @classmethod
    def watch(cls, pool: BlockPool) -> HandedOut:
        """Watch `pool` from now on."""
        watch = cls(pool.metrics_collector)
        pool.metrics_collector = watch
        return watch

    def take(self) -> tuple[list[int], int, bool]:
        """Since the last time: ids handed out, in order, how many found blocks were taken, and
        whether the cache was reset.
        """
        taken = self._ids, self._accessed, self._reset
        self._ids, self._accessed, self._reset = [], 0, False
        return taken

    def on_block_evicted(self, block: Block) -> None:
        """Called for each block handed out, whatever was in it, before its hash is dropped."""
        self._ids.append(block.block_id)
        self._tell("on_block_evicted", block)

    def on_block_allocated(self, block: Block) -> None:
        """Passed on."""
        self._tell("on_block_allocated", block)

    def on_block_accessed(self, block: Block) -> None:
        """Called for each block found and taken, free or not."""
        self._accessed += 1
        self._tell("on_block_accessed", block)

    def reset(self) -> None:
        """The prefix cache was reset: nothing is found in it any more."""
        self._reset = True
        self._tell("reset")

    def _tell(self, name: str, *arguments: object) -> None:
        if self._inner is not None:
            told: Callable[..., None] = getattr(self._inner, name)
            told(*arguments)
