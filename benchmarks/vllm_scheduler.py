"""What the two halves of the connector for vLLM cost a step.

    python benchmarks/vllm_scheduler.py --json FILE        needs vLLM beside this package

First 256 requests wait, each a hit in host memory: vLLM's real block pool, requests that are plain
values, a modelled link of 52 GB/s, steps of 10 ms on a virtual clock; for a model of one group of
layers, and for one in which a second group looks back through 1,024 tokens. Then vLLM's real
scheduler runs over a model of a GPU and its link: a backlog of conversations (10,000 blocks, 24
users of 12k tokens, 8 run slots, answers of 16), prompts that nobody has seen, and convoys: 50
requests at once on one prefix in host memory (3,000 blocks, 64 run slots), which one step starts.
What is timed is the CPU time of the calls that vLLM's scheduler makes, with all that they do to
vLLM's pool.

At last the half in vLLM's worker, which runs in the same thread where there is one GPU: its calls
of a step that starts a load of 784 blocks and a save of 128, small ones that a CPU copies.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.core.block_pool import BlockPool  # pyright: ignore[reportMissingImports]
from vllm_step_times import Timed, start_engine

from forebay.measure.report import Figure, Goal, arguments, finish, median_figure
from forebay.transfer.messages import (
    Completion,
    Direction,
    Outcome,
    Report,
    Transfer,
    TransferClass,
)
from forebay.vllm.adapter import KVShape, Scheduled, Step
from forebay.vllm.groups import ONE_GROUP, Group, Groups
from forebay.vllm.messages import News, Orders
from forebay.vllm.options import Options
from forebay.vllm.scheduler.half import SchedulerHalf
from forebay.vllm.worker import WorkerHalf

GOALS = {
    "scheduler_ms": Goal(at_most=1.0),
    "window_ms": Goal(at_most=1.0),
    "backlog_ms": Goal(at_most=1.0),
    "no_hits_ms": Goal(at_most=1.0),
    "nothing_new_ms": Goal(at_most=0.1),
    "worker_ms": Goal(at_most=0.2),
}
BLOCKS, WAITING, RUNNING = 100_000, 256, 64
PROMPT_BLOCKS, RUNNING_BLOCKS = 625, 100
BLOCK_TOKENS, BLOCK_BYTES, KEY_BYTES = 16, 2 << 20, 32
HOST_BLOCKS = 200_000
STEP_S, LINK_BLOCKS_PER_STEP = 0.010, 248  # 52 GB/s
STEPS = 600
WINDOW_TOKENS = 1024


class Load:
    """The half over a real pool; `step` is one step of vLLM. A model of several `groups` of layers
    has blocks of each.
    """

    def __init__(self, groups: Groups = ONE_GROUP) -> None:
        self.groups = groups
        self.dice = random.Random(1)
        self.now_s = 0.0
        self.pool: Any = BlockPool(BLOCKS, True, BLOCK_TOKENS)
        settings = Options.parse({"host_bytes": HOST_BLOCKS * BLOCK_BYTES}).settings(
            block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES, device_slots=BLOCKS - 1
        )
        self.half = SchedulerHalf(
            settings,
            self.pool,
            key_bytes=KEY_BYTES,
            most_running=RUNNING,
            step_tokens=8192,
            frees_idle=True,
            groups=groups,
            clock=lambda: self.now_s,
        )
        self.names = 0
        self.flying: list[tuple[Transfer, int]] = []
        self.running: list[Any] = []
        self.moved = 0
        self.prompts_ms: list[float] = []
        self.ends_ms: list[float] = []

    def request(self, hashes: list[bytes]) -> Any:
        """A request of whole blocks and a few tokens."""
        self.names += 1
        return SimpleNamespace(
            request_id=f"r{self.names}",
            priority=0,
            arrival_time=self.now_s,
            num_tokens=len(hashes) * BLOCK_TOKENS + 5,
            num_computed_tokens=0,
            num_prompt_tokens=len(hashes) * BLOCK_TOKENS + 5,
            num_output_tokens=1,
            max_tokens=1000,
            block_hashes=hashes,
            all_token_ids=[],
            kv_transfer_params=None,
            skip_reading_prefix_cache=False,
            num_in_flight_tokens=0,
            lora_request=None,
            status=SimpleNamespace(name="FINISHED_STOPPED"),
        )

    def start(self, hashes: list[bytes]) -> tuple[Any, list[Any], Scheduled]:
        """vLLM starts a request that computes all of its prompt."""
        request, count = self.request(hashes), len(hashes)
        self.half.arrive(request)
        self.half.asked(request, 0)
        self.half.admitted(request, None)
        blocks = self.pool.get_new_blocks(count)
        self.pool.cache_full_blocks(request, blocks, 0, count, BLOCK_TOKENS, 0)
        ids = [block.block_id for block in blocks]
        for group in self.groups.beside:
            more = self.pool.get_new_blocks(count)
            self.pool.cache_full_blocks(request, more, 0, count, BLOCK_TOKENS, group.number)
            # What its layers do not look back at is free already.
            self.pool.free_blocks(reversed(more[: group.first(count)]))
            blocks += more[group.first(count) :]
        part = Scheduled(request.request_id, 0, count * BLOCK_TOKENS, ids, True)
        return request, blocks, part

    def step(self, parts: tuple[Scheduled, ...] = (), link: int = HOST_BLOCKS) -> float:
        """One step in which the link moves up to `link` blocks; ms of CPU time of the half."""
        self.now_s += STEP_S
        step = Step(parts, frozenset(), sum(part.tokens for part in parts))
        begin_s = time.thread_time()
        orders = self.half.orders(step)
        took_s = time.thread_time() - begin_s
        news = self._news(orders, link)
        begin_s = time.thread_time()
        self.half.heard(orders.step, news)
        return (took_s + time.thread_time() - begin_s) * 1e3

    def _news(self, orders: Orders, link: int) -> News:
        self.flying += [(transfer, len(transfer.sources)) for transfer in orders.submit]
        ended: list[Completion] = []
        left = {Direction.LOAD: link, Direction.SAVE: link}
        still: list[tuple[Transfer, int]] = []
        for transfer, lacks in self.flying:
            moved = min(lacks, left[transfer.direction])
            left[transfer.direction] -= moved
            if transfer.direction is Direction.LOAD:
                self.moved += moved
            if moved < lacks:
                still.append((transfer, lacks - moved))
                continue
            count = len(transfer.sources)
            begin_s = self.now_s - count * STEP_S / LINK_BLOCKS_PER_STEP
            ended.append(
                Completion(
                    transfer.id,
                    Outcome.DONE,
                    count,
                    count,
                    count * BLOCK_BYTES,
                    begin_s,
                    self.now_s,
                    "",
                )
            )
        self.flying = still
        report = Report(tuple(each.id for each in ended), tuple(ended), orders.step)
        return News(report, HOST_BLOCKS)

    def fill_host(self) -> list[list[bytes]]:
        """Prompts whose KV is in host memory and not on the device."""
        prompts = [
            [self.dice.randbytes(KEY_BYTES) for _ in range(PROMPT_BLOCKS)] for _ in range(WAITING)
        ]
        self.step()
        for hashes in prompts:
            request, blocks, part = self.start(hashes)
            self.prompts_ms.append(self.step((part,)))
            while self.half.busy:
                self.step()
            request.num_computed_tokens = part.tokens
            begin_s = time.thread_time()
            self.half.finish(request)
            self.ends_ms.append((time.thread_time() - begin_s) * 1e3)
            self.pool.free_blocks(reversed(blocks))
        if not self.pool.reset_prefix_cache():
            raise RuntimeError("blocks are held after all requests ended")
        return prompts


def waiting_figure(name: str, groups: Groups) -> Figure:
    """Of steps in which requests wait for loads, of a model of such `groups`."""
    load = Load(groups)
    prompts = load.fill_host()
    started = [
        load.start([load.dice.randbytes(KEY_BYTES) for _ in range(RUNNING_BLOCKS)])
        for _ in range(RUNNING)
    ]
    load.step(tuple(part for _, _, part in started))
    for request, _, part in started:
        request.num_computed_tokens = part.tokens
    for hashes in prompts:
        load.half.arrive(load.request(hashes))
    decode = tuple(
        Scheduled(request.request_id, request.num_computed_tokens, 1, (), False)
        for request, _, _ in started
    )
    load.moved = 0
    gc.collect()
    took_ms = [load.step(decode, LINK_BLOCKS_PER_STEP) for _ in range(STEPS)]
    settings = {
        "blocks": BLOCKS,
        "waiting": WAITING,
        "running": RUNNING,
        "prompt_blocks": PROMPT_BLOCKS,
        "groups": len(groups),
        "steps": STEPS,
        "loaded_blocks": load.moved,
        "p50_ms": round(statistics.median(took_ms), 4),
        "p99_ms": round(float(np.percentile(took_ms, 99)), 4),
        "step_of_a_prompt_p50_ms": round(statistics.median(load.prompts_ms), 4),
        "end_of_request_p50_ms": round(statistics.median(load.ends_ms), 4),
        "method": "mean CPU time of orders and heard; 52 GB/s link, steps of 10 ms",
    }
    return Figure(name, statistics.fmean(took_ms), "ms", took_ms, settings)


def run_engine(load: Callable[[Any], None]) -> tuple[Timed, int, int]:
    """Under `load`: times, and how many blocks were loaded and saved."""
    engine, timed = start_engine(10_000, 8)
    gc.collect()
    load(engine)
    loaded, saved = (engine.link.moved_blocks[way] for way in (Direction.LOAD, Direction.SAVE))
    return timed, loaded, saved


def backlog(engine: Any) -> None:
    """24 users at once, three turns each; each asks again when it has its answer."""

    def ask(said: list[int], turns: int) -> None:
        prompt = said + engine.some(256)
        more = turns - 1
        then = (lambda reply: ask(prompt + reply.tokens, more)) if more else None
        engine.ask(prompt, 16, then=then)

    for _ in range(24):
        ask(engine.some(12_288), 3)
    engine.run()


def no_hits(engine: Any) -> None:
    """24 prompts that nobody has seen, at once."""
    for _ in range(24):
        engine.ask(engine.some(4_096), 64)
    engine.run()


def engine_figures() -> list[Figure]:
    """Of vLLM's real scheduler."""
    figures: list[Figure] = []
    for name, load in (("backlog", backlog), ("no_hits", no_hits)):
        timed, loaded, saved = run_engine(load)
        total_ms = sum(timed.steps_ms)
        settings = {
            "steps": len(timed.steps_ms),
            "loaded_blocks": loaded,
            "saved_blocks": saved,
            "total_ms": round(total_ms, 2),
            "of_vllms_pool_ms": round(timed.pool_s * 1e3, 2),
            "p50_ms": round(statistics.median(timed.steps_ms), 4),
            "worst_ms": round(max(timed.steps_ms), 3),
            "us_per_block": round(total_ms * 1e3 / (loaded + saved), 3),
            "method": "mean CPU time of all calls of a step; loaded and saved blocks together",
        }
        mean_ms = statistics.fmean(timed.steps_ms)
        figures.append(Figure(f"{name}_ms", mean_ms, "ms", timed.steps_ms, settings))
        if name == "no_hits":
            quiet = {"steps": len(timed.quiet_ms), "method": "median of steps without anything new"}
            median_ms = statistics.median(timed.quiet_ms)
            figures.append(Figure("nothing_new_ms", median_ms, "ms", timed.quiet_ms, quiet))
    return figures


