"""Who watches, and what they are told: the newest state a few times a second, nothing kept.

While nobody watches nothing is asked of the engine. While somebody does, one look at a time is:
different viewers take turns, and all pages of one viewer share its looks. A page that does not read
gets the state of when it reads next.

Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec

from forebay.engine.engine import Engine
from forebay.server.access import Tenant, Viewer
from forebay.server.errors import ApiError
from forebay.server.lanes import Lanes
from forebay.server.live_wire import (
    State,
    TreeWire,
    device_of,
    host_of,
    request_wire,
    totals_of,
    tree_wire,
)
from forebay.server.look import Drawing, Jobs, LastMinutes, Look, last_minutes, look
from forebay.timeline.recent import Mark, Recent

logger = logging.getLogger("forebay.server")

_Seen = TypeVar("_Seen")
Then = Callable[[_Seen | None], None]
Ask = Callable[[Callable[[Engine, Jobs], Any], Then[Any]], None]
"""Has a function called on the engine's thread, and its value, None if it failed, on the loop."""

_EVERY_S = 0.25
_AFTER_FAILURE_S = 2.0
_TREE_EVERY_S = 1.0
# Of a tenant's salts the trees of the latest are shown.
_MOST_SALTS = 64
_PATIENCE_S = 20.0


@dataclass(eq=False, slots=True)
class Sight:
    """What all pages of one viewer are told: the newest look, and the tree, which comes less
    often.
    """

    viewer: Viewer
    newest: Look | None = None
    looks: int = 0
    tree: TreeWire | None = None
    trees: int = 0
    drawn_s: float = float("-inf")


