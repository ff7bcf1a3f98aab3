"""What the scheduler half decides under load, in vLLM's real scheduler on a virtual clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

from vllm.v1.request import RequestStatus
from vllm_sim import BLOCK_BYTES, BLOCK_TOKENS, Reply, SimEngine

from forebay.cache.saves import Saves
from forebay.core.block_ids import BlockIds
from forebay.core.ledger import MissReason, Source
from forebay.core.rates import Rates
from forebay.transfer.messages import Direction
from forebay.vllm.scheduler.lately import Lately
from forebay.vllm.scheduler.lookups import Lookups
from forebay.vllm.scheduler.near import NearLoads


def engine(folder: Path, **options: Any) -> SimEngine:
    extra = {"host_bytes": options.pop("host_bytes", "48GiB"), **options.pop("extra", {})}
    connector = {
        "kv_connector": "ForebayConnector",
        "kv_connector_module_path": "forebay.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return SimEngine(folder, connector=connector, **options)


def saved(sim: SimEngine, prompts: list[list[int]]) -> None:
    """All prompts are in host memory, and nothing is on the device."""
    for prompt in prompts:
        sim.ask(prompt, 1)
        sim.run()
    sim.settle()


def loaded(sim: SimEngine) -> int:
    return sim.link.moved_blocks[Direction.LOAD]


def backlog(sim: SimEngine, *, users: int, turns: int, context: int, answer: int) -> list[Reply]:
    """Each user asks again when the answer came. Returns the replies of the last turn."""
    last: list[Reply] = []

    def ask(said: list[int], turn: int) -> None:
        prompt = said + sim.some(256)

        def then(reply: Reply) -> None:
            if turn == turns:
                last.append(reply)
            else:
                ask(prompt + reply.tokens, turn + 1)

        sim.ask(prompt, answer, then=then)

    for _ in range(users):
        ask(sim.some(context), 1)
    sim.run()
    return last


# The tier promotes what waits, evicts what it has just promoted, and goes on so.
def test_pitfall_03_what_is_loaded_under_pressure_is_used(tmp_path: Path):
    sim = engine(tmp_path, blocks=1000)
    prompts = [sim.some(2000) for _ in range(40)]
    saved(sim, prompts)
    before = loaded(sim)
    replies = [sim.ask(prompt, 32) for prompt in prompts]
    sim.run()
    assert all(len(reply.tokens) == 32 for reply in replies)
    misses = sim.half.stats().misses
    asked = sum(reply.request.num_prompt_tokens // BLOCK_TOKENS for reply in replies)
    given_up = misses[MissReason.SHORT] + misses[MissReason.LATE] + misses[MissReason.FAILED]
    assert given_up <= 0.01 * asked
    assert loaded(sim) - before <= 1.1 * (asked - given_up)


# A convoy behind one load that all share.
def test_pitfall_07_a_shared_prefix_loads_once_and_all_go(tmp_path: Path):
    sim = engine(tmp_path, most_running=64)
    prefix = sim.some(10_240)
    saved(sim, [prefix])
    before = loaded(sim)
    replies = [sim.ask(prefix + sim.some(128), 4) for _ in range(50)]
    sim.run()
    assert loaded(sim) - before == 640
    first = sorted(reply.first_s for reply in replies)
    assert first[-1] - first[0] <= 0.1 * replies[0].ttft_s


# Nothing is prefetched while those that run use all slots and all of the budget.
def test_pitfall_01_a_backlog_costs_no_more_than_a_pool_that_holds_all(tmp_path: Path):
    load = {"users": 24, "turns": 3, "context": 4096, "answer": 32}
    small = engine(tmp_path, blocks=3600)
    ours = backlog(small, **load)
    large = backlog(SimEngine(tmp_path, blocks=9000), **load)
    stats = small.half.stats()
    assert stats.sources[Source.HOST] > 24 * 256
    assert stats.misses[MissReason.LATE] == 0
    # Of a path of which little was given up, that is computed.
    assert stats.misses[MissReason.SHORT] <= 48 * 3
    slowest = max(reply.ttft_s for reply in ours)
    assert slowest <= 1.1 * max(reply.ttft_s for reply in large)


# A queue of free blocks that is LRU gives up first what a closed loop of users asks for next.
@pytest.mark.parametrize("rule", ["kept", "broken"])
def test_users_that_come_back_at_once_find_a_part_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
):
    if rule == "broken":
        monkeypatch.setattr(Lately, "ended", lambda *_: None)
    sim = engine(tmp_path, blocks=3600)
    last = backlog(sim, users=24, turns=3, context=4096, answer=32)
    sources = sim.half.stats().sources
    used = sources[Source.HOST] + sources[Source.DEVICE]
    # Nothing is loaded twice for one turn.
    assert loaded(sim) <= 1.1 * sources[Source.HOST]
    assert (loaded(sim) <= 0.93 * used) == (rule == "kept")
    assert max(reply.ttft_s for reply in last) <= 0.8


# Host memory full of what nobody wants must not end saving.
def test_pitfall_03_saves_go_on_when_host_memory_is_full(tmp_path: Path):
    sim = engine(tmp_path, blocks=1000, host_bytes="4GiB")
    for _ in range(5):
        sim.ask(sim.some(8000), 1)
        sim.run()
    prompt = sim.some(4000)
    saved(sim, [prompt])
    sim.ask(prompt, 1)
    sim.run()
    assert sim.half.stats().sources[Source.HOST] > 0


@pytest.mark.parametrize("rule", ["kept", "broken"])
def test_pitfall_03_all_that_was_computed_last_is_saved_when_host_memory_is_full(
    tmp_path: Path, rule: str, monkeypatch: pytest.MonkeyPatch
):
    """Also a part at a time, where what is older was loaded, and given up in any order."""
    if rule == "broken":
        monkeypatch.setattr("forebay.core.host_room._TRIES", 1)
        monkeypatch.setattr(BlockIds, "leaf_first", lambda self, ids: ids)
    monkeypatch.setattr(Saves, "_room", lambda self: 64 - self._flights.save_blocks)
    sim = engine(tmp_path, blocks=600, most_running=32, host_bytes="2GiB")
    older = [sim.some(2000) for _ in range(9)]
    for prompt in 3 * older:
        sim.ask(prompt, 4)
        if prompt is older[-1]:
            sim.run()
    found: list[int] = []
    for _ in range(4):
        prompt = sim.some(3200)
        saved(sim, [prompt])
        before = sim.half.stats().sources[Source.HOST]
        sim.ask(prompt, 1)
        sim.run()
        found.append(sim.half.stats().sources[Source.HOST] - before)
        sim.settle()
    assert (found == 4 * [200]) == (rule == "kept")


@pytest.mark.parametrize("blocks", [1000, 2500])
def test_what_is_given_up_was_saved_before(tmp_path: Path, blocks: int):
    """Also where nearly all of the pool is in use, and what ends is given up at once."""
    sim = engine(tmp_path, blocks=blocks, extra={"save_mode": "on_evict"})
    backlog(sim, users=24, turns=3, context=1200, answer=64)
    counted = sim.half.stats()
    assert counted.evicted_blocks > 0
    assert counted.dropped_dirty_blocks == 0


def test_nothing_is_saved_over_and_over_where_host_memory_is_full(tmp_path: Path):
    sim = engine(tmp_path, blocks=1000, host_bytes="2GiB", extra={"save_mode": "on_evict"})
    backlog(sim, users=24, turns=3, context=1200, answer=64)
    computed = sim.half._store.counters.allocated - loaded(sim)
    assert 0 < sim.link.moved_blocks[Direction.SAVE] <= computed


def test_a_hit_on_an_idle_engine_starts_with_the_first_step(tmp_path: Path):
    sim = engine(tmp_path)
    prompt = sim.some(16_000)
    saved(sim, [prompt])
    steps = sim.steps
    reply = sim.ask(prompt, 1)
    sim.run(lambda: sim.steps == steps + 1)
    assert sim.half._flights.load_blocks == 1000
    sim.run()
    assert len(reply.tokens) == 1


@pytest.mark.parametrize(("beside", "pieces"), [(False, [128] * 7 + [104]), (True, [1000])])
def test_a_load_goes_in_pieces_where_the_engine_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool, pieces: list[int]
):
    sim = engine(tmp_path)
    prompt = sim.some(16_000)
    saved(sim, [prompt])
    sizes: list[int] = []
    submit = sim.worker.submit

    def seen(transfers: list[Any]) -> None:
        sizes.extend(len(each.sources) for each in transfers if each.direction is Direction.LOAD)
        submit(transfers)

    monkeypatch.setattr(sim.worker, "submit", seen)
    if beside:
        runs = sim.ask(sim.some(100), 200)
        sim.run(lambda: bool(runs.tokens))
    reply = sim.ask(prompt, 1)
    sim.run()
    assert len(reply.tokens) == 1
    assert sizes == pieces


def test_a_step_is_timed_by_its_own_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """vLLM steps without work while copies run, and drops what such steps have to say. One that is
    held until loads have landed is not timed.
    """
    timed: list[tuple[int, int, float]] = []
    stepped = Rates.stepped

    def note(self: Rates, prefill: int, decode: int, took_s: float) -> None:
        timed.append((prefill, decode, took_s))
        stepped(self, prefill, decode, took_s)

    monkeypatch.setattr(Rates, "stepped", note)
    sim = engine(tmp_path)
    prompt = sim.some(16_000)
    saved(sim, [prompt])
    sim.ask(prompt, 4)
    sim.run()
    assert [each[:2] for each in timed] == [(8192, 0), (7808, 0), *[(0, 1)] * 3]
    durations = [*sim.durations[:2], *sim.durations[3:]]
    assert [each[2] for each in timed] == pytest.approx(durations, rel=0.25)


@pytest.mark.parametrize("rule", ["kept", "broken"])
@pytest.mark.parametrize("tokens", [1024, 16_384, 32_768])
def test_a_hit_on_an_idle_engine_costs_its_copy_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, rule: str
):
    """vLLM schedules it, and sleeps, while the last of it lands."""
    if rule == "broken":
        monkeypatch.setattr(NearLoads, "approach", lambda *_: None)
    sim = engine(tmp_path)
    prompt = sim.some(tokens)
    saved(sim, [prompt])
    # The link's rate is known then.
    sim.ask(prompt, 1)
    sim.settle()
    before = loaded(sim)
    hit = sim.ask(prompt, 1)
    sim.run()
    there = sim.ask(prompt, 1)
    sim.run()
    copied_s = (loaded(sim) - before) * BLOCK_BYTES / sim.machine.link_bytes_per_s
    more_s = hit.ttft_s - there.ttft_s - copied_s
    # One sleep of vLLM's, one step without work, and the scheduling of each.
    assert more_s < 0.1e-3 if rule == "kept" else 1e-3 < more_s < 4e-3


def test_a_request_that_waits_for_its_load_is_not_looked_up_at_each_step(tmp_path: Path):
    sim = engine(tmp_path)
    prompt = sim.some(16_000)
    saved(sim, [prompt])
    coordinator = sim.scheduler.kv_cache_manager.coordinator
    find, found = coordinator.find_longest_cache_hit, list[int]()

    def counted(hashes: Any, most: int) -> Any:
        hit = find(hashes, most)
        found.append(hit[1])
        return hit

    coordinator.find_longest_cache_hit = counted
    steps = sim.steps
    reply = sim.ask(prompt, 1)
    sim.run()
    assert sim.steps - steps > 10
    assert found == [0, 16_000 - BLOCK_TOKENS]
    assert not reply.request.skip_reading_prefix_cache


def test_a_hints_own_token_lets_its_session_have_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Or it would be a step later in any case.
    monkeypatch.setattr(Lookups, "step_over", lambda self: self._put_off.clear())
    sim = engine(tmp_path)
    prompt = sim.some(16_005)
    saved(sim, [prompt])
    hint = sim.ask(prompt, 1, params={"forebay": {"hint": {"eta_s": 0.1}}})
    session = sim.ask(prompt, 8, at_s=sim.now_s + 0.1)
    admitted, before = sim.half.admitted, list[int]()

    def noted(request: Any, block: int | None) -> None:
        if request is hint.request:
            before.append(len(session.tokens))
        admitted(request, block)

    sim.half.admitted = noted
    sim.run()
    assert before == [8]
    assert (len(hint.tokens), len(session.tokens)) == (1, 8)


def test_a_hints_own_token_does_not_wait_for_a_session_that_left(tmp_path: Path):
    sim = engine(tmp_path)
    prompt = sim.some(16_005)
    saved(sim, [prompt])
    hint = sim.ask(prompt, 1, params={"forebay": {"hint": {"eta_s": 0.1}}})
    session = sim.ask(prompt, 8, at_s=sim.now_s + 0.1)
    sim.run(lambda: session.request.num_computed_tokens > 0)
    sim.scheduler.finish_requests(session.request.request_id, RequestStatus.FINISHED_ABORTED)
    sim.run()
    assert len(hint.tokens) == 1
    assert hint.ttft_s < 1.3


def test_a_hint_that_finds_no_room_leaves_an_idle_engine_idle(tmp_path: Path):
    sim = engine(tmp_path, blocks=1000, extra={"hint_share": 1.0, "prefetch_share": 0.3})
    prompt = sim.some(9600)
    saved(sim, [prompt])
    steps = sim.steps
    reply = sim.ask(prompt, 1, params={"forebay": {"hint": {"eta_s": 5.0}}})
    sim.run(lambda: bool(reply.tokens))
    # Some of it was brought, and there is no more to wait for.
    assert loaded(sim) == 299
    assert sim.steps - steps < 100
    sim.run()


def test_what_was_prefetched_and_given_up_unread_is_not_used_by_what_takes_its_id(tmp_path: Path):
    sim = engine(tmp_path, blocks=300, host_bytes=320 * BLOCK_BYTES)
    prompt = sim.some(1600)
    saved(sim, [prompt])
    sim.ask(prompt, 1, params={"forebay": {"hint": {"eta_s": 0.0, "expiry_s": 0.02}}})
    sim.run()
    prefetched = sim.half._ledger.planned_bytes
    assert prefetched >= 50 * BLOCK_BYTES
    for _ in range(6):
        other = sim.some(4000)
        for _ in range(2):
            sim.ask(other, 1)
            sim.run()
    assert sim.half._ledger.planned_bytes == prefetched
    outcomes = sim.half.stats().prefetch_bytes
    assert (outcomes["used"], outcomes["late"]) == (0, 0)