CONVOYS, CONVOY = 9, 50
CONVOY_PREFIX, CONVOY_SUFFIX = 10_240, 128


def convoy_figure() -> Figure:
    """Of many requests at once on one prefix that is in host memory."""
    engine, timed = start_engine(3_000, 64)
    each_ms: list[float] = []
    steps = 0
    for _ in range(CONVOYS):
        prefix = engine.some(CONVOY_PREFIX)
        engine.ask(prefix, 1)
        engine.settle()
        gc.collect()
        before, moved = len(timed.steps_ms), engine.link.moved_blocks[Direction.LOAD]
        for _ in range(CONVOY):
            engine.ask(prefix + engine.some(CONVOY_SUFFIX), 4)
        engine.settle()
        if engine.link.moved_blocks[Direction.LOAD] - moved != CONVOY_PREFIX // BLOCK_TOKENS:
            raise RuntimeError("a convoy's prefix was not loaded once")
        steps = len(timed.steps_ms) - before
        each_ms.append(sum(timed.steps_ms[before:]) / CONVOY)
    settings = {
        "convoys": CONVOYS,
        "requests": CONVOY,
        "prefix_tokens": CONVOY_PREFIX,
        "suffix_tokens": CONVOY_SUFFIX,
        "steps": steps,
        "method": "median over convoys of the CPU time of all calls, for each request",
    }
    return median_figure("convoy_ms", each_ms, "ms", settings)


