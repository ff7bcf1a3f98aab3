"""What is malformed, hostile or too much gets the right status and leaves nothing behind."""

from __future__ import annotations

import json
from typing import Any

import pytest
import raw
from server_rig import until

from forebay.server.settings import ServerSettings

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "a"}]

MALFORMED = {
    "no json": b"hello",
    "half of json": b'{"prompt": "a"',
    "no body": b"",
    "an array": b"[]",
    "not utf-8": b'{"prompt": "\xff\xfe"}',
    "a lone surrogate": b'{"prompt": "\\ud800"}',
    "a surrogate as salt": b'{"prompt": "a", "cache_salt": "\\ud800"}',
    "a surrogate as model": b'{"prompt": "a", "model": "\\ud800"}',
    "a surrogate as a field": b'{"prompt": "a", "logit_bias": {"\\ud800": 1}}',
    "deep nesting": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of 10000 digits": b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
    "no prompt": b"{}",
    "an empty prompt": b'{"prompt": ""}',
    "an empty list": b'{"prompt": []}',
    "mixed prompts": b'{"prompt": ["a", 5]}',
    "a negative token": b'{"prompt": [5, -1]}',
    "a huge token": b'{"prompt": [5, 99999999999999999999]}',
    "a number as text": b'{"prompt": "a", "max_tokens": "5"}',
    "no tokens": b'{"prompt": "a", "max_tokens": 0}',
    "not a number": b'{"prompt": "a", "temperature": NaN}',
    "a cold temperature": b'{"prompt": "a", "temperature": -1}',
    "top_p of nothing": b'{"prompt": "a", "top_p": 0}',
    "a huge seed": b'{"prompt": "a", "seed": 18446744073709551616}',
    "too many answers": b'{"prompt": "a", "n": 100}',
    "an empty stop": b'{"prompt": "a", "stop": ""}',
    "options of no stream": b'{"prompt": "a", "stream_options": {"include_usage": true}}',
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_body_is_the_clients_error(served, body):
    status, headers, answer = raw.ask(served.port, COMPLETIONS, body)
    assert status in (400, 404), answer
    assert headers["content-type"] == "application/json"
    error = json.loads(answer)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert "Traceback" not in error["message"]
    until(lambda: served.server.front._open == 0)


def called_with(arguments: str) -> dict[str, Any]:
    """A chat in which a tool was called so."""
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [{"role": "boss", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"messages": USER, "top_logprobs": 2},
        {"messages": USER, "tool_choice": "required"},
        {"messages": USER, "chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}},
        called_with("{"),
        called_with("9" * 5_000),
        called_with("[" * 100_000),
    ],
)
def test_a_chat_that_cannot_be_is_refused(served, body):
    status, _, answer = raw.ask(served.port, CHAT, body)
    assert status == 400, answer


def test_of_a_field_of_several_kinds_what_is_wrong_is_told_once(served):
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    for path, body, said in (
        (
            CHAT,
            {"messages": [image]},
            "messages.0.content.0.type: Input should be 'text'; "
            "messages.0.content.0.text: Field required",
        ),
        (
            COMPLETIONS,
            {"prompt": 3},
            "prompt: Input should be a valid string; prompt: Input should be a valid list",
        ),
    ):
        _, _, answer = raw.ask(served.port, path, body)
        assert json.loads(answer)["error"]["message"] == said


def test_unknown_fields_are_ignored_and_null_is_the_default(served):
    body = {"prompt": "a", "max_tokens": 1, "temperature": None, "n": None, "some_new_field": [1]}
    assert raw.ask(served.port, COMPLETIONS, body)[0] == 200


def test_paths_and_methods_that_are_not(served):
    for path, method, expected in (("/v1/nothing", "POST", 404), (COMPLETIONS, "GET", 405)):
        status, _, body = raw.ask(served.port, path, b"", method=method)
        assert status == expected
        assert "/docs lists" in json.loads(body)["error"]["message"]
    assert raw.ask(served.port, "/v1/../../etc/passwd", b"", method="GET")[0] == 404


def test_a_body_that_is_too_large_is_refused_unread(served):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 104857600\r\n\r\n"
    with raw.connect(served.port) as socket:
        socket.sendall(head + b"x" * 1000)
        status, _, body = raw.parse(raw.read_all(socket))
    assert status == 413
    assert "16777216" in json.loads(body)["error"]["message"]


def test_a_chunked_body_that_grows_too_large_is_refused(serve):
    served = serve(ServerSettings(port=0, max_body_bytes=1000))
    chunk = b"200\r\n" + b" " * 512 + b"\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    head += b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    assert raw.exchange(served.port, head + chunk * 4)[0] == 413


@pytest.mark.parametrize(
    "smuggled",
    [
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"content-length: -5\r\n",
        b"content-length: 5 \x00\r\n",
        b"transfer-encoding: chunked, identity\r\n",
        b"bad header\r\n",
    ],
)
def test_headers_that_smuggle_are_refused(served, smuggled):
    data = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n" + smuggled + b"\r\n"
    data += b"0\r\n\r\n"
    assert raw.exchange(served.port, data)[0] in (400, 408, 501)


def test_slow_and_endless_headers_and_bodies_end(serve):
    served = serve(ServerSettings(port=0, header_timeout_s=0.5, body_timeout_s=0.5))
    with raw.connect(served.port) as socket:
        socket.sendall(b"POST /v1/completions HTT")
        assert raw.read_all(socket) == b""
    with raw.connect(served.port) as socket:
        socket.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nlong: " + b"x" * 70_000)
        assert raw.parse(raw.read_all(socket))[0] == 400
    with raw.connect(served.port) as socket:
        socket.sendall(raw.request_bytes(COMPLETIONS, b'{"prompt": "a"}')[:-5])
        assert raw.parse(raw.read_all(socket))[0] == 408


def test_a_large_body_in_one_piece_is_taken(served):
    body = {"prompt": "a", "max_tokens": 1, "user": "u" * 300_000}
    with raw.connect(served.port) as socket:
        data = raw.request_bytes(COMPLETIONS, json.dumps(body).encode())
        twice = data.replace(b"connection: close\r\n", b"", 1)
        socket.sendall(twice)
        first = raw.read_until(socket, b"}}}")
        socket.sendall(data)
        second = raw.read_all(socket)
    assert raw.parse(first)[0] == raw.parse(second)[0] == 200
