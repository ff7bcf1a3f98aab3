"""Clients that dribble, pipeline, vanish at the worst moment, or pry into what others cached."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time

import pytest
import raw
from server_rig import serving, until

from forebay.config import BatchSettings
from forebay.engine.settings import EngineSettings
from forebay.server.settings import ApiKey, ServerSettings

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": "abc", "max_tokens": 1500, "ignore_eos": True, "stream": True}
PROMPT = "What two tenants happen to ask, word for word, at some length. " * 8


def kept_alive(path, body, headers=""):
    data = raw.request_bytes(path, json.dumps(body).encode(), headers=headers)
    return data.replace(b"connection: close\r\n", b"", 1)


def ended(served):
    served.until_idle()
    until(lambda: served.server.front._open == 0)
    until(lambda: not served.server.front._exchanges)


# -- pace ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["headers", "body"])
def test_a_client_that_dribbles_is_ended_however_steadily_it_does(serve, part):
    served = serve(ServerSettings(port=0, header_timeout_s=0.4, body_timeout_s=0.4))
    data = raw.request_bytes(COMPLETIONS, json.dumps({"prompt": "a" * 500}).encode())
    head = 0 if part == "headers" else data.index(b"\r\n\r\n") + 4
    with raw.connect(served.port) as connection:
        connection.sendall(data[:head])
        try:
            for at in itertools.count(head):
                assert at < len(data), "it was let go on to the end"
                connection.sendall(data[at : at + 1])
                time.sleep(0.02)
        except OSError:
            pass
    ended(served)


def test_requests_in_one_piece_are_answered_in_order(served):
    asked = [{"prompt": "a" * n, "max_tokens": 1, "ignore_eos": True} for n in (5, 9, 2)]
    data = b"".join(kept_alive(COMPLETIONS, body) for body in asked[:2])
    data += raw.request_bytes(COMPLETIONS, json.dumps(asked[2]).encode())
    answer = raw.exchange_all(served.port, data)
    lengths = [json.loads(body)["usage"]["prompt_tokens"] for body in answer]
    assert lengths == [5, 9, 2]


def test_a_flood_of_requests_in_one_piece_does_not_pile_up(served):
    one = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
    with raw.connect(served.port) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(one * 2000)
        assert raw.read_until(connection, b"200 OK")
        assert raw.ask(served.port, "/health", b"", method="GET")[0] == 200
    until(lambda: not served.server.server_state.connections)


# -- framing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "framing",
    [
        b"content-length: 6\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 6\r\n",
        b"content-length: 6\r\ncontent-length: 6\r\ncontent-length: 60\r\n",
        b"content-length: 6, 6\r\n",
        b"content-length: +6\r\n",
        b"content-length: 0x6\r\n",
        b"content-length: 6\r\n content-length: 60\r\n",
        b"transfer-encoding: xchunked\r\n",
        b"transfer-encoding:\x0bchunked\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
    ],
)
def test_what_one_request_is_cannot_be_read_in_two_ways(served, framing):
    """The second request that would be smuggled in is not answered."""
    smuggled = b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n"
    data = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + framing + b"\r\n0\r\n\r\n" + smuggled
    with raw.connect(served.port) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = raw.read_all(connection)
    assert b'"version"' not in answer
    assert answer.count(b"HTTP/1.1 ") <= 1
    assert b"HTTP/1.1 2" not in answer
    ended(served)


# -- vanishing -----------------------------------------------------------------------------------


def test_a_client_that_resets_between_two_bytes_of_an_event_frees_its_blocks(served):
    with raw.connect(served.port) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(raw.request_bytes(COMPLETIONS, json.dumps(ENDLESS).encode()))
        while b"data: {" not in connection.recv(1):
            if served.server.front.stats.running:
                break
        # Closed with bytes unread: the peer gets a reset instead of an end.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    ended(served)


def test_a_client_that_leaves_in_its_prefill_or_its_load_frees_its_blocks(serve):
    served = serve(
        device_tokens=1024,
        link_bytes_per_s=2e5,
        batch=BatchSettings(max_running=2, step_tokens=32),
    )
    long = {"prompt": "x" * 900, "max_tokens": 1, "ignore_eos": True}
    engine, step = served.engine, served.engine.step
    in_step = threading.Event()

    def slowly():
        in_step.set()
        time.sleep(0.01)
        return step()

    engine.step = slowly
    with raw.connect(served.port) as connection:
        connection.sendall(kept_alive(COMPLETIONS, long))
        until(lambda: served.server.front._open == 1 and in_step.is_set())
    ended(served)
    assert raw.ask(served.port, COMPLETIONS, long)[0] == 200
    # Once it is saved, push it out to the host, and ask for it again over the slow link.
    until(lambda: engine.settled, 30)
    assert raw.ask(served.port, COMPLETIONS, long | {"prompt": "y" * 900})[0] == 200
    until(lambda: engine.settled, 30)
    with raw.connect(served.port) as connection:
        connection.sendall(kept_alive(COMPLETIONS, long))
        until(lambda: engine.busy and engine.cache._flights.load_blocks > 0)
    ended(served)
    assert raw.ask(served.port, COMPLETIONS, long)[0] == 200


# -- tenants -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tiny):
    keys = (ApiKey("red", salt="red"), ApiKey("blue", salt="blue"))
    settings = ServerSettings(port=0, api_keys=keys, operator_key="boss", model_name="mine")
    engine = EngineSettings(device_tokens=4096, host_bytes=1 << 24, block_tokens=16)
    with serving(tiny, settings, engine) as served:
        yield served


def told(served, key, headers="", **fields):
    """All that a tenant is told of a request but how long it took."""
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True} | fields
    headers += f"authorization: Bearer {key}\r\n"
    status, _, answer = raw.ask(served.port, COMPLETIONS, body, headers=headers)
    answer = json.loads(answer)
    usage = answer.get("usage", {}).get("forebay", {})
    kept = {"usage": answer.get("usage"), "error": answer.get("error"), "status": status}
    for name in ("queued_s", "load_wait_s"):
        usage.pop(name, None)
    return kept | {"text": [choice["text"] for choice in answer.get("choices", ())]}


def test_a_stranger_is_told_the_same_whether_another_has_it_cached_or_not(shared):
    before = told(shared, "blue", session="s", no_save=True)
    for _ in range(2):
        assert told(shared, "red", session="s")["status"] == 200
    after = told(shared, "blue", session="s", no_save=True)
    assert after == before
    sources = after["usage"]["forebay"]["tokens_by_source"]
    assert (sources["device"], sources["host"]) == (0, 0)
    assert after["usage"]["forebay"]["prefetched_bytes"] == 0
    # Red itself finds it, so there was something to tell.
    assert told(shared, "red")["usage"]["forebay"]["tokens_by_source"]["device"] > 0


@pytest.mark.parametrize(
    "claim",
    [
        {"headers": "x-forebay-cache-salt: red\r\n"},
        {"headers": "X-Forebay-Cache-Salt: red\r\n", "cache_salt": "red"},
        {"cache_salt": "red"},
        {"cache_salt": '", "red'},
        {"cache_salt": '["red", ""]'},
        {"user": "red", "session": "s"},
        {"headers": "x-forebay-session: s\r\n"},
    ],
)
def test_no_claim_leads_into_anothers_cache(shared, claim):
    assert told(shared, "red", session="s")["status"] == 200
    answer = told(shared, "blue", no_save=True, **claim)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_tenant_sees_neither_metrics_nor_mode(shared):
    for path in ("/metrics", "/v1/forebay/mode"):
        for key in ("red", "", "boss2"):
            headers = f"authorization: Bearer {key}\r\n"
            assert raw.ask(shared.port, path, b"", method="GET", headers=headers)[0] == 401
