"""What the directory costs: matching, memory, whole requests, and giving one leaf up.

Times are CPU time. Keys are 64 bytes, the 16 tokens of a block. Memory is the growth of the
resident set of a process that builds a directory and nothing else.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from forebay._native import EvictionOrder
from forebay.core.device import LeaseKind
from forebay.core.directory import Directory, Session
from forebay.core.store import Store
from forebay.measure.report import Figure, Goal, arguments, finish, median_figure

GOALS = {
    "match_32k_1node_us": Goal(at_most=15),
    "match_32k_64nodes_us": Goal(at_most=100),
    "match_32k_256nodes_us": Goal(at_most=150),
    "match_scaling": Goal(at_most=2.5),
    "directory_requests_per_s": Goal(at_least=20_000),
    "directory_mb_1m_blocks": Goal(at_most=120),
    "directory_mb_1m_blocks_1per_node": Goal(at_most=450),
    "evict_scaling": Goal(at_most=3),
}
KEY_BYTES = 64
BLOCKS_32K = 2048
SYSTEMS, CONVERSATIONS, TURNS = 64, 60, 4
SYSTEM_BLOCKS, TURN_BLOCKS = 25, 65
CACHED_BLOCKS = 200_000
ACTIVE = 600
TENANT = b"tenant"
ROUNDS = 11
EVICTIONS = 40


def random_keys(rng: np.random.Generator, blocks: int) -> bytes:
    """Token ids below 50,000, as 32-bit numbers."""
    return rng.integers(0, 50_000, blocks * KEY_BYTES // 4, dtype=np.int32).tobytes()


def new_ids(directory: Directory, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Ids that were never used, where nothing has been removed."""
    return np.arange(len(directory), len(directory) + count, dtype=np.int32)


