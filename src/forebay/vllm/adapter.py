"""vLLM's own objects: the parts of them that are used, and what differs between its versions.

Nothing is imported from vLLM here. Its block pool and requests are described as protocols, its step
output and configuration are read by name, once, into values of our own. Read and tried: the
versions in `TRIED`; the fields used are the same in all of them except where noted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from forebay.errors import SettingsError
from forebay.vllm.drafts import drafts_in_cache
from forebay.vllm.groups import ONE_GROUP, Groups, read_groups

TRIED = tuple((0, minor) for minor in range(26, 34))
"""Release lines that this was tried with, without a gap: the scheduler and block pool of each, 0.26
on GPUs, 0.32 by the tests, on a CPU.
"""
TRIED_SPAN = "{}.{} to {}.{}".format(*TRIED[0], *TRIED[-1])
"""The same, for who is told."""

_GROUP_BYTES = 4
"""vLLM appends the number of a block's group to its hash, in so many bytes."""


class Block(Protocol):
    """vLLM's `KVCacheBlock`."""

    block_id: int
    ref_cnt: int

    @property
    def block_hash(self) -> bytes | None:
        """The hash under which it is cached, followed by its group."""
        ...


class BlockPool(Protocol):
    """vLLM's `BlockPool`: ids from 0, of which 0 stands for no block."""

    num_gpu_blocks: int
    hash_block_size: int
    blocks: Sequence[Block]
    null_block: Block
    metrics_collector: Any
    free_block_queue: Any
    """Of blocks that are linked by `prev_free_block` and `next_free_block`, between two ends,
    `fake_free_list_head` and `fake_free_list_tail`."""
    cached_block_hash_to_block: Any

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

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Let nobody find these blocks any more; who has them keeps them."""
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
    num_prompt_tokens: int
    num_output_tokens: int
    num_in_flight_tokens: int
    max_tokens: int
    block_hashes: list[bytes]
    all_token_ids: Sequence[int]
    kv_transfer_params: object
    lora_request: Any
    cache_salt: str | None
    mm_features: Sequence[Any]
    resumable: bool
    status: Any
    skip_reading_prefix_cache: bool


class Scheduled(NamedTuple):
    """A request of one step: it computes `tokens` from `start` on.
    Where steps overlap vLLM counts on earlier guesses, and the worker may go on further before.

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
    drafts: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many of its tokens are guesses, by request."""
    given: frozenset[int] = frozenset()
    """If it preempts some: all blocks, of any group, that it gave its requests."""


def read_step(output: Any, group: int) -> Step:
    """The step in vLLM's `SchedulerOutput`, with the blocks of the group of this number.

    A resumed request is a new one where the second model runner is used, a cached one elsewhere.
    """
    counts: dict[str, int] = output.num_scheduled_tokens
    scheduled = [
        Scheduled(
            new.req_id, new.num_computed_tokens, counts[new.req_id], new.block_ids[group], True
        )
        for new in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    for name, blocks, start in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        whole = name in cached.resumed_req_ids
        ids = blocks[group] if blocks is not None else ()
        scheduled.append(Scheduled(name, start, counts[name], ids, whole))
    preempted = frozenset(output.preempted_req_ids or ())
    guesses: dict[str, list[int]] = output.scheduled_spec_decode_tokens
    drafts = {name: len(each) for name, each in guesses.items()}
    given = _given(output) if preempted else frozenset[int]()
    return Step(tuple(scheduled), preempted, output.total_num_scheduled_tokens, drafts, given)


def _given(output: Any) -> frozenset[int]:
    """The blocks of all groups that a step gives its requests."""
    new = [new.block_ids for new in output.scheduled_new_reqs]
    new += [blocks for blocks in output.scheduled_cached_reqs.new_block_ids if blocks is not None]
    return frozenset(block for groups in new for blocks in groups for block in blocks)


@dataclass(frozen=True, slots=True)
class KVShape:
    """The pool of one worker, which all groups of layers share."""

    block_tokens: int
    block_bytes: int
    """Of all layers that the worker has."""
    blocks: int
    whole_bytes: int
    """Of a block in all workers together."""
    groups: Groups = ONE_GROUP


def read_shape(vllm_config: Any, kv_cache_config: Any) -> KVShape:
    """The shape of the pool. One tensor for each layer, or for one of each group (0.26), or one for
    all, or for those of each group, which all are the same memory.

    Raises SettingsError for a pool that is not of equal blocks, and for stages of which vLLM does
    not say what each has.
    """
    groups = read_groups(kv_cache_config)
    path = kv_cache_config.kv_cache_groups[groups.path]
    blocks = int(kv_cache_config.num_blocks)
    sizes = [int(tensor.size) for tensor in kv_cache_config.kv_cache_tensors]
    same = len(groups) > 1 and all(hasattr(t, "layers") for t in kv_cache_config.kv_cache_tensors)
    total = max(sizes) if same else sum(sizes)
    if total % blocks:
        raise SettingsError(
            f"vLLM has {total} bytes for {blocks} blocks: only equal blocks are supported"
        )
    tokens, block_bytes = int(path.kv_cache_spec.block_size), total // blocks
    whole_bytes = _whole_bytes(vllm_config, len(path.layer_names), block_bytes)
    return KVShape(tokens, block_bytes, blocks, whole_bytes, groups)


def _whole_bytes(vllm_config: Any, layers: int, block_bytes: int) -> int:
    """Of a block in all workers, where one that has `layers` of the model has `block_bytes`.

    Each works it out from its own, and all have to come to the same: it is how they agree on the
    number of host slots. So where stages may have more layers or fewer, those that vLLM says a
    stage has must all have KV, as many bytes each as any other.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    stages = int(parallel.pipeline_parallel_size)
    if stages == 1:
        return block_bytes * int(parallel.world_size)
    expected = int(model.get_num_layers(parallel))
    if layers != expected or not layers or block_bytes % layers:
        raise SettingsError(
            f"with pipeline parallelism ForebayConnector works where all layers have KV, and this "
            f"stage has {expected} layers, and {layers} with KV of {block_bytes} bytes together: "
            "leave pipeline parallelism or the connector away"
        )
    of_stage = int(parallel.world_size) // stages
    return block_bytes // layers * int(model.get_total_num_hidden_layers()) * of_stage


