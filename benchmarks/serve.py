"""What serving costs: the start, a streamed token, HTTP as a whole, and a crowd of clients.

- serve_start_s: from starting the process `forebay serve` to the first token of a stream, SmolLM2,
  weights converted and in the file cache, bytecode written: a first start, which is not counted,
  sees to that. Seconds of a clock on the wall; the settings have the CPU time until the same token.
- sse_us_per_token: CPU of the serving process for one more token of each of 16 chat streams, beyond
  what its engine needs: the clocks of the event loop's thread and of the one that makes prompts
  into tokens, and of the engine's thread outside `Engine.step`. Long streams against short ones by
  turns; the difference over the difference in events, so that what a request costs once is not in
  it (`us_per_request` says that). On a tiny model, so that HTTP is in nobody's shadow.
- serve_overhead: tokens/s of 8 streams over HTTP against `Engine.generate` for the same prompts in
  the same process, by turns, with an engine of its own each; SmolLM2, clients in another process.
- load_500: 500 clients at once on a queue of 100, half of them streaming. Lost is who got neither a
  whole answer nor 429 with Retry-After within the time, or a connection that broke.
- load_500_growth_mb: resident memory after the last of several such crowds, over that after the
  second: the first ones fill pools and the allocator's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.measure import report

GOALS = {
    "serve_start_s": report.Goal(at_most=12),
    "sse_us_per_token": report.Goal(at_most=60),
    "serve_overhead": report.Goal(at_least=0.95),
    "load_500": report.Goal(at_most=0),
    "load_500_growth_mb": report.Goal(at_most=4),
}
_HERE = Path(__file__).resolve().parent
_PATIENCE_S = 180.0
_VOCABULARY = 49152
_STREAMS, _SHORT = 16, 20


@dataclass(frozen=True, slots=True)
class Got:
    """One client's answer: the status, its headers in lower case, and all bytes of the body."""

    status: int
    headers: str
    body: bytes
    first_s: float

    @property
    def whole(self) -> bool:
        """Whether an answer came to its end."""
        return self.status == 200 and (b"data: [DONE]" in self.body or b'"usage"' in self.body)

    @property
    def refused(self) -> bool:
        """Whether it was told to come back."""
        return self.status == 429 and "retry-after: " in self.headers


async def post(port: int, path: str, body: dict[str, Any]) -> Got:
    """Send one request on a connection of its own and read to the end. Raises OSError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(body).encode()
        writer.write(
            b"POST %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (path.encode(), len(data), data)
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        parts = [await reader.read(65536)]
        first_s = time.perf_counter()
        while part := await reader.read(65536):
            parts.append(part)
        return Got(int(head.split()[1]), head, b"".join(parts), first_s)
    finally:
        writer.close()


def chat(text: str, tokens: int, *, stream: bool = True) -> dict[str, Any]:
    """The body of a chat request."""
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


class Served:
    """A server in a process of its own (`served.py`)."""

    def __init__(self, *options: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(_HERE / "served.py"), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._read())

    def ask(self, work: dict[str, Any] | None = None) -> dict[str, float]:
        """Its clocks and sizes, or the seconds of work without HTTP."""
        if self._process.stdin is None:
            raise RuntimeError("the server has no input")
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        return json.loads(self._read())

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()

    def _read(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise RuntimeError("the server ended; what it wrote above says why")
        return line


def measure_start(options: argparse.Namespace) -> report.Figure:
    """Start `forebay serve` and ask at once."""
    starts = [_start() for _ in range(options.starts + 1)][1:]
    settings = {
        "model": "smollm2",
        "cpu_s": statistics.median(cpu_s for _, cpu_s in starts),
        "cpu_s_each": [cpu_s for _, cpu_s in starts],
    }
    return report.median_figure("serve_start_s", [wall_s for wall_s, _ in starts], "s", settings)


def _start() -> tuple[float, float]:
    """Seconds on the wall and of CPU until the first token."""
    command = "import sys; from forebay.cli import main; sys.argv[0] = 'forebay'; main()"
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    began_s = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", command, "serve", "--port", "0", "--log-level", "warning"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        port = _port_of(process)
        got = asyncio.run(post(port, "/v1/chat/completions", chat("Hello", 2)))
        used_s = time.clock_gettime(_clock_of(process.pid))
        process.terminate()
        process.wait(60)
    if not got.whole:
        raise RuntimeError(f"no answer: {got.status} {got.body!r}")
    return got.first_s - began_s, used_s


def _clock_of(pid: int) -> int:
    """The clock of another process's CPU time, as clock_getcpuclockid makes it."""
    return (~pid << 3) | 2


def _port_of(process: subprocess.Popen[str]) -> int:
    for line in process.stdout or ():
        if line.startswith("serving on http://"):
            return int(line.split("/v1")[0].rsplit(":", 1)[1])
    raise RuntimeError("forebay serve ended before it served; what it wrote above says why")


def measure_streams(options: argparse.Namespace) -> report.Figure:
    """16 streams at once over a tiny model, short and long ones by turns."""

    async def streams(port: int, tokens: int, number: int) -> int:
        texts = [f"round {number}, stream {i}" for i in range(_STREAMS)]
        got = await asyncio.gather(
            *(post(port, "/v1/chat/completions", chat(text, tokens)) for text in texts)
        )
        if not all(each.whole for each in got):
            raise RuntimeError("a stream did not come to its end")
        return sum(each.body.count(b'"delta":{"content":"') for each in got)

    def spent(tokens: int, number: int) -> tuple[float, int]:
        before_s = served.ask()["http_s"]
        events = asyncio.run(streams(served.port, tokens, number))
        return served.ask()["http_s"] - before_s, events

    samples: list[float] = []
    requests: list[float] = []
    with Served("--max-running", str(_STREAMS)) as served:
        spent(_SHORT, -1)
        for number in range(options.rounds):
            short_s, few = spent(_SHORT, 2 * number)
            long_s, many = spent(options.tokens, 2 * number + 1)
            token_s = (long_s - short_s) / (many - few)
            samples.append(1e6 * token_s)
            requests.append(1e6 * (short_s - few * token_s) / _STREAMS)
    settings = {
        "streams": _STREAMS,
        "tokens_each": [_SHORT, options.tokens],
        "model": "tiny random Llama with SmolLM2's tokenizer",
        "clock": "CPU of the threads of HTTP, and of the engine's outside its steps",
        "us_per_request": statistics.median(requests),
    }
    return report.median_figure("sse_us_per_token", samples, "us", settings)


