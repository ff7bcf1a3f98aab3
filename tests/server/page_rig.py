"""What tests of the live page share: a served load, the page's stream by hand, and a browser."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import raw

LIVE = "/v1/forebay/live"
WORDS = "head gate penstock turbine tailrace sluice"


@contextmanager
def load(
    served: Any, *, users: int = 6, key: str = "none", session: str = "chat"
) -> Iterator[None]:
    """Conversations of `users` that go on until the end of the block."""
    over = threading.Event()
    model = served.client(key).models.list().data[0].id

    def talk(user: int) -> None:
        client = served.client(key)
        turn = 0
        while not over.is_set():
            prompt = f"{WORDS} of user {user}: " + f"{WORDS} again. " * (1 + turn % 6)
            extra = {"ignore_eos": True, "session": f"{session}-{user}"}
            try:
                client.completions.create(
                    model=model, prompt=prompt, max_tokens=24, extra_body=extra
                )
            except openai.APIError:
                over.wait(0.1)
            turn += 1

    threads = [threading.Thread(target=talk, args=(user,), daemon=True) for user in range(users)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(30)


class Watching:
    """A page's stream, read event by event."""

    def __init__(self, port: int, headers: str = "") -> None:
        self.socket = raw.connect(port)
        self.socket.sendall(raw.request_bytes(LIVE, b"", method="GET", headers=headers))
        self._got = b""
        head = self._until(b"\r\n\r\n")
        self.status = int(head.split()[1])
        self.headers = head.decode("latin-1").lower()

    def event(self) -> tuple[str, Any]:
        """The next event's name and data; comments are passed over."""
        while True:
            text = self._until(b"\n\n").decode()
            lines = [line for line in text.split("\n") if ": " in line]
            fields = dict(line.split(": ", 1) for line in lines)
            if "event" in fields:
                return fields["event"], json.loads(fields["data"])

    def state(self) -> Any:
        """The next state."""
        while True:
            name, data = self.event()
            assert name in ("hello", "state")
            if name == "state":
                return data

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._got:
            part = self.socket.recv(65536)
            assert part, f"the stream ended: {self._got!r}"
            self._got += part
        found, _, self._got = self._got.partition(mark)
        return found


@contextmanager
def browser(folder: Path) -> Iterator[Any]:
    """A headless Chromium; its profile and what it downloads lie in `folder`. Skips without one."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("there is no chromium with its chromedriver: apt-get install chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1280,1200",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    options.add_experimental_option("prefs", {"download.default_directory": str(folder)})
    driver = selenium.Chrome(
        options=options, service=selenium.ChromeService(executable_path=chromedriver)
    )
    driver.set_page_load_timeout(30)
    try:
        yield driver
    finally:
        driver.quit()