@dataclass(eq=False, slots=True)
class Watcher:
    """One open page, and how much it was told."""

    sight: Sight
    looks: int = 0
    trees: int = 0
    lanes: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Live:
    """Takes watchers in, at most `most`, and keeps the newest look for them."""

    def __init__(self, recent: Recent, most: int) -> None:
        self._recent = recent
        self._most = most
        self._ask: Ask | None = None
        self._watchers: list[Watcher] = []
        self._sights: list[Sight] = []
        self._salts: dict[str, OrderedDict[str, None]] = {}
        self._lanes = Lanes()
        self._mark = Mark()
        self._ended = False
        self._pump: asyncio.Task[None] | None = None
        self._tracing = False

    # -- life ------------------------------------------------------------------------------------

    def start(self, ask: Ask) -> None:
        """Begin to take watchers."""
        self._ask = ask

    def end(self) -> None:
        """Every watcher is told that it is over; nobody comes in any more."""
        self._ended = True
        for watcher in self._watchers:
            watcher.news.set()
        if self._pump is not None:
            self._pump.cancel()
            self._pump = None

    def used(self, salted: str) -> None:
        """A request is cached under this salt: its tenant's tree shows that too."""
        tenant = Tenant.of(salted)
        if tenant.salt is None:
            return
        salts = self._salts.setdefault(tenant.salt, OrderedDict())
        salts[salted] = None
        salts.move_to_end(salted)
        if len(salts) > _MOST_SALTS:
            salts.popitem(last=False)

    # -- watching --------------------------------------------------------------------------------

    def join(self, viewer: Viewer) -> Watcher:
        """A new watcher. Raises ApiError 429 or 503. Whoever gets one calls :meth:`leave`."""
        if self._ended or self._ask is None:
            raise ApiError(503, "the server is shutting down; ask another one", retry_after_s=1)
        if len(self._watchers) >= self._most:
            raise ApiError(
                429,
                f"{len(self._watchers)} pages watch already; close one, or raise max_watchers",
                retry_after_s=10,
            )
        sight = next((s for s in self._sights if s.viewer == viewer), None)
        if sight is None:
            sight = Sight(viewer)
            self._sights.append(sight)
        watcher = Watcher(sight)
        self._watchers.append(watcher)
        if self._pump is None:
            self._pump = asyncio.ensure_future(self._keep_looking(self._ask))
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """It watches no more."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)
            if all(other.sight is not watcher.sight for other in self._watchers):
                self._sights.remove(watcher.sight)

    async def next(self, watcher: Watcher, within_s: float) -> bytes | None:
        """The newest state as JSON, b"" if there was none in time, None at the end."""
        sight = watcher.sight
        if watcher.looks == sight.looks and not self._ended:
            watcher.news.clear()
            try:
                await asyncio.wait_for(watcher.news.wait(), within_s)
            except TimeoutError:
                return b""
        if self._ended or sight.newest is None:
            return None
        watcher.looks = sight.looks
        return msgspec.json.encode(self._told(watcher, sight.newest))

    async def last_minutes(self) -> LastMinutes:
        """All that is recorded. Raises ApiError 429 while another asks, 503 without an answer."""
        if self._ask is None or self._ended:
            raise ApiError(503, "the server is shutting down", retry_after_s=1)
        if self._tracing:
            raise ApiError(429, "another trace is being made; ask again", retry_after_s=5)
        self._tracing = True
        try:
            record = await self._get(self._ask, partial(last_minutes, recent=self._recent))
        finally:
            self._tracing = False
        if record is None:
            raise ApiError(503, "the engine did not answer in time; ask again", retry_after_s=5)
        return record

    # -- inside ----------------------------------------------------------------------------------

    async def _keep_looking(self, ask: Ask) -> None:
        """Look for each viewer in turn, so that many cost the engine no more than one."""
        loop = asyncio.get_running_loop()
        while self._sights:
            began_s = loop.time()
            sight = self._sights.pop(0)
            self._sights.append(sight)
            drawing = None
            if began_s - sight.drawn_s >= _TREE_EVERY_S:
                drawing, sight.drawn_s = Drawing(self._salts_of(sight.viewer)), began_s
            at = partial(
                look,
                recent=self._recent,
                mark=self._mark,
                tenant=sight.viewer.tenant,
                tree=drawing,
            )
            seen: Look | None = await self._get(ask, at)
            if seen is not None:
                self._take(sight, seen)
            pause_s = _EVERY_S if seen is not None else _AFTER_FAILURE_S
            await asyncio.sleep(max(0.0, pause_s - (loop.time() - began_s)))
        self._pump = None

    async def _get(self, ask: Ask, at: Callable[[Engine, Jobs], _Seen]) -> _Seen | None:
        """What `at` returns on the engine's thread; None if it failed or did not come in time."""
        came: asyncio.Future[_Seen | None] = asyncio.get_running_loop().create_future()

        def then(value: _Seen | None) -> None:
            if not came.done():
                came.set_result(value)

        ask(at, then)
        try:
            return await asyncio.wait_for(came, _PATIENCE_S)
        except TimeoutError:
            return None

    def _salts_of(self, viewer: Viewer) -> list[str] | None:
        if viewer.tenant is None:
            return None
        return list(self._salts.get(viewer.tenant.salt or "", ()))

    def _take(self, sight: Sight, seen: Look) -> None:
        self._mark = seen.part.mark
        self._lanes.add(seen.part, seen.at_s)
        sight.newest = seen
        sight.looks += 1
        if seen.tree is not None:
            tree = tree_wire(seen.tree)
            if tree != sight.tree:
                sight.tree = tree
                sight.trees += 1
        for watcher in self._watchers:
            if watcher.sight is sight:
                watcher.news.set()

    def _told(self, watcher: Watcher, seen: Look) -> State:
        tree: TreeWire | msgspec.UnsetType = msgspec.UNSET
        if watcher.sight.tree is not None and watcher.trees != watcher.sight.trees:
            tree, watcher.trees = watcher.sight.tree, watcher.sight.trees
        now_s = round(seen.at_s, 3)
        requests = [request_wire(one.view, one.session, seen.at_s) for one in seen.seen]
        if watcher.sight.viewer.tenant is not None:
            return State(now_s, requests, tree)
        lanes, watcher.lanes = self._lanes.since(watcher.lanes), self._lanes.changes
        return State(
            now_s=now_s,
            requests=requests,
            tree=tree,
            totals=totals_of(seen.stats, seen.link_bytes_per_s),
            device=device_of(seen.stats),
            host=host_of(seen.stats),
            lanes=lanes,
        )
