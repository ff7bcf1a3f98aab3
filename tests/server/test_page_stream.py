"""The live page's stream and trace over HTTP: rights, bounds, and what a page that stays costs."""

from __future__ import annotations

import itertools
import json

import pytest
import raw
from page_rig import LIVE, WORDS, Watching, load
from server_rig import serving, until

from forebay.config import BatchSettings
from forebay.engine.settings import EngineSettings
from forebay.server.settings import ApiKey, ServerSettings

KEYS = (ApiKey("red", salt="red"), ApiKey("blue", salt="blue"), ApiKey("free"))
TRACE = "/v1/forebay/trace"


def bearer(key):
    return f"authorization: Bearer {key}\r\n"


def get(served, path, headers=""):
    return raw.ask(served.port, path, b"", method="GET", headers=headers)


@pytest.fixture(scope="module")
def guarded(tiny):
    settings = ServerSettings(port=0, api_keys=KEYS, operator_key="boss", model_name="mine")
    engine = EngineSettings(device_tokens=1024, host_bytes=1 << 22, block_tokens=16)
    with serving(tiny, settings, engine) as served:
        yield served


def live(served):
    return served.server.front.live


# -- the page's files ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page/page.js", "text/javascript; charset=utf-8"),
        ("/page/page.css", "text/css; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
    ],
)
def test_the_page_is_locked_up(guarded, path, kind):
    status, headers, body = get(guarded, path)
    assert (status, headers["content-type"]) == (200, kind)
    assert body
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"


def test_nothing_of_the_page_stands_in_its_markup_or_comes_from_elsewhere(served):
    _, _, body = get(served, "/")
    page = body.decode()
    assert "<style" not in page
    assert " style=" not in page
    assert "javascript:" not in page
    assert page.count("<script") == page.count('<script type="module" src="/page/page.js">')
    assert "://" not in page


@pytest.mark.parametrize(
    "path", ["/page/nothing.js", "/page/__init__.py", "/page/..%2f..%2fapp.py", "/page/", "/pages"]
)
def test_there_are_no_other_files(served, path):
    assert get(served, path)[0] == 404


# -- what is told ----------------------------------------------------------------------------------


def test_an_operator_is_told_everything_but_no_text(serve):
    served = serve(device_tokens=1024, batch=BatchSettings(max_running=2, step_tokens=64))
    with Watching(served.port) as page, load(served, users=6):
        name, hello = page.event()
        assert (name, hello["role"], hello["model"]) == ("hello", "operator", "tiny")
        assert [choice["mode"] for choice in hello["modes"]] == ["b0", "b1", "b3", "b4"]
        states = [page.state()]
        while not (states[-1]["requests"] and states[-1]["totals"]["steps"] > 20):
            states.append(page.state())
        waiting = [r for state in states for r in state["requests"] if r["place"]]
        while not waiting:
            states.append(page.state())
            waiting = [r for r in states[-1]["requests"] if r["place"]]
        assert {r["doing"] for r in waiting} <= {"load", "compute", "room", "turn"}
    told = json.dumps(states)
    assert not any(word in told for word in WORDS.split())
    for state in states:
        device, host = state["device"], state["host"]
        uses = ("leased", "prefetched", "idle", "free", "quarantined")
        assert sum(device[use] for use in uses) == device["slots"]
        assert all(device[use] >= 0 for use in uses)
        inside = ("loading", "dirty", "saving", "clean", "free", "quarantined")
        assert sum(device[state] for state in inside) == device["slots"]
        assert host["used"] + host["saving"] + host["free"] + host["quarantined"] == host["slots"]
    assert {"used", "late", "wasted", "cancelled", "refused", "failed"} == set(
        states[-1]["totals"]["prefetch_bytes"]
    )
    assert sum(sum(state["lanes"]["decode"]) for state in states) > 0
    assert all(len(set(map(len, lists(state["lanes"])))) == 1 for state in states)


def lists(lanes):
    return [value for value in lanes.values() if isinstance(value, list)]