def last_block(blocks: Any, tokens: int, block_tokens: int) -> int:
    """The id of the last one with any of a request's `tokens` in vLLM's `KVCacheBlocks` of it:
    behind that may be others, for drafts. Of a model of one group.
    """
    return int(blocks.blocks[0][(tokens - 1) // block_tokens].block_id)


def loads_come_first(output: Any) -> None:
    """Have workers call `start_load_kv` before the forward pass of the step in vLLM's
    `SchedulerOutput`: 0.32 calls it behind that where it is not told so.
    """
    if hasattr(output, "has_sync_kv_loads"):
        output.has_sync_kv_loads = True


def version_of(text: str) -> tuple[int, int] | None:
    """The release line of a version such as "0.32.0+cpu"; None if it is something else."""
    parts = text.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    return int(parts[0]), int(parts[1])


def missing_parts(pool: BlockPool) -> list[str]:
    """Parts of the block pool that this needs and that are not there, by name."""
    names = ["blocks", "null_block", "metrics_collector", "free_block_queue", "hash_block_size"]
    names += ["cached_block_hash_to_block", "get_new_blocks", "free_blocks", "get_num_free_blocks"]
    names += ["cache_full_blocks", "touch", "evict_blocks"]
    missing = [name for name in names if not hasattr(pool, name)]
    if "free_block_queue" not in missing:
        ends = ("fake_free_list_head", "fake_free_list_tail")
        missing += [name for name in ends if not hasattr(pool.free_block_queue, name)]
    if "cached_block_hash_to_block" not in missing:
        by_hash = pool.cached_block_hash_to_block
        missing += [] if hasattr(by_hash, "get_one_block") else ["get_one_block"]
    if "null_block" not in missing:
        parts = ("block_id", "ref_cnt", "block_hash", "prev_free_block", "next_free_block")
        missing += [name for name in parts if not hasattr(pool.null_block, name)]
    return missing


def frees_idle(vllm_config: Any) -> bool:
    """Whether vLLM frees a block only when no step under way may touch it: where steps overlap it
    defers that for connectors that load (`Scheduler.defer_block_free`). Layers that make drafts
    may write still when the tokens of a step are known.
    """
    if drafts_in_cache(vllm_config):
        return False
    overlap = vllm_config.max_concurrent_batches > 1
    return not overlap or bool(vllm_config.kv_transfer_config.is_kv_consumer)


def hash_of(block: Block) -> bytes | None:
    """The hash of the content under which `block` is cached; None if it is not."""
    key = block.block_hash
    return None if key is None else key[:-_GROUP_BYTES]


def left(request: VllmRequest) -> bool:
    """Whether its client left before it was answered."""
    return request.status.name == "FINISHED_ABORTED"


def awaits_outputs(request: VllmRequest) -> bool:
    """Whether outputs of steps that it was in before it was preempted have yet to come.

    Those may end it, or bring a token that it computes again. 0.26 asks about it nevertheless,
    where more than two steps are under way; later versions wait for them first.
    """
    return request.num_in_flight_tokens > 0


def runs(request: VllmRequest) -> bool:
    """Whether it was started, and was not preempted and has not ended since."""
    return request.status.name == "RUNNING"


def over(request: VllmRequest) -> bool:
    """Whether its answer has ended, in whatever way."""
    return request.status.name.startswith("FINISHED")


def cached_blocks(pool: BlockPool, contents: Iterable[bytes], group: int) -> list[Block | None]:
    """For each of `contents` a block of `pool` that holds it, of this group."""
    find, key = pool.cached_block_hash_to_block.get_one_block, group.to_bytes(_GROUP_BYTES, "big")
    return [find(content + key) for content in contents]


def named(pool: BlockPool, contents: Collection[bytes], groups: Iterable[int]) -> set[int]:
    """All blocks of `pool` that are found as one of `contents` in one of `groups`."""
    keys = [group.to_bytes(_GROUP_BYTES, "big") for group in groups]
    names = {content + key for content in contents for key in keys}
    return {block.block_id for block in pool.blocks if block.block_hash in names}


def cache_run(
    pool: BlockPool,
    request: VllmRequest,
    first: int,
    run: Sequence[Block],
    block_tokens: int,
    group: int,
) -> None:
    """Let vLLM find `run` as the blocks `first`... of the request's prompt, in this group."""
    # Only the places of the run are looked at.
    places = [pool.null_block] * first + list(run)
    pool.cache_full_blocks(request, places, first, len(places), block_tokens, group)


def uncache(pool: BlockPool, slots: Iterable[int]) -> None:
    """Let vLLM find nothing in `slots`, which are not handed out by that."""
    watch, pool.metrics_collector = pool.metrics_collector, None
    pool.evict_blocks(set(slots))
    pool.metrics_collector = watch


def lora_of(request: VllmRequest) -> tuple[int, str] | None:
    """The number and name of the LoRA that `request` is for, if it is for one."""
    lora = request.lora_request
    return None if lora is None else (int(lora.lora_int_id), str(lora.lora_name))


def lora_name(request: VllmRequest) -> str | None:
    """The name of the LoRA that `request` is for, if it is for one."""
    lora = lora_of(request)
    return None if lora is None else lora[1]
