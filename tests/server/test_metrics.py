"""/metrics: a valid exposition with fixed labels, whatever was served."""

from __future__ import annotations

import json
import math
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import raw
from prometheus_client.parser import text_string_to_metric_families as parse_text
from server_rig import until

from forebay.config import BatchSettings
from forebay.core.ledger import MissReason, PrefetchOutcome, Source
from forebay.core.modes import Mode
from forebay.errors import QueueFullError
from forebay.server.settings import ServerSettings
from forebay.server.state import State

BODY = {"prompt": "A prompt of some length, so that it has whole blocks. " * 3, "max_tokens": 4}
LABELS = {
    "model_name": {"tiny"},
    "finished_reason": {"stop", "length", "abort", "error"},
    "source": {source.value for source in Source},
    "reason": {reason.value for reason in MissReason},
    "outcome": {outcome.value for outcome in PrefetchOutcome},
    "direction": {"load", "save"},
    "tier": {"device", "host"},
    "mode": {mode.value for mode in Mode},
}


def scrape(served, accept=""):
    headers = f"accept: {accept}\r\n" if accept else ""
    status, answered, body = raw.ask(served.port, "/metrics", b"", method="GET", headers=headers)
    assert status == 200
    return answered["content-type"], body.decode()


def families(served):
    return {family.name: family for family in parse_text(scrape(served)[1])}


def value(served, name, **labels):
    (found,) = [
        sample.value
        for family in families(served).values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return found


def test_the_text_form_is_valid_and_says_what_it_is(served):
    kind, body = scrape(served)
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    found = list(parse_text(body))
    assert all(family.documentation for family in found)
    assert len({family.name for family in found}) == len(found)


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.6,*/*;q=0.1",
        "application/json",
    ],
)
def test_names_keep_their_colons_whatever_form_is_asked_for(served, accept):
    kind, body = scrape(served, accept)
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    assert {f.name for f in parse_text(body)} >= {"forebay:slots", "vllm:prompt_tokens"}


def test_counters_end_in_total_and_units_are_in_names(served):
    for name, family in families(served).items():
        if family.type == "counter":
            assert all(sample.name.endswith(("_total", "_created")) for sample in family.samples)
        if name.startswith(("vllm:", "forebay:")) and not name.endswith("_created"):
            assert re.fullmatch(r"(vllm|forebay):[a-z0-9]+(_[a-z0-9]+)*", name)
            assert not re.search(r"_(ms|us|kb|mb|minutes)\b", name)


def test_buckets_span_what_is_measured(served):
    for family in families(served).values():
        if family.type != "histogram":
            continue
        bounds = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
        assert bounds == sorted(set(bounds))
        assert math.isinf(bounds[-1])
        assert 10 <= len(bounds) <= 25


def test_labels_are_the_same_whatever_was_asked(served):
    def series():
        return {
            (sample.name, *sorted(sample.labels.items()))
            for family in families(served).values()
            for sample in family.samples
        }

    before = series()
    for number in range(20):
        extra = {"session": f"s{number}", "cache_salt": f"t{number}", "model": "tiny"}
        status, _, answer = raw.ask(served.port, "/v1/completions", BODY | extra)
        assert status == 200, answer
    assert raw.ask(served.port, "/v1/completions", BODY | {"model": "made up"})[0] == 404
    served.until_idle()
    assert series() == before
    for name, *labels in before:
        for label, text in labels:
            if label in LABELS:
                assert text in LABELS[label], name
            else:
                assert label in {"le", "version", "state"}, name


def test_tokens_are_counted_as_they_come(served):
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    before = [value(served, name) for name in names]
    endless = {"prompt": "abc", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with raw.connect(served.port) as socket:
        socket.sendall(raw.request_bytes("/v1/completions", json.dumps(endless).encode()))
        raw.read_until(socket, b"data: ")
        until(lambda: value(served, names[1]) > before[1] + 5)
        assert value(served, names[0]) > before[0]
        assert value(served, "vllm:num_requests_running") == 1
    served.until_idle()
    until(lambda: value(served, "vllm:request_success_total", finished_reason="abort") > 0)


def test_slots_add_up(served):
    for tier, count in (("device", 4096 // 16), ("host", None)):
        slots = [
            sample.value
            for sample in families(served)["forebay:slots"].samples
            if sample.labels["tier"] == tier
        ]
        assert min(slots) >= 0
        assert count is None or sum(slots) == count
    assert value(served, "forebay:block_bytes") == served.engine.pool.geometry.block_bytes


def test_every_refusal_is_counted_whoever_refuses(serve):
    served = serve(batch=BatchSettings(max_running=1, max_waiting=2, step_tokens=64))
    body = BODY | {"max_tokens": 40, "ignore_eos": True}
    with ThreadPoolExecutor(16) as pool:
        statuses = list(
            pool.map(lambda _: raw.ask(served.port, "/v1/completions", body)[0], range(16))
        )
    refused = statuses.count(429)
    assert refused >= 1
    assert value(served, "forebay:requests_refused_total") == refused
    submit = served.engine.submit

    def full(*_, **__):
        raise QueueFullError("full")

    served.engine.submit = full
    try:
        assert raw.ask(served.port, "/v1/completions", BODY)[0] == 429
    finally:
        served.engine.submit = submit
    assert value(served, "forebay:requests_refused_total") == refused + 1


def test_the_state_is_told_also_of_a_dead_engine(serve):
    served = serve()

    def states():
        return {s.labels["state"]: s.value for s in families(served)["forebay:state"].samples}

    assert states() == {state.value: float(state is State.SERVING) for state in State}

    def fail():
        raise ValueError("a fault of the machine")

    served.engine.step = fail
    assert raw.ask(served.port, "/v1/completions", BODY)[0] == 503
    until(lambda: states()[State.DEAD.value] == 1)
    assert sum(states().values()) == 1


def test_the_mode_and_the_process_are_told(served):
    modes = {s.labels["mode"]: s.value for s in families(served)["forebay:mode"].samples}
    assert modes == {mode.value: float(mode is Mode.LOOK_AHEAD) for mode in Mode}
    found = families(served)
    for name in ("process_resident_memory_bytes", "process_open_fds", "process_max_fds"):
        assert found[name].samples[0].value > 0
    (info,) = found["forebay:build_info"].samples
    assert info.labels["version"]


@pytest.mark.parametrize(
    "path", ["/metrics/", "//metrics", "/metrics%2f", "/METRICS", "/./metrics"]
)
def test_no_other_spelling_gets_round_the_key(serve, path):
    served = serve(ServerSettings(port=0, operator_key="boss"))
    status, _, body = raw.ask(served.port, path, b"", method="GET")
    assert status in (307, 401, 404)
    assert b"vllm:" not in body
    assert b"forebay:" not in body