def test_the_tree_is_what_is_cached(serve):
    served = serve()
    client = served.client()
    for tail in ("one", "two"):
        prompt = f"{WORDS}, a beginning that both have. " * 4 + tail * 40
        client.completions.create(model="tiny", prompt=prompt, max_tokens=4)
    served.until_idle()
    with Watching(served.port) as page:
        tree = page.state()["tree"]
    assert tree["exact"]
    assert tree["total"] == len(served.engine.cache._store.directory)
    assert tree["total"] == sum(tree["blocks"])
    assert tree["parent"].count(-1) == 1
    assert len(tree["parent"]) == 3, "one front and two ends"
    for at, parent in enumerate(tree["parent"]):
        assert parent < at
        places = [tree[place][at] for place in ("device", "both", "loading", "host")]
        assert sum(places) == pytest.approx(100, abs=2)
    below = sum(w for w, parent in zip(tree["weight"], tree["parent"], strict=True) if parent == 0)
    assert tree["weight"][0] == tree["blocks"][0] + below == tree["total"]


# -- rights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "status"), [(None, 401), ("wrong", 401), ("free", 403), ("red", 200), ("boss", 200)]
)
def test_who_may_watch(guarded, key, status):
    with Watching(guarded.port, "" if key is None else bearer(key)) as page:
        assert page.status == status


@pytest.mark.parametrize(
    ("key", "status"), [(None, 401), ("red", 401), ("free", 401), ("boss", 200)]
)
def test_the_trace_is_for_operators(guarded, key, status):
    assert get(guarded, TRACE, "" if key is None else bearer(key))[0] == status


def test_a_server_that_the_net_reaches_shows_nothing_without_keys(serve):
    served = serve(ServerSettings(port=0, host="0.0.0.0"))
    assert get(served, LIVE)[0] == 403
    assert get(served, TRACE)[0] == 403
    served = serve(ServerSettings(port=0, api_keys=(ApiKey("red", salt="red"),)))
    assert get(served, LIVE)[0] == 403, "a server with tenants has no operators without a key"


def test_a_tenant_is_told_its_own_and_cannot_tell_what_others_do(guarded):
    def seen(key, looks=6):
        with Watching(guarded.port, bearer(key)) as page:
            name, hello = page.event()
            assert name == "hello"
            states = [page.state() for _ in range(looks)]
        return hello, states

    def complete(key, text, salt=None):
        extra = {"session": f"{key}-session", "cache_salt": salt}
        guarded.client(key).completions.create(
            model="mine", prompt=text * 8, max_tokens=4, extra_body=extra
        )

    complete("red", "the prompt that both of them have. ")
    guarded.until_idle()
    _, before = seen("red")
    complete("blue", "the prompt that both of them have. ")
    complete("blue", "and one more that only blue has. ")
    complete("free", "another. ", salt="red")
    guarded.until_idle()
    with load(guarded, users=3, key="blue", session="blue"):
        hello, during = seen("red")
    assert hello["role"] == "tenant"
    assert hello["modes"] == []
    for state in before + during:
        assert set(state) <= {"now_s", "requests", "tree"}
        assert state["requests"] == []
    trees = [[s["tree"]["total"] for s in states if "tree" in s] for states in (before, during)]
    assert trees[0][-1] == trees[1][-1] > 0
    with (
        load(guarded, users=2, key="red", session="mine"),
        Watching(guarded.port, bearer("red")) as page,
    ):
        requests = []
        while not requests:
            requests = page.state()["requests"]
        assert all(request["session"].startswith("mine-") for request in requests)
    complete("red", "a salt of its own within the tenant's. ", salt="x")
    guarded.until_idle()
    _, after = seen("red")
    own = [s["tree"]["total"] for s in after if "tree" in s][-1]
    assert own > trees[0][-1], "all that is cached under the tenant's salts"


# -- what it costs ---------------------------------------------------------------------------------


def test_nobody_watching_asks_nothing_of_the_engine(served):
    asked = []
    look = served._thread._look
    served._thread._look = lambda *args: (asked.append(1), look(*args))[1]
    try:
        with Watching(served.port) as page:
            page.state()
            page.state()
        until(lambda: live(served)._pump is None)
        assert not live(served)._watchers
        before = len(asked)
        assert before >= 2
        served.client().completions.create(model="tiny", prompt="a", max_tokens=8)
        assert len(asked) == before
    finally:
        del served._thread._look


