"""HTTP by hand, for what no proper client would send."""

from __future__ import annotations

import json
import socket
import time


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def request_bytes(path: str, body: bytes, *, method: str = "POST", headers: str = "") -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n{headers}\r\n"
    )
    return head.encode() + body


def exchange(port: int, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send `data`; status, headers and body of what comes until the server closes."""
    with connect(port) as raw:
        raw.sendall(data)
        return parse(read_all(raw))


def ask(port: int, path: str, body: object, **options: str) -> tuple[int, dict[str, str], bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return exchange(port, request_bytes(path, data, **options))


def read_all(raw: socket.socket) -> bytes:
    parts = []
    while part := raw.recv(65536):
        parts.append(part)
    return b"".join(parts)


def read_until(raw: socket.socket, mark: bytes, timeout_s: float = 10.0) -> bytes:
    got = b""
    end_s = time.monotonic() + timeout_s
    while mark not in got:
        assert time.monotonic() < end_s, got
        part = raw.recv(65536)
        assert part, got
        got += part
    return got


def parse(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return int(lines[0].split()[1]), headers, body


def joined(chunks: bytes) -> bytes:
    """A body in chunked encoding, put together."""
    parts = []
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        parts.append(chunks[: int(size, 16)])
        chunks = chunks[int(size, 16) + 2 :]
    return b"".join(parts)


def exchange_all(port: int, data: bytes) -> list[bytes]:
    """Send `data`; the bodies of all answers, which say their lengths, until the server closes."""
    with connect(port) as raw:
        raw.sendall(data)
        rest = read_all(raw)
    bodies = []
    while rest:
        _, headers, _ = parse(rest)
        rest = rest.partition(b"\r\n\r\n")[2]
        length = int(headers["content-length"])
        bodies.append(rest[:length])
        rest = rest[length:]
    return bodies
