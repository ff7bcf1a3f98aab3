"""Disconnects, full queues, slow clients, the end of the server, and the death of its engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import raw
from server_rig import until

from forebay.config import BatchSettings
from forebay.server.settings import ServerSettings
from forebay.server.state import State
from forebay.transfer.messages import Direction

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": "abc", "max_tokens": 1500, "ignore_eos": True}


def running(served):
    stats = served.server.front.stats
    return stats.running, stats.waiting


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_decoding_frees_its_blocks(served, stream):
    with raw.connect(served.port) as socket:
        body = json.dumps(ENDLESS | {"stream": stream}).encode()
        socket.sendall(raw.request_bytes(COMPLETIONS, body))
        if stream:
            raw.read_until(socket, b"data: ")
        until(lambda: running(served) == (1, 0))
    served.until_idle()
    until(lambda: served.server.front._open == 0)


def test_a_client_that_leaves_while_queued_or_in_its_body_leaves_nothing(serve):
    served = serve(batch=BatchSettings(max_running=1, step_tokens=64))
    with raw.connect(served.port) as first:
        body = json.dumps(ENDLESS | {"stream": True}).encode()
        first.sendall(raw.request_bytes(COMPLETIONS, body))
        raw.read_until(first, b"data: ")
        with raw.connect(served.port) as second:
            second.sendall(raw.request_bytes(COMPLETIONS, body))
            until(lambda: running(served) == (1, 1))
        until(lambda: running(served) == (1, 0))
        with raw.connect(served.port) as third:
            third.sendall(raw.request_bytes(COMPLETIONS, body)[:-10])
            time.sleep(0.05)
        assert running(served) == (1, 0)
    served.until_idle()
    until(lambda: served.server.front._open == 0)


def test_a_full_queue_refuses_with_retry_after_and_nobody_hangs(serve):
    served = serve(batch=BatchSettings(max_running=2, max_waiting=4, step_tokens=64))
    body = {"prompt": "abc", "max_tokens": 60, "ignore_eos": True, "temperature": 0}

    def ask(_):
        status, headers, answer = raw.ask(served.port, COMPLETIONS, body)
        return status, headers.get("retry-after"), answer

    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(ask, range(40)))
    statuses = [status for status, _, _ in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 4, "what fits the waiting line is never refused"
    for status, retry_after, answer in answers:
        if status == 429:
            assert 1 <= int(retry_after) <= 60
            assert json.loads(answer)["error"]["code"] == "rate_limit_exceeded"
    until(lambda: served.server.front._open == 0)
    with pytest.raises(openai.BadRequestError):
        served.client().completions.create(model="tiny", prompt="a", n=7)


def test_what_a_client_does_not_read_costs_neither_blocks_nor_events(served):
    body = json.dumps(ENDLESS | {"stream": True, "n": 2, "max_tokens": 400}).encode()
    with raw.connect(served.port) as socket:
        socket.sendall(raw.request_bytes(COMPLETIONS, body))
        until(lambda: running(served)[0] > 0)
        served.until_idle(30)
        answer = raw.read_all(socket)
    assert answer.count(b'"finish_reason":"length"') == 2
    assert b"data: [DONE]" in answer


def test_a_silent_stream_says_that_it_is_still_there(serve):
    settings = ServerSettings(port=0, keep_alive_s=0.05)
    served = serve(settings, batch=BatchSettings(max_running=1, step_tokens=64))
    body = json.dumps(ENDLESS | {"stream": True}).encode()
    with raw.connect(served.port) as first, raw.connect(served.port) as second:
        first.sendall(raw.request_bytes(COMPLETIONS, body))
        raw.read_until(first, b"data: ")
        second.sendall(raw.request_bytes(COMPLETIONS, body))
        assert b": still here\n\n" in raw.read_until(second, b": still")


def test_idle_servers_do_not_spin(served):
    served.until_idle()
    until(lambda: served.engine.settled)
    before_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before_s < 0.1


def test_a_server_that_ends_lets_answers_end_and_takes_no_new(serve):
    served = serve(ServerSettings(port=0, drain_s=20))
    body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with raw.connect(served.port) as socket:
        socket.sendall(raw.request_bytes(COMPLETIONS, json.dumps(body).encode()))
        raw.read_until(socket, b"data: ")
        served.server.should_exit = True
        answer = raw.read_all(socket)
    assert b'"finish_reason":"length"' in answer
    assert answer.count(b"[DONE]") == 1
    served.thread.join(10)
    assert not served.thread.is_alive()


def test_what_does_not_end_within_the_drain_is_told_so(serve):
    served = serve(ServerSettings(port=0, drain_s=0.3))
    with raw.connect(served.port) as socket:
        body = json.dumps(ENDLESS | {"stream": True, "n": 8}).encode()
        socket.sendall(raw.request_bytes(COMPLETIONS, body))
        raw.read_until(socket, b"data: ")
        began_s = time.monotonic()
        served.server.should_exit = True
        answer = raw.read_all(socket)
    assert b"shutting down" in answer
    assert b'"finish_reason":"stop"' not in answer
    assert time.monotonic() - began_s < 5
    served.thread.join(10)
    assert not served.thread.is_alive()


@pytest.mark.parametrize("moves_again", [True, False])
def test_a_server_that_ends_while_a_request_lacks_its_load(serve, moves_again):
    """The link is held: the answer comes if it moves again in time, else its client is told."""
    served = serve(ServerSettings(port=0, drain_s=20 if moves_again else 0.3), device_tokens=1024)
    core, rates = served.engine.mover.core, served.engine.cache.rates
    body = {"prompt": [5] * 500 + [6], "max_tokens": 3, "ignore_eos": True}
    for first in (5, 7, 8):
        raw.ask(served.port, COMPLETIONS, body | {"prompt": [first] * 500 + [6]})
    until(lambda: served.engine.settled)
    for average, value in ((rates.prefill_tokens_per_s, 0.1), (rates.link_bytes_per_s, 100.0)):
        average.value, average.weight = value, 0.0  # so that no load looks late
    lanes = [(Direction.LOAD, lane) for lane in (0, 1)]
    for lane in lanes:
        core.hold_lane(*lane)
    with raw.connect(served.port) as socket:
        socket.sendall(raw.request_bytes(COMPLETIONS, json.dumps(body).encode()))
        until(lambda: served.engine.cache._flights.load_blocks > 0)
        assert running(served)[0] == 0
        served.server.should_exit = True
        if moves_again:
            until(lambda: served.server.front.state is State.DRAINING)
            for lane in lanes:
                core.release_lane(*lane)
        answer = raw.read_all(socket)
    if moves_again:
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["forebay"]["tokens_by_source"][
            "host"
        ]
    else:
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"shutting down" in answer
    served.thread.join(30)
    assert not served.thread.is_alive()
    for lane in lanes:
        core.release_lane(*lane)


def test_a_dead_engine_is_said_at_once_and_nobody_hangs(serve):
    served = serve()
    client = served.client()

    def fail():
        raise ValueError("a fault of the machine")

    with ThreadPoolExecutor(2) as pool:
        options = ENDLESS | {"model": "tiny"}
        options.pop("ignore_eos")
        answers = [
            pool.submit(
                client.completions.create, **options, extra_body={"ignore_eos": True}, timeout=20
            )
            for _ in range(2)
        ]
        until(lambda: running(served)[0] == 2)
        served.engine.step = fail
        for answer in answers:
            with pytest.raises(openai.InternalServerError) as caught:
                answer.result(20)
            assert caught.value.status_code == 503
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="tiny", prompt="a")
    assert raw.ask(served.port, "/health", b"", method="GET")[0] == 503


PROGRAM = """
import sys
sys.path[:0] = {tests!r}
import server_rig
from forebay.engine.engine import Engine
from forebay.engine.settings import EngineSettings
from forebay.server.run import Server
from forebay.server.exchange import Exchange, Piece
from forebay.server.settings import ServerSettings
settings = EngineSettings(device_tokens=4096, host_bytes=1 << 24, block_tokens=16)
server = Server(Engine(server_rig.tiny_model(), settings), ServerSettings(port=0, drain_s=10))
print(server.url, flush=True)
server.run()
print("ended", flush=True)
"""


def test_sigterm_in_mid_stream_drains_and_ends_the_process():
    here = os.path.dirname(__file__)
    tests = [here, os.path.join(os.path.dirname(here), "shared")]
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PROGRAM.format(tests=tests)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        with raw.connect(port) as socket:
            body = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True, "stream": True}
            socket.sendall(raw.request_bytes(COMPLETIONS, json.dumps(body).encode()))
            raw.read_until(socket, b"data: ")
            process.send_signal(signal.SIGTERM)
            answer = raw.read_all(socket)
        assert b'"finish_reason":"length"' in answer
        assert process.wait(15) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()


def test_an_exchange_is_answered_by_the_thread_that_owns_the_engine(served):
    names = set()
    step = served.engine.step

    def spy():
        names.add(threading.current_thread().name)
        return step()

    served.engine.step = spy
    try:
        served.client().completions.create(model="tiny", prompt="a", max_tokens=2)
    finally:
        served.engine.step = step
    assert names == {"forebay-engine"}