LOADED, SAVED, WORKER_STEPS = 784, 128, 200


def worker_figure() -> Figure:
    """Of the half in vLLM's worker."""
    shape = KVShape(BLOCK_TOKENS, 4096, 10_000, 4096)
    host_slots = 20_000
    options = Options.parse({"host_bytes": host_slots * shape.block_bytes})
    blocks = torch.zeros((shape.blocks, shape.block_bytes), dtype=torch.uint8)
    worker = WorkerHalf(shape, options, {"all layers": blocks})
    dice = np.random.default_rng(1)

    def slots(most: int, count: int, first: int) -> Any:
        return (first + dice.permutation(most)[:count]).astype(np.int32)

    def transfers(step: int) -> tuple[Transfer, Transfer]:
        half, after = shape.blocks // 2, np.full(SAVED, step, np.int64)
        load = slots(half, LOADED, 0), slots(half, LOADED, 0), np.zeros(LOADED, np.int64)
        save = slots(half, SAVED, half), slots(half, SAVED, half), after
        kind = TransferClass
        return (
            Transfer(2 * step, Direction.LOAD, kind.PREFETCH, 0.0, *load),
            Transfer(2 * step + 1, Direction.SAVE, kind.SAVE, 0.0, *save),
        )

    took_ms: list[float] = []
    ended = 0
    for step in range(1, WORKER_STEPS + 1):
        orders = Orders(step, (), (), transfers(step), (), (), idle=False)
        began_s = time.thread_time()
        worker.begin(orders)
        worker.make_ready()
        worker.launched()
        worker.step_over()
        news = worker.news()
        took_ms.append((time.thread_time() - began_s) * 1e3)
        while (ended := ended + (len(news.report.completions) if news else 0)) < 2 * step:
            time.sleep(0.001)
            news = worker.news()
    worker.close()
    settings = {"steps": WORKER_STEPS, "loaded_blocks": LOADED, "saved_blocks": SAVED}
    method = {"method": "mean CPU time of vLLM's thread"}
    return Figure("worker_ms", statistics.fmean(took_ms), "ms", took_ms, settings | method)


def main() -> int:
    args = arguments(__doc__ or "").parse_args()
    window = Group(1, -(-(WINDOW_TOKENS - 1) // BLOCK_TOKENS), WINDOW_TOKENS)
    waiting = [
        waiting_figure("scheduler_ms", ONE_GROUP),
        waiting_figure("window_ms", Groups(beside=(window,))),
    ]
    return finish(
        [*waiting, *engine_figures(), convoy_figure(), worker_figure()],
        GOALS,
        json=args.json,
        strict=args.strict,
    )


if __name__ == "__main__":
    sys.exit(main())
