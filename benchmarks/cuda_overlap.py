"""What copies cost a decode step and a step's launches, and what a load ahead of time hides.

The step is the engine's own: a model of the shape of Llama 3 8B with random weights in bf16, eight
requests of 2,048 tokens; its work on the device is replayed as a graph, so that it does not wait
for the host. Times of steps and waits are the device's, by events. Needs a CUDA device with 48 GiB.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import numpy as np
import torch
import transformers
from report import Figure, Goal, arguments, finish, median_figure

from forebay.engine.engine import Engine
from forebay.engine.models import LoadedModel, adopt_model
from forebay.engine.pool import KVPool
from forebay.engine.runner import Chunk, Runner, probe_geometry
from forebay.engine.sampler import SamplingParams
from forebay.engine.settings import EngineSettings
from forebay.transfer.messages import Direction, Transfer, TransferClass
from forebay.transfer.native import NativeMover
from forebay.transfer.pinned import PinnedArena
from forebay.transfer.pool import Pool

MIB, GIB = 1 << 20, 1 << 30
BLOCK_BYTES, COPY_BYTES = 5 * MIB, 2 * GIB
TEXTBOOK_BLOCKS = 128  # 2,048 tokens of Llama 3 70B in 16 bit: 671 MB
LEADS_MS = (0, 3, 6, 12, 25)
PARTS = ["pin", "serve", "decode", "textbook"]
REQUESTS, CONTEXT = 8, 2048
GOALS = {
    "decode_inflation_load": Goal(at_most=1.08),
    "decode_inflation_both": Goal(at_most=1.09),
    "launch_delay_us": Goal(at_most=20),
    **{f"textbook_excess_{lead}_ms": Goal(at_most=0.4) for lead in LEADS_MS},
    "textbook_itl_p99": Goal(at_most=1.1),
    "pin_rate": Goal(at_least=1.5),
    "serve_while_pinning_s": Goal(at_most=5),
}


def llama_8b() -> LoadedModel:
    """The shape of Llama 3 8B, with random weights."""
    config = transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return adopt_model(model, name="a model of the shape of Llama 3 8B")


class Decode:
    """The engine's decode step for some requests, over a pool of its own."""

    def __init__(self, loaded: LoadedModel) -> None:
        geometry = probe_geometry(loaded, 16)
        blocks = CONTEXT // 16
        pool = KVPool(geometry, REQUESTS * blocks, dtype=loaded.kv_dtype, device="cuda")
        pool.blocks.normal_()
        self.runner = Runner(loaded, pool)
        slots = np.arange(REQUESTS * blocks, dtype=np.int32).reshape(REQUESTS, blocks)
        self.chunks = [Chunk(np.array([5]), CONTEXT - 1, row) for row in slots]
        for _ in range(3):
            self.runner.forward(self.chunks)

        self.graph = self._captured()

    def _captured(self) -> torch.cuda.CUDAGraph:
        """The step's work on the device, without what the host does before it."""
        packed = self.runner._pack(self.chunks)  # pyright: ignore[reportPrivateUsage]
        packed = replace(packed, tokens=packed.tokens.cuda(), positions=packed.positions.cuda())
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self.runner._run(packed, packed.last_rows)  # pyright: ignore[reportPrivateUsage]
        self._read = packed  # its tensors are read by every replay
        return graph

    def replay(self) -> float:
        """Milliseconds of the same work as one graph: nothing of the host's is in between."""
        return self._timed(self.graph.replay)

    def _timed(self, work: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


class Copies:
    """Loads and saves of scattered blocks, as many as are wanted, for as long as is wanted."""

    def __init__(self) -> None:
        self.slots = 2 * COPY_BYTES // BLOCK_BYTES
        self.device = torch.empty(self.slots, BLOCK_BYTES, dtype=torch.uint8, device="cuda")
        self.arena = PinnedArena(self.slots * BLOCK_BYTES, BLOCK_BYTES)
        self.arena.wait_ready(self.slots * BLOCK_BYTES, 300.0)
        self.mover = NativeMover(
            Pool.of([self.device]),
            Pool.of([self.arena.blocks(self.slots, BLOCK_BYTES)], seam_bytes=self.arena.seam_bytes),
            backend="cuda",
            window_records=1 << 18,
        )
        self.ids = count(1)
        self.rng = np.random.default_rng(3)
        self.issued: set[int] = set()
        self.ended: dict[int, float] = {}

    def submit(self, blocks: int, direction: Direction = Direction.LOAD) -> int:
        half = self.slots // 2
        first = half if direction is Direction.SAVE else 0
        sources, destinations = (
            (first + self.rng.permutation(half)[:blocks]).astype(np.int32) for _ in range(2)
        )
        transfer = Transfer(
            next(self.ids), direction, TransferClass.PREFETCH, 0.0, sources, destinations,
            np.zeros(blocks, np.int64),
        )  # fmt: skip
        self.mover.submit([transfer])
        return transfer.id

    def poll(self) -> None:
        report = self.mover.poll()
        self.issued.update(report.issued)
        for each in report.completions:
            self.ended[each.id] = each.finished_s

    def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.mover.wait_news(0.5)
            self.poll()

    @contextmanager
    def running(self, *directions: Direction) -> Iterator[None]:
        """Meanwhile the link is busy in these directions, for up to two seconds."""
        blocks = COPY_BYTES // BLOCK_BYTES
        ids = [self.submit(blocks, direction) for _ in range(50) for direction in directions]
        time.sleep(0.05)
        try:
            yield
        finally:
            self.poll()
            busy = not all(each in self.ended for each in ids)
            self.mover.cancel(ids)
            self.until(lambda: all(each in self.ended for each in ids))
        if not busy:
            raise SystemExit("the link ran out of work while it was measured")

    def window_bytes(self) -> int:
        """Bytes of windows that have ended since it was asked last."""
        return int(self.mover.windows()["bytes"].sum())

    def close(self) -> None:
        self.mover.close(10.0)
        self.arena.close()


def inflation(decode: Decode, copies: Copies, rounds: int) -> list[Figure]:
    """The step with the link busy over the step alone, in turns, and the link's rate meanwhile."""
    figures: list[Figure] = []
    cases = {
        "decode_inflation_load": [Direction.LOAD],
        "decode_inflation_both": [Direction.LOAD, Direction.SAVE],
    }
    for id_, directions in cases.items():
        ratios: list[float] = []
        rates: list[float] = []
        alone_ms: list[float] = []
        with copies.running(*directions):
            copies.window_bytes()
            began_s = time.monotonic()
            time.sleep(0.5)
            bare = copies.window_bytes() / (time.monotonic() - began_s) / 1e9
        for _ in range(rounds):
            alone_ms += [decode.replay() for _ in range(30)]
            with copies.running(*directions):
                copies.window_bytes()
                began_s = time.monotonic()
                beside = [decode.replay() for _ in range(30)]
                rates.append(copies.window_bytes() / (time.monotonic() - began_s) / 1e9)
            ratios.append(statistics.median(beside) / statistics.median(alone_ms[-30:]))
        settings = {
            "step_alone_ms": statistics.median(alone_ms),
            "link_gb_per_s": statistics.median(rates),
            "link_gb_per_s_without_decode": bare,
            "graphed": True,
        }
        figures.append(median_figure(id_, ratios, "ratio", settings))
    return figures


def launch_delay(copies: Copies, launches: int = 3000) -> Figure:
    """99th percentile of what one kernel launch takes the host, copies both ways over none."""
    value = torch.zeros(16, device="cuda")

    def p99_us() -> float:
        costs: list[float] = []
        for _ in range(launches):
            began_s = time.perf_counter()
            value.add_(1)
            costs.append(1e6 * (time.perf_counter() - began_s))
            time.sleep(2e-4)
        return float(np.percentile(costs, 99))

    idle = p99_us()
    with copies.running(Direction.LOAD, Direction.SAVE):
        busy = p99_us()
    settings = {"idle_p99_us": idle, "busy_p99_us": busy, "block_mib": 5}
    return Figure("launch_delay_us", busy - idle, "us", (busy - idle,), settings)


def textbook(decode: Decode, copies: Copies, rounds: int) -> list[Figure]:
    """A load of 671 MB started some time before it is needed, while others decode."""
    size = TEXTBOOK_BLOCKS * BLOCK_BYTES
    alone_ms = [decode.replay() for _ in range(60)]
    with copies.running(Direction.LOAD):
        copies.window_bytes()
        began_s = time.monotonic()
        for _ in range(20):
            decode.replay()
        rate = copies.window_bytes() / (time.monotonic() - began_s)
    beside_ms: list[float] = []
    figures: list[Figure] = []
    for lead in LEADS_MS:
        excess: list[float] = []
        exposed: list[float] = []
        for _ in range(rounds):
            load, began_s = copies.submit(TEXTBOOK_BLOCKS), time.monotonic()
            while time.monotonic() - began_s < 1e-3 * lead:
                beside_ms.append(decode.replay())
            led_ms = 1e3 * (time.monotonic() - began_s)
            copies.poll()
            copies.until(lambda load=load: load in copies.issued)
            wait_ms = 1e3 * (time.monotonic() - began_s) - led_ms
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            copies.mover.wait([load], torch.cuda.current_stream().cuda_stream)
            end.record()
            end.synchronize()
            exposed.append(wait_ms + begin.elapsed_time(end))
            excess.append(exposed[-1] - max(0.0, 1e3 * size / rate - led_ms))
            copies.until(lambda load=load: load in copies.ended)
        settings = {
            "exposed_ms": statistics.median(exposed),
            "link_gb_per_s_beside_decode": rate / 1e9,
            "method": "exposed wait less what the link still needed at best",
        }
        figures.append(median_figure(f"textbook_excess_{lead}_ms", excess, "ms", settings))
    ratio = float(np.percentile(beside_ms, 99) / np.percentile(alone_ms, 99))
    return [*figures, Figure("textbook_itl_p99", ratio, "ratio", (ratio,), {})]


def pin_rate(size_gib: int) -> Figure:
    """Our pinned memory against what the runtime allocates pinned, fresh memory both."""
    began_s = time.monotonic()
    with PinnedArena(size_gib * GIB, 2 * MIB, threads=16) as arena:
        arena.wait_ready(size_gib * GIB, 300.0)
        ours = size_gib / (time.monotonic() - began_s)
        how = arena.how
    began_s = time.monotonic()
    theirs_memory = torch.empty(size_gib * GIB, dtype=torch.uint8, pin_memory=True)
    theirs = size_gib / (time.monotonic() - began_s)
    del theirs_memory
    settings = {"gib": size_gib, "gib_per_s": ours, "runtime_gib_per_s": theirs, "how": how}
    return Figure("pin_rate", ours / theirs, "ratio", (ours / theirs,), settings)


def serve_while_pinning(loaded: LoadedModel, host_gib: int) -> Figure:
    """From a loaded model to the first token, with a host pool of that size."""
    settings = EngineSettings(device_tokens=65_536, host_bytes=host_gib * GIB, block_tokens=16)
    began_s = time.monotonic()
    with Engine(loaded, settings) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True))
        first_s = time.monotonic() - began_s
        ready = engine.cache.view.occupancy().host_free
    told = {"host_gib": host_gib, "host_slots_open_then": ready}
    return Figure("serve_while_pinning_s", first_s, "s", (first_s,), told)


def main() -> int:
    """Measures all figures; see `--help`."""
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--rounds", type=int, default=7)
    extra.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    extra.add_argument("--pin-gib", type=int, default=16)
    extra.add_argument("--host-gib", type=int, default=64)
    options = arguments(__doc__ or "", extra).parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device here: nothing was measured", file=sys.stderr)
        return 1
    figures: list[Figure] = []
    if "pin" in options.parts:  # first of all, so that its memory is fresh to the machine
        figures.append(pin_rate(options.pin_gib))
    loaded = llama_8b()
    if "serve" in options.parts:
        figures.append(serve_while_pinning(loaded, options.host_gib))
        torch.cuda.empty_cache()
    decode, copies = Decode(loaded), Copies()
    if "decode" in options.parts:
        figures += [*inflation(decode, copies, options.rounds), launch_delay(copies)]
    if "textbook" in options.parts:
        figures += textbook(decode, copies, options.rounds)
    copies.close()
    return finish(figures, GOALS, options)


if __name__ == "__main__":
    sys.exit(main())
