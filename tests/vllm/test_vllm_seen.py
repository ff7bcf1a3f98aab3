"""What operators and clients see of the connector: the off switch, events, metrics, answers."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm_toy import (
    BLOCK_TOKENS,
    MakeEngine,
    ToyEngine,
    assert_nothing_left,
    prompt_of,
    wrong_answers,
)

from forebay.core.ledger import Source
from forebay.core.modes import Mode
from forebay.errors import SettingsError
from forebay.vllm.connector import ForebayConnector
from forebay.vllm.scheduler.control import ModeFile
from forebay.vllm.seen.events import HostEvents, Removed, Stored


def switch(engine: ToyEngine, file: Path, mode: str) -> None:
    file.write_text(mode)
    engine.half._mode_file._next_s = 0.0


def test_the_off_switch_is_a_file(toy: MakeEngine, tmp_path: Path):
    file = tmp_path / "mode"
    engine = toy(mode_file=str(file))
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    saved = engine.half.stats().saved_bytes
    assert saved > 0
    engine.scheduler.reset_prefix_cache()
    switch(engine, file, "b0\n")
    for seed in (1, 2):
        engine.ask(prompt_of(seed, 200), 1)
        engine.run()
    assert engine.half.stats().loaded_bytes == 0
    assert engine.half.stats().saved_bytes == saved
    engine.scheduler.reset_prefix_cache()
    switch(engine, file, "b9")
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    assert engine.half.stats().loaded_bytes == 0, "what is not understood changes nothing"
    engine.scheduler.reset_prefix_cache()
    file.unlink()
    engine.half._mode_file._next_s = 0.0
    engine.ask([5], 1)
    engine.run()
    engine.ask(prompt_of(1, 200), 1)
    engine.run()
    assert engine.half.stats().loaded_bytes > 0
    assert not wrong_answers(engine)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("not there/mode", "is no folder: make it first"),
        ("a file/mode", "is no folder: make it first"),
        (".", "is no ordinary file: name one"),
        ("mode\0", "name another"),
        ("\ud800", "name another"),
        ("m" * 5000, "name another"),
        ("m" * 5000 + "/mode", "name another"),
    ],
)
def test_a_switch_that_could_not_be_looked_at_ends_the_start(tmp_path: Path, path: str, said: str):
    (tmp_path / "a file").touch()
    with pytest.raises(SettingsError, match="mode_file is .*" + re.escape(said)):
        ModeFile(str(tmp_path / path), Mode.LOOK_AHEAD)


def test_events_tell_what_host_memory_has_by_vllms_hashes(toy: MakeEngine):
    engine = toy(kv_events=True)
    asked = engine.ask(prompt_of(1, 200), 1)
    engine.run()
    sent = msgspec.msgpack.encode(KVEventBatch(ts=time.time(), events=list(engine.events)))
    got = msgspec.msgpack.Decoder(KVEventBatch).decode(sent).events
    stored = [each for each in got if isinstance(each, BlockStored)]
    here = {hash_ for each in stored if each.medium == "CPU" for hash_ in each.block_hashes}
    there = {hash_ for each in stored if each.medium == "GPU" for hash_ in each.block_hashes}
    assert here == there == set(map(maybe_convert_block_hash, asked.request.block_hashes))
    parents = {None}
    for each in (each for each in stored if each.medium == "CPU"):
        assert each.parent_block_hash in parents, "ancestors first"
        parents.update(each.block_hashes)
        assert each.block_size == BLOCK_TOKENS
        assert each.kv_cache_spec_kind == "full_attention"
    said = [token for each in stored if each.medium == "CPU" for token in each.token_ids]
    assert said == asked.prompt[:192]
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.ask([5], 1)
    engine.run()
    gone = [each for each in engine.events if isinstance(each, BlockRemoved)]
    assert {h for each in gone if each.medium == "CPU" for h in each.block_hashes} == here


def test_what_host_memory_has_twice_is_gone_with_the_last():
    """In a block that a copy still reads, matched by nobody, and in one that was computed anew."""
    content = {1: b"one", 2: b"two", 3: b"two"}
    events = HostEvents(8, 2, content.__getitem__)
    events.named(np.array([1, 2], np.int32), -1, [1, 2, 3, 4])
    events.named(np.array([3], np.int32), 1, [3, 4])
    for blocks in ([1, 2], [3]):
        events.saved(np.array(blocks, np.int32))
    assert events.take() == [
        Stored([b"one", b"two"], None, [1, 2, 3, 4]),
        Stored([b"two"], b"one", [3, 4]),
    ]
    events.dropped(np.array([2], np.int32))
    assert not events.waiting
    events.dropped(np.array([1, 3], np.int32))
    assert events.take() == [Removed([b"one", b"two"])]


def test_two_salts_never_share(toy: MakeEngine):
    engine = toy()
    for salt, host in (("a", 0), ("b", 0), ("a", 12)):
        engine.ask(prompt_of(1, 200), 1, cache_salt=salt)
        engine.run()
        assert engine.half.stats().sources[Source.HOST] == host
        engine.scheduler.reset_prefix_cache()
    assert not wrong_answers(engine)


@pytest.mark.parametrize(
    ("given", "ignored"),
    [
        ("b0", {"forebay"}),
        ({"mode": "b0"}, {"mode"}),
        ({"no_cache": 1}, {"no_cache"}),
        ({"hint": 3}, {"hint"}),
        ({"hint": {"eta_s": "soon"}}, {"hint.eta_s"}),
        ({"hint": {"eta_s": float("nan")}}, {"hint.eta_s"}),
        ({"hint": {"expiry_s": float("inf")}}, {"hint.expiry_s"}),
        ({"hint": {"eta_s": -1}}, {"hint.eta_s"}),
        ({"hint": {}, "no_cache": True}, {"hint"}),
        ({5: True}, {"5"}),  # from Python a name may be anything
    ],
)
def test_what_is_not_understood_is_named_in_the_answer(
    toy: MakeEngine, given: Any, ignored: set[str]
):
    engine = toy()
    asked = engine.ask(prompt_of(1, 40), 1, params={"forebay": given})
    engine.run()
    assert asked.told is not None
    assert set(asked.told["forebay"]["ignored"]) == ignored
    assert sum(engine.half.books.tally.ignored.values()) == 1
    assert not wrong_answers(engine)
    assert_nothing_left(engine)


def test_tokens_that_a_request_gets_while_it_waits_are_counted_with_its_prompt(toy: MakeEngine):
    """Those of a step that was under way as it was preempted. No counter may go down."""
    engine = toy()
    engine.ask(prompt_of(1, 192), 1)
    engine.run()
    waits = engine.ask(prompt_of(1, 191), 1)
    waits.request.num_preemptions = 1
    waits.request.append_output_token_ids([*prompt_of(1, 192)[191:], 7])
    waits.tokens = list(waits.request.all_token_ids)
    engine.run()
    tokens, misses = engine.half.books.tally.prompt_tokens, engine.half.stats().misses
    assert tokens[Source.DEVICE] == 192
    assert sum(tokens.values()) == 192 + 193
    assert min(misses.values()) == 0
    assert sum(misses.values()) == engine.half.stats().sources[Source.RECOMPUTED] == 12
    assert_nothing_left(engine)


def test_metrics_are_those_of_the_books(toy: MakeEngine):
    engine = toy()
    connector = engine.scheduler.connector
    kinds = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = ForebayConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})
    take = connector.get_kv_connector_stats

    def watched() -> Any:
        stats = take()
        if stats is not None:
            metrics.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(stats.data)))
        return stats

    connector.get_kv_connector_stats = watched
    for _ in range(2):
        engine.ask(prompt_of(1, 200), 1)
        engine.run()
        engine.scheduler.reset_prefix_cache()

    def value(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(name, {"engine": "0", **labels})

    assert value("forebay:slots", tier="host", state="used") == 12
    states = ("used", "prefetched", "idle", "free")
    device = {state: value("forebay:slots", tier="device", state=state) for state in states}
    rest = engine.half.settings.device_slots - 12
    assert device == {"used": 0, "prefetched": 0, "idle": 12, "free": rest}
    assert value("forebay:mode", mode="b4") == 1
    assert value("forebay:block_bytes") == 128
    assert value("forebay:saved_bytes_total") == 12 * 128
    assert value("forebay:prompt_tokens_total", source="host") == 192
    assert value("forebay:misses_total", reason="absent") == 12
    assert value("forebay:request_load_wait_seconds_count") == 2
    assert value("forebay:scheduler_seconds_count") > 2
