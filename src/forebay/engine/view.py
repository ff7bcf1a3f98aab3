"""What the requests of an engine do now: values that any thread may read."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from forebay.cache.view import CacheView, InLine, Tree
from forebay.core.batch import Batcher
from forebay.core.ledger import Source
from forebay.core.requests import NotYet
from forebay.engine.request import EngineRequest


class Doing(StrEnum):
    """What a request does, or what it waits for."""

    DECODE = "decode"
    PREFILL = "prefill"
    LOAD = "load"  # its turn has come, and its blocks are on their way
    COMPUTE = "compute"  # another request computes the same prefix
    ROOM = "room"  # the pool has no room for it
    TURN = "turn"  # others are before it


_WAITS_FOR = {
    NotYet.LOADING: Doing.LOAD,
    NotYet.COMPUTING: Doing.COMPUTE,
    NotYet.FULL: Doing.ROOM,
    NotYet.NEVER: Doing.ROOM,
}


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request. Times are the engine's clock's; None before they came.

    `found_tokens` of its prompt were cached when it started, `host_tokens` of those in host memory
    only; of a waiting one, `found_tokens` are cached now, and `near_tokens` of those are in place
    on the device or, if `flying`, on their way. `place` counts from 1, the head of the queue; a
    running one has 0.
    """

    id: int
    doing: Doing
    place: int
    prompt_tokens: int
    computed_tokens: int
    found_tokens: int
    host_tokens: int
    near_tokens: int
    flying: bool
    answer_tokens: int
    most_answer_tokens: int
    load_wait_s: float
    arrival_s: float
    started_s: float | None
    first_token_s: float | None


class EngineView:
    """Looks into one engine, for the thread that owns it."""

    def __init__(
        self,
        requests: Mapping[int, EngineRequest],
        batcher: Batcher,
        cache: CacheView,
        namespace: Callable[[str], bytes],
        clock: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._batcher = batcher
        self._cache = cache
        self._namespace = namespace
        self._clock = clock

    @property
    def now_s(self) -> float:
        """The time on the engine's clock."""
        return self._clock()

    def tree(self, salts: Sequence[str] | None, most_nodes: int) -> Tree:
        """What is cached under `salts`, or under all, as at most `most_nodes` nodes."""
        namespaces = None if salts is None else [self._namespace(salt) for salt in salts]
        return self._cache.tree(namespaces, most_nodes)

    def requests(self, most_waiting: int, among: Container[int] | None = None) -> list[RequestView]:
        """The running requests and then the first `most_waiting` others, of all or of those whose
        id is `among` the given.
        """
        ids = [sequence.request_id for sequence in self._batcher.running]
        running = [self._requests[each] for each in ids if among is None or each in among]
        line = self._cache.line(most_waiting, among)
        stepped_over = self._batcher.stepped_over
        return [_running(request) for request in running] + [
            _waiting(entry, self._requests[entry.id], place, stepped_over.get(entry.id))
            for place, entry in enumerate(line, start=1)
        ]


def _running(request: EngineRequest) -> RequestView:
    tokens = request.block_tokens
    host = request.sources.get(Source.HOST, 0) * tokens
    prefill = request.computed_tokens < len(request.prompt_ids)
    return _view(
        request,
        Doing.PREFILL if prefill else Doing.DECODE,
        found_tokens=request.sources.get(Source.DEVICE, 0) * tokens + host,
        host_tokens=host,
    )


def _waiting(entry: InLine, request: EngineRequest, place: int, why: NotYet | None) -> RequestView:
    return _view(
        request,
        Doing.TURN if why is None else _WAITS_FOR[why],
        place=place,
        found_tokens=entry.found * request.block_tokens,
        near_tokens=entry.covered * request.block_tokens,
        flying=entry.flying,
    )


def _view(
    request: EngineRequest,
    doing: Doing,
    *,
    place: int = 0,
    found_tokens: int = 0,
    host_tokens: int = 0,
    near_tokens: int = 0,
    flying: bool = False,
) -> RequestView:
    timing = request.timing
    return RequestView(
        id=request.id,
        doing=doing,
        place=place,
        prompt_tokens=len(request.prompt_ids),
        computed_tokens=request.computed_tokens,
        found_tokens=found_tokens,
        host_tokens=host_tokens,
        near_tokens=near_tokens,
        flying=flying,
        answer_tokens=len(request.drawn),
        most_answer_tokens=request.params.max_tokens,
        load_wait_s=request.load_wait_s,
        arrival_s=timing.arrival_s,
        started_s=timing.started_s,
        first_token_s=timing.first_token_s,
    )