def test_watchers_have_a_bound_and_make_room_when_they_leave(serve):
    served = serve(ServerSettings(port=0, max_watchers=2))
    with Watching(served.port) as first, Watching(served.port) as second:
        first.state()
        second.state()
        status, headers, body = get(served, LIVE)
        assert status == 429
        assert int(headers["retry-after"]) > 0
        assert "max_watchers" in json.loads(body)["error"]["message"]
    until(lambda: not live(served)._watchers)
    with Watching(served.port) as third:
        third.state()


def test_pages_of_one_viewer_share_looks_and_viewers_take_turns(guarded):
    asked = []
    look = guarded._thread._look
    guarded._thread._look = lambda at, then: (asked.append(at.keywords["tenant"]), look(at, then))[
        1
    ]
    try:
        with (
            Watching(guarded.port, bearer("red")) as red,
            Watching(guarded.port, bearer("boss")) as boss,
            Watching(guarded.port, bearer("boss")) as other,
        ):
            for page in (red, boss, other) * 2:
                page.state()
            until(lambda: len(asked) > 6)
            assert len(live(guarded)._sights) == 2
    finally:
        del guarded._thread._look
    settled = asked[2:]
    assert all(one != other for one, other in itertools.pairwise(settled))


def test_a_page_that_does_not_read_is_not_waited_for_and_keeps_nothing(serve):
    served = serve(device_tokens=1024, batch=BatchSettings(max_running=2, step_tokens=64))
    with Watching(served.port) as deaf, Watching(served.port) as page, load(served, users=3):
        deaf.event()
        for _ in range(12):
            page.state()
        transports = [c.transport for c in served.server.server_state.connections]
        assert max(t.get_write_buffer_size() for t in transports) < 1 << 20
        assert all(not isinstance(w.sight.newest, list) for w in live(served)._watchers)


# -- the end ---------------------------------------------------------------------------------------


def test_a_server_that_ends_ends_its_pages(serve):
    served = serve(ServerSettings(port=0, drain_s=60))
    with Watching(served.port) as page:
        page.state()
        served.server.should_exit = True
        name = "state"
        while name == "state":
            name, _ = page.event()
        assert name == "end"
        assert page.socket.recv(100) in (b"", b"0\r\n\r\n")
    served.thread.join(20)
    assert not served.thread.is_alive(), "an open page does not hold the drain up"


def test_a_dead_engine_ends_its_pages(serve):
    served = serve()

    def fail():
        raise ValueError("a fault of the machine")

    with Watching(served.port) as page:
        page.state()
        served.engine.step = fail
        body = {"prompt": "a", "max_tokens": 4}
        assert raw.ask(served.port, "/v1/completions", body)[0] == 503
        name = "state"
        while name == "state":
            name, _ = page.event()
        assert name == "end"
    assert get(served, LIVE)[0] == 503


def test_a_look_that_fails_costs_the_engine_nothing(serve):
    served = serve()
    with Watching(served.port) as page:
        page.state()
        view = served.engine.view

        failed = []

        def fail(*_):
            failed.append(1)
            raise ValueError("a fault of the look")

        view.requests = fail
        until(lambda: failed)
        del view.requests
        page.state()
        page.state()
    answer = served.client().completions.create(model="tiny", prompt="a", max_tokens=2)
    assert answer.usage.completion_tokens == 2


# -- the trace -------------------------------------------------------------------------------------


def test_the_trace_holds_steps_copies_and_requests(serve):
    served = serve(device_tokens=512, batch=BatchSettings(max_running=2, step_tokens=64))
    with load(served, users=4):
        until(lambda: served.server.front.stats.cache.loaded_bytes > 0, 30)
        status, headers, body = get(served, TRACE)
    assert status == 200
    assert "attachment" in headers["content-disposition"]
    trace = json.loads(body)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in spans} >= {"step", "copy", "request"}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    threads = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in spans} <= threads
    assert "penstock" not in body.decode()
