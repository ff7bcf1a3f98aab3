"""A day's worth of turns leaves memory as it was: nothing is kept for a request that is over."""

from __future__ import annotations

import collections
import ctypes
import gc
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import raw
from server_rig import serving, tiny_model, until

from forebay.config import BatchSettings
from forebay.engine.settings import EngineSettings
from forebay.server.settings import ServerSettings

REQUESTS, WARM_UP, CLIENTS = 10_000, 3_000, 32
# More conversations than are remembered, and more blocks than fit both pools.
SESSIONS, REMEMBERED = 192, 64
TURNS = 4
# Of a server that keeps a kilobyte for each request, memory would grow by 7 MB.
MOST_GROWTH_BYTES = 4 << 20
_M_ARENA_MAX = -8


class Talk:
    """One client: conversations, turn by turn, over a connection that is kept."""

    def __init__(self, served, number):
        self._port = served.port
        self._number = number
        self._turn = 0
        self.bad = []

    def talk(self, requests):
        with raw.connect(self._port) as connection:
            for _ in range(requests):
                body = json.dumps(self._body()).encode()
                data = raw.request_bytes("/v1/completions", body)
                connection.sendall(data.replace(b"connection: close\r\n", b"", 1))
                answer = connection.recv(65536)
                while b"[DONE]" not in answer and b'"finish_reason":"length"' not in answer:
                    part = connection.recv(65536)
                    if not part:
                        break
                    answer += part
                while answer.startswith(b"HTTP/1.1 200") and self._open(answer):
                    answer += connection.recv(65536)
                if not answer.startswith(b"HTTP/1.1 200"):
                    self.bad.append(answer)

    @staticmethod
    def _open(answer):
        """Whether more of it is to come."""
        head, _, body = answer.partition(b"\r\n\r\n")
        if b"chunked" in head:
            return not body.endswith(b"0\r\n\r\n")
        length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        return len(body) < int(length)

    def _body(self):
        conversation, turn = divmod(self._turn, TURNS)
        self._turn += 1
        session = f"{self._number} {conversation % (SESSIONS // CLIENTS)}"
        prompt = [3 + (7 * self._number + conversation + at) % 200 for at in range(24 * (turn + 1))]
        return {
            "prompt": prompt,
            "max_tokens": 2,
            "ignore_eos": True,
            "session": session,
            "cache_salt": str(conversation % 3),
            "stream": turn % 2 == 0,
            "stop": ["\x00\x00"] if turn == 1 else None,
            "seed": turn if turn == 2 else None,
            "temperature": turn / 2,
            "no_save": turn == 3 and conversation % 5 == 0,
        }


def memory_bytes():
    gc.collect()
    # What the allocator keeps back is not what the server keeps.
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def census():
    """How many there are of each type of ours, and of the containers that everything is made of."""
    gc.collect()
    counted = collections.Counter()
    for each in gc.get_objects():
        kind = type(each)
        if str(kind.__module__).startswith("forebay.") or kind in (
            dict,
            list,
            set,
            collections.deque,
        ):
            counted[f"{kind.__module__}.{kind.__name__}"] += 1
    return counted


@pytest.mark.timeout(300)
def test_ten_thousand_turns_leave_memory_flat():
    engine = EngineSettings(
        device_tokens=2048,
        host_bytes=1 << 20,
        block_tokens=16,
        batch=BatchSettings(max_running=CLIENTS),
    )
    settings = ServerSettings(port=0, max_sessions=REMEMBERED)
    # Threads get arenas of their own from the allocator, and those that end leave them behind.
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    model = tiny_model(256, layers=1)
    with ThreadPoolExecutor(CLIENTS) as pool, serving(model, settings, engine) as served:
        talks = [Talk(served, number) for number in range(CLIENTS)]

        def talk(requests):
            list(pool.map(lambda one: one.talk(requests // CLIENTS), talks))
            served.until_idle()
            until(lambda: served.engine.settled)
            until(lambda: not served.server.server_state.connections)

        talk(WARM_UP)
        before, memory_before = census(), memory_bytes()
        talk(REQUESTS - WARM_UP)
        after, memory_after = census(), memory_bytes()
        stats = served.server.front.stats
    assert not any(one.bad for one in talks)
    assert stats.cache.evicted_blocks > 1000, "the pools were never full"
    # What is cached differs from moment to moment by some blocks, and a batch by its requests.
    grown = {kind: after[kind] - before[kind] for kind in after if after[kind] > before[kind] + 200}
    assert not grown, grown
    assert memory_after - memory_before < MOST_GROWTH_BYTES