def branched_path(nodes: int, blocks: int, *, forgotten: bool = False) -> tuple[Directory, bytes]:
    """A path of `blocks` blocks that branches in `nodes - 1` places, evenly.

    The branches are inserted from the front on, each by way of the ones before; `forgotten` does it
    from the back, so that at every place another branch was the last to be inserted.
    """
    rng = np.random.default_rng(nodes)
    directory = Directory(KEY_BYTES)
    keys = random_keys(rng, blocks)
    directory.insert(TENANT, keys, 0, new_ids(directory, blocks))
    depths = [branch * blocks // nodes for branch in range(1, nodes)]
    for depth in reversed(depths) if forgotten else depths:
        side = keys[: depth * KEY_BYTES] + random_keys(rng, 1)
        directory.insert(TENANT, side, depth, new_ids(directory, 1))
    return directory, keys


def cpu_us(call: Callable[[], object], calls: int) -> float:
    """Microseconds of CPU per call, garbage collection off."""
    gc.disable()
    begin = time.process_time()
    for _ in range(calls):
        call()
    end = time.process_time()
    gc.enable()
    return (end - begin) / calls * 1e6


def match_us(directory: Directory, keys: bytes, session: Session | None = None) -> list[float]:
    """Microseconds of CPU of a match, by round."""
    return [cpu_us(lambda: directory.match(TENANT, keys, session), 200) for _ in range(ROUNDS)]


def match_figures() -> list[Figure]:
    """A fully cached 32,768-token prompt over 1, 64 and 256 runs, and one twice as long."""
    figures: list[Figure] = []
    for nodes, name in ((1, "1node"), (64, "64nodes"), (256, "256nodes")):
        directory, keys = branched_path(nodes, BLOCKS_32K)
        samples = match_us(directory, keys)
        next_turn = keys + random_keys(np.random.default_rng(), 1)
        session = directory.match(TENANT, keys).session
        settings = {
            "blocks": BLOCKS_32K,
            "unbranched_runs": nodes,
            "key_bytes": KEY_BYTES,
            "other_branches_newer_us": statistics.median(
                match_us(*branched_path(nodes, BLOCKS_32K, forgotten=True))
            ),
            "next_turn_by_session_us": statistics.median(match_us(directory, next_turn, session)),
        }
        figures.append(median_figure(f"match_32k_{name}_us", samples, "us", settings))
    short, short_keys = branched_path(1, BLOCKS_32K)
    long, long_keys = branched_path(1, 2 * BLOCKS_32K)
    ratios = [
        cpu_us(lambda: long.match(TENANT, long_keys), 200)
        / cpu_us(lambda: short.match(TENANT, short_keys), 200)
        for _ in range(ROUNDS)
    ]
    settings = {"blocks": [BLOCKS_32K, 2 * BLOCKS_32K], "paired": True}
    return [*figures, median_figure("match_scaling", ratios, "ratio", settings)]


def history(system: int, conversation: int, blocks: int) -> bytes:
    """The keys of a conversation: its system prompt and `blocks` blocks of its own."""
    shared = random_keys(np.random.default_rng(system), SYSTEM_BLOCKS)
    own = np.random.default_rng((system, conversation))
    return shared + random_keys(own, TURNS * TURN_BLOCKS)[: blocks * KEY_BYTES]


def conversations_by_turn() -> Directory:
    """64 system prompts, 60 conversations each, 4 turns; inserted turn by turn: 1M blocks."""
    directory = Directory(KEY_BYTES)
    for turn in range(1, TURNS + 1):
        for conversation in range(CONVERSATIONS):
            for system in range(SYSTEMS):
                keys = history(system, conversation, turn * TURN_BLOCKS)
                found = len(directory.match(TENANT, keys).ids)
                missing = len(keys) // KEY_BYTES - found
                directory.insert(TENANT, keys, found, new_ids(directory, missing))
    return directory


def one_block_per_node() -> Directory:
    """The same, of half the length, and beside every block another that ends there."""
    directory = Directory(KEY_BYTES)
    rng = np.random.default_rng()
    for system in range(SYSTEMS):
        for conversation in range(CONVERSATIONS):
            keys = history(system, conversation, TURNS * TURN_BLOCKS // 2)
            blocks = len(keys) // KEY_BYTES
            found = len(directory.match(TENANT, keys).ids)
            directory.insert(TENANT, keys, found, new_ids(directory, blocks - found))
            for depth in reversed(range(found, blocks)):
                side = keys[: depth * KEY_BYTES] + rng.bytes(KEY_BYTES)
                directory.insert(TENANT, side, depth, new_ids(directory, 1))
    return directory


def resident_bytes() -> int:
    """What of this process is in memory now."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


SHAPES: dict[str, Callable[[], Directory]] = {
    "directory_mb_1m_blocks": conversations_by_turn,
    "directory_mb_1m_blocks_1per_node": one_block_per_node,
}


def weigh(name: str) -> None:
    """In a process of its own: builds one directory; prints the memory it added, and more."""
    branched_path(4, 64)
    collection_us = min(cpu_us(gc.collect, 1) for _ in range(5))
    before = resident_bytes()
    directory = SHAPES[name]()
    gc.collect()
    added = resident_bytes() - before
    collection_us = min(cpu_us(gc.collect, 1) for _ in range(5)) - collection_us
    print(added, len(directory), directory.node_count, collection_us / 1e3)


def memory_figures() -> list[Figure]:
    """Resident memory of a million blocks, their tokens included."""
    figures: list[Figure] = []
    for name in SHAPES:
        words = [sys.executable, __file__, "--weigh", name]
        told = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
        added, blocks, nodes = map(int, told[:3])
        settings = {
            "method": "growth of the resident set, in a process of its own",
            "blocks": blocks,
            "nodes": nodes,
            "added_to_full_collection_ms": round(float(told[3]), 3),
        }
        figures.append(Figure(name, added / 1e6, "MB", (added / 1e6,), settings))
    return figures


def arrivals(rng: random.Random) -> list[tuple[int, int, int]]:
    """(system prompt, conversation, turn) of every request of the mix, in order of arrival."""
    coming = [(system, talk) for system in range(SYSTEMS) for talk in range(CONVERSATIONS)]
    rng.shuffle(coming)
    active: list[tuple[int, int, int]] = []
    order: list[tuple[int, int, int]] = []
    while coming or active:
        while coming and len(active) < ACTIVE:
            active.append((*coming.pop(), 1))
        chosen = rng.randrange(len(active))
        system, talk, turn = active[chosen]
        order.append(active[chosen])
        if turn < TURNS:
            active[chosen] = (system, talk, turn + 1)
        else:
            active.pop(chosen)
    return order


class Mix:
    """Requests of the mix upon what holds a fifth of the blocks they compute.

    600 conversations are under way at a time; the next turn is that of any of them. Each request
    matches its history, leases what is cached, publishes the rest, and releases all. What has to
    make room is lost, since nothing is saved.
    """

    def __init__(self) -> None:
        self.order = arrivals(random.Random(5))
        self.cached = self.asked = self.evicted = 0

    def serve(self, keys: bytes) -> int:
        """One request from its match to its release; the blocks it found."""
        raise TypeError("a mix serves from something: use one of its children")

    def figure(self, name: str) -> Figure:
        """Requests per second of CPU, round by round, from when all room is taken."""
        rates: list[float] = []
        for chosen in np.array_split(np.arange(len(self.order)), 2 * ROUNDS):
            full = self.evicted > 0
            turns = [self.order[index] for index in chosen]
            prompts = [history(system, talk, turn * TURN_BLOCKS) for system, talk, turn in turns]
            begin = time.process_time()
            for keys in prompts:
                self.cached += self.serve(keys)
            if full:
                rates.append(len(prompts) / (time.process_time() - begin))
            self.asked += sum(map(len, prompts)) // KEY_BYTES
        settings = {
            "blocks_computed": self.asked - self.cached,
            "blocks_held": CACHED_BLOCKS,
            "evicted": self.evicted,
            "mean_prompt_blocks": self.asked / len(self.order),
            "cached_share": self.cached / self.asked,
        }
        return median_figure(name, rates, "1/s", settings)


class DirectoryMix(Mix):
    """The directory, the eviction order and leases by block; no slots."""

    def __init__(self) -> None:
        super().__init__()
        blocks = CACHED_BLOCKS + 2 * SYSTEMS * TURNS * TURN_BLOCKS
        self.directory = Directory(KEY_BYTES)
        self.leases = EvictionOrder(blocks, "a lease")
        self.busy = np.zeros(blocks, np.bool_)
        self.free = np.arange(blocks, dtype=np.int32)
        self.free_count = blocks

    def serve(self, keys: bytes) -> int:
        match = self.directory.match(TENANT, keys)
        found = match.ids
        self.leases.hold(found)
        missing = len(keys) // KEY_BYTES - len(found)
        if len(self.directory) + missing > CACHED_BLOCKS:
            self.evict(len(self.directory) + missing - CACHED_BLOCKS)
        self.free_count -= missing
        own = self.free[self.free_count : self.free_count + missing].copy()
        self.leases.hold(own)
        self.directory.insert(TENANT, keys, len(found), own, match.session)
        path = np.concatenate([found, own])
        self.leases.append(self.leases.release(path), 0)
        return len(found)

    def evict(self, count: int) -> None:
        """Give up the `count` blocks that were released longest ago, leaves first."""
        victims = self.leases.pop(count, 0, self.busy)
        removed = self.directory.remove_leaves(victims)
        if np.count_nonzero(removed) < len(victims):
            raise RuntimeError("the eviction order gave up a block before its children")
        self.free[self.free_count : self.free_count + count] = victims
        self.free_count += count
        self.evicted += count


class StoreMix(Mix):
    """The whole store: slots, their states and stamps, and block ids as well."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Store(KEY_BYTES, CACHED_BLOCKS, host_slots=1)

    def serve(self, keys: bytes) -> int:
        store = self.store
        match = store.match(TENANT, keys)
        found = match.ids
        store.touch(found, LeaseKind.HARD)
        own = store.compute(len(keys) // KEY_BYTES - len(found), protected=True)
        if own is None:
            raise RuntimeError("the cache is smaller than one request")
        store.publish(TENANT, keys, len(found), own, match.session)
        store.release(np.concatenate([found, own]), LeaseKind.HARD)
        self.evicted = store.counters.evicted
        return len(found)


def request_figures() -> list[Figure]:
    """Whole requests: through the directory with leases and eviction, and through the store."""
    return [
        DirectoryMix().figure("directory_requests_per_s"),
        StoreMix().figure("store_requests_per_s"),
    ]


def full_of_leaves(leaves: int) -> Store:
    """A store without room, of `leaves` idle blocks that continue the same one, in use."""
    store = Store(KEY_BYTES, leaves + 1, host_slots=1)
    rng = np.random.default_rng(leaves)
    system = random_keys(rng, 1)
    for _ in range(leaves):
        keys = system + random_keys(rng, 1)
        found = store.match(TENANT, keys).ids
        store.touch(found, LeaseKind.HARD)
        own = store.compute(2 - len(found), protected=True)
        if own is None:
            raise RuntimeError("the store is too small for its leaves")
        store.publish(TENANT, keys, len(found), own)
        store.release(own[-1:], LeaseKind.HARD)
    return store


def eviction_figures() -> list[Figure]:
    """One leaf among 50,000 against one among 1,000."""
    many, few = full_of_leaves(50_000), full_of_leaves(1_000)
    ratios = [
        cpu_us(lambda: many.compute(1, protected=True), EVICTIONS)
        / cpu_us(lambda: few.compute(1, protected=True), EVICTIONS)
        for _ in range(ROUNDS)
    ]
    evicted = {many.counters.evicted, few.counters.evicted}
    if evicted != {EVICTIONS * ROUNDS}:
        raise RuntimeError(f"{evicted} blocks were evicted: one call, one eviction was the idea")
    settings = {"leaves": [1_000, 50_000], "evictions": EVICTIONS * ROUNDS, "paired": True}
    return [median_figure("evict_scaling", ratios, "ratio", settings)]


def main() -> int:
    """Measures all figures; see `--help`."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--weigh", choices=list(SHAPES), help="only build this directory")
    options = parser.parse_args()
    if options.weigh:
        weigh(options.weigh)
        return 0
    figures = match_figures() + request_figures() + eviction_figures() + memory_figures()
    return finish(figures, GOALS, json=options.json, strict=options.strict)


if __name__ == "__main__":
    raise SystemExit(main())
