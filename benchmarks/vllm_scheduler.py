"""What the half in vLLM's scheduler costs a step: 256 requests wait, each a hit in host memory.

    python benchmarks/vllm_scheduler.py --json FILE        needs vLLM beside this package

vLLM's real block pool, requests that are plain values, a modelled link of 52 GB/s, steps of 10 ms
on a virtual clock. What is timed is the wall time of the calls that vLLM's scheduler makes once for
each step, with all that they do to vLLM's pool.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.core.block_pool import BlockPool  # pyright: ignore[reportMissingImports]

from forebay.measure.report import Figure, Goal, arguments, finish
from forebay.transfer.messages import Completion, Direction, Outcome, Report, Transfer
from forebay.vllm.adapter import Scheduled, Step
from forebay.vllm.messages import News, Orders
from forebay.vllm.options import Options
from forebay.vllm.scheduler import SchedulerHalf

GOALS = {"scheduler_ms": Goal(at_most=1.0)}
BLOCKS, WAITING, RUNNING = 100_000, 256, 64
PROMPT_BLOCKS, RUNNING_BLOCKS = 625, 100
BLOCK_TOKENS, BLOCK_BYTES, KEY_BYTES = 16, 2 << 20, 32
HOST_BLOCKS = 200_000
STEP_S, LINK_BLOCKS_PER_STEP = 0.010, 248  # 52 GB/s
STEPS = 600


class Load:
    """The half over a real pool; `step` is one step of vLLM."""

    def __init__(self) -> None:
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
            clock=lambda: self.now_s,
        )
        self.names = 0
        self.flying: list[tuple[Transfer, int]] = []
        self.running: list[Any] = []
        self.moved = 0

    def request(self, hashes: list[bytes]) -> Any:
        """A request of whole blocks and a few tokens."""
        self.names += 1
        return SimpleNamespace(
            request_id=f"r{self.names}",
            priority=0,
            arrival_time=self.now_s,
            num_tokens=len(hashes) * BLOCK_TOKENS + 5,
            num_computed_tokens=0,
            num_output_tokens=1,
            max_tokens=1000,
            block_hashes=hashes,
            all_token_ids=[],
            kv_transfer_params=None,
            skip_reading_prefix_cache=False,
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
        part = Scheduled(request.request_id, 0, count * BLOCK_TOKENS, ids, True)
        return request, blocks, part

    def step(self, parts: tuple[Scheduled, ...] = (), link: int = HOST_BLOCKS) -> float:
        """One step in which the link moves up to `link` blocks; ms of wall time of the half."""
        self.now_s += STEP_S
        step = Step(parts, frozenset(), sum(part.tokens for part in parts))
        begin_s = time.perf_counter()
        orders = self.half.orders(step)
        took_s = time.perf_counter() - begin_s
        news = self._news(orders, link)
        begin_s = time.perf_counter()
        self.half.heard(orders.step, news)
        return (took_s + time.perf_counter() - begin_s) * 1e3

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
            self.step((part,))
            while self.half.busy:
                self.step()
            request.num_computed_tokens = part.tokens
            self.half.finish(request)
            self.pool.free_blocks(reversed(blocks))
        if not self.pool.reset_prefix_cache():
            raise RuntimeError("blocks are held after all requests ended")
        return prompts


def measure() -> tuple[list[float], int]:
    """Milliseconds of each step, and the blocks that were loaded in all of them."""
    load = Load()
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
    return [load.step(decode, LINK_BLOCKS_PER_STEP) for _ in range(STEPS)], load.moved


def main() -> int:
    args = arguments(__doc__ or "").parse_args()
    took_ms, moved = measure()
    settings = {
        "blocks": BLOCKS,
        "waiting": WAITING,
        "running": RUNNING,
        "prompt_blocks": PROMPT_BLOCKS,
        "steps": STEPS,
        "loaded_blocks": moved,
        "p50_ms": round(statistics.median(took_ms), 4),
        "p99_ms": round(float(np.percentile(took_ms, 99)), 4),
        "method": "mean wall time of orders and heard; 52 GB/s link, steps of 10 ms",
    }
    figure = Figure("scheduler_ms", statistics.fmean(took_ms), "ms", took_ms, settings)
    return finish([figure], GOALS, json=args.json, strict=args.strict)


if __name__ == "__main__":
    sys.exit(main())