def measure_overhead(options: argparse.Namespace) -> report.Figure:
    """8 streams over HTTP and `Engine.generate`, by turns, the first of them in turns too."""

    async def streams(port: int, prompts: list[list[int]]) -> int:
        body = {"max_tokens": options.answer, "temperature": 0, "ignore_eos": True, "stream": True}
        got = await asyncio.gather(
            *(post(port, "/v1/completions", body | {"prompt": prompt}) for prompt in prompts)
        )
        if not all(each.whole for each in got):
            raise RuntimeError("a stream did not come to its end")
        return len(got)

    ratios: list[float] = []
    direct_rates: list[float] = []
    rng = np.random.default_rng(0)
    with Served("--model", "smollm2", "--max-running", "8", "--threads", "2", "--direct") as served:
        for number in range(-1, options.rounds):
            prompts = rng.integers(20, _VOCABULARY, (8, options.prompt)).tolist()

            def over_http(prompts: list[list[int]] = prompts) -> float:
                began_s = time.perf_counter()
                asyncio.run(streams(served.port, prompts))
                return time.perf_counter() - began_s

            def directly(prompts: list[list[int]] = prompts) -> float:
                return served.ask({"prompts": prompts, "max_tokens": options.answer})["seconds"]

            http_s, direct_s = _in_turn(over_http, directly, number % 2 == 1)
            if number >= 0:
                ratios.append(direct_s / http_s)
                direct_rates.append(8 * options.answer / direct_s)
    settings = {
        "model": "SmolLM2-135M-Instruct float32",
        "streams": 8,
        "prompt_tokens": options.prompt,
        "answer_tokens": options.answer,
        "tokens_per_s_directly": statistics.median(direct_rates),
        "clock": "wall, from the first request to the last byte",
    }
    return report.median_figure("serve_overhead", ratios, "ratio", settings)


def _in_turn(
    first: Callable[[], float], second: Callable[[], float], swapped: bool
) -> tuple[float, float]:
    if swapped:
        after = second()
        return first(), after
    return first(), second()


def measure_crowd(options: argparse.Namespace) -> list[report.Figure]:
    """Crowds of 500 clients, one after the other."""

    async def client(port: int, number: int) -> str:
        body = chat(f"client {number}", 32, stream=number % 2 == 0)
        try:
            got = await asyncio.wait_for(post(port, "/v1/chat/completions", body), _PATIENCE_S)
        except (OSError, EOFError, TimeoutError) as error:
            return type(error).__name__
        return "whole" if got.whole else "refused" if got.refused else f"status {got.status}"

    async def crowd(port: int) -> list[str]:
        return await asyncio.gather(*(client(port, number) for number in range(500)))

    outcomes: list[str] = []
    resident: list[float] = []
    with Served("--max-running", "16", "--max-waiting", "100") as served:
        for _ in range(options.crowds):
            outcomes += asyncio.run(crowd(served.port))
            until_s = time.monotonic() + 30
            while (seen := served.ask())["open"] and time.monotonic() < until_s:
                time.sleep(0.1)
            outcomes += ["left in the engine"] * int(seen["open"])
            resident.append(seen["resident_bytes"] / 1e6)
    counts = {name: outcomes.count(name) for name in sorted(set(outcomes))}
    lost = len(outcomes) - counts.get("whole", 0) - counts.get("refused", 0)
    settings = {
        "clients": 500,
        "crowds": options.crowds,
        "running": 16,
        "waiting": 100,
        "outcomes": counts,
    }
    growth = resident[-1] - resident[1]
    return [
        report.Figure("load_500", lost, "clients", (), settings),
        report.Figure("load_500_growth_mb", growth, "MB", [r - resident[1] for r in resident]),
    ]


def arguments() -> argparse.Namespace:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--starts", type=int, default=5)
    extra.add_argument("--rounds", type=int, default=7)
    extra.add_argument("--tokens", type=int, default=420, help="of each of the 16 longer streams")
    extra.add_argument("--prompt", type=int, default=64, help="tokens, for serve_overhead")
    extra.add_argument("--answer", type=int, default=48, help="tokens, for serve_overhead")
    extra.add_argument("--crowds", type=int, default=5, help="of 500 clients, at least 3")
    extra.add_argument("--only", choices=("start", "streams", "overhead", "crowd"))
    return report.arguments(__doc__ or "", extra).parse_args()


def main() -> int:
    options = arguments()
    figures: list[report.Figure] = []
    for name, measure in (
        ("start", lambda: [measure_start(options)]),
        ("streams", lambda: [measure_streams(options)]),
        ("overhead", lambda: [measure_overhead(options)]),
        ("crowd", lambda: measure_crowd(options)),
    ):
        if options.only in (None, name):
            print(f"measuring {name}", file=sys.stderr, flush=True)
            figures += measure()
    return report.finish(figures, GOALS, json=options.json, strict=options.strict)


if __name__ == "__main__":
    sys.exit(main())
