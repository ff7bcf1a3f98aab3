"""A hub of the test's own, over HTTP: what a client asks of one to download a model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """`models`: files by repository. `gated`: repositories behind terms. `asked`: paths so far."""

    def __init__(self, models: dict[str, dict[str, bytes]], gated: set[str]) -> None:
        self.models = models
        self.gated = gated
        self.asked: list[str] = []
        self.url = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        path = path.partition("?")[0].strip("/")
        self.asked.append(path)
        parts = path.removeprefix("api/models/").split("/")
        name = "/".join(parts[:2])
        if name in self.gated:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Terms"}, b"{}"
        files = self.models.get(name)
        if files is None:
            return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "None"}, b"{}"
        kind, revision, *rest = parts[2:]
        if revision not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        return self._found(name, files, kind, "/".join(rest))

    def _found(
        self, name: str, files: dict[str, bytes], kind: str, file: str
    ) -> tuple[int, dict[str, str], bytes]:
        if kind == "revision":
            listed = [{"rfilename": path} for path in files]
            body = {"id": name, "sha": COMMIT, "siblings": listed, "private": False, "tags": []}
            return 200, {}, json.dumps(body).encode()
        if kind == "tree":
            tree = [
                {"type": "file", "path": path, "size": len(data), "oid": _etag(data)}
                for path, data in files.items()
            ]
            return 200, {}, json.dumps(tree).encode()
        data = files.get(file)
        if data is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(data)}"'}, data


def _etag(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def fake_hub(models: dict[str, dict[str, bytes]], gated: set[str]) -> Iterator[FakeHub]:
    hub = FakeHub(models, gated)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
