"""What is known of each of vLLM's requests, from its arrival to its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, cast

from forebay.core.directory import Session
from forebay.vllm.adapter import Scheduled, VllmRequest


class Turn(Enum):
    """How far a waiting request is with what it lacks, since vLLM first asked about it."""

    NOT_ASKED = auto()
    WAITS = auto()
    """Its loads are on their way, or start with the next step's orders."""
    NO_ROOM = auto()
    """vLLM's pool is too full for its loads: vLLM decides whether it waits or recomputes."""
    READY = auto()


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a request asks of the cache, in `kv_transfer_params` under "forebay"."""

    no_cache: bool = False
    no_save: bool = False

    @classmethod
    def of(cls, request: VllmRequest) -> Wishes:
        """The wishes of `request`; what is not understood is no wish."""
        given: Any = (request.kv_transfer_params or {}).get("forebay")
        asked: Mapping[str, object] = {} if not isinstance(given, dict) else cast(Any, given)
        return cls(
            no_cache=bool(request.skip_reading_prefix_cache or asked.get("no_cache") is True),
            no_save=asked.get("no_save") is True,
        )


@dataclass(slots=True)
class Record:
    """One of vLLM's requests. `id` is ours."""

    id: int
    request: VllmRequest
    arrival_s: float
    wishes: Wishes
    turn: Turn = Turn.NOT_ASKED
    local_tokens: int = 0
    """What vLLM found in its own cache when it last asked."""
    running: bool = False
    table: list[int] = field(default_factory=list[int])
    """Its slots, as far as the steps have told."""
    named: int = 0
    """Blocks of its table, from the first, that are in the directory."""
    session: Session | None = None

    def scheduled(self, part: Scheduled) -> None:
        """A step computes `part` of it."""
        self.running = True
        if part.whole:
            self.table = list(part.blocks)
            self.named = 0
        else:
            self.table.extend(part.blocks)

    def waits_again(self) -> None:
        """It was preempted."""
        self.running, self.turn, self.local_tokens = False, Turn.NOT_ASKED, 0
        self.table, self.named, self.session = [], 0, None
