"""What is known of each of vLLM's requests, from its arrival to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from forebay.core.directory import Session
from forebay.core.planner import Running
from forebay.core.rates import Rates
from forebay.core.requests import Hint, Request
from forebay.vllm.adapter import Scheduled, VllmRequest, over
from forebay.vllm.scheduler.wishes import NAME, Wishes

_AFTER_S = 0.02
"""vLLM sends an answer in another thread, which does not run while a long prompt is scheduled."""


class Turn(Enum):
    """How far a waiting request is with what it lacks, since vLLM first asked about it."""

    NOT_ASKED = auto()
    WAITS = auto()
    """Its loads are on their way, or start with the next step's orders."""
    NO_ROOM = auto()
    """vLLM's pool is too full for its loads: vLLM decides whether it waits or recomputes."""
    READY = auto()


@dataclass(slots=True)
class Record:
    """One of vLLM's requests. `id` is ours."""

    id: int
    request: VllmRequest
    arrival_s: float
    wishes: Wishes
    hint: Hint | None = None
    """What it says of a request to come, and is nothing else."""
    hint_refused: str = ""
    """Why its hint was not taken up."""
    asked_s: float | None = None
    """When vLLM was first told to ask again about it, since it waits."""
    turn: Turn = Turn.NOT_ASKED
    local_tokens: int = 0
    """What vLLM found in its own cache when it last asked."""
    copied_from: int = -1
    """The slot from which its last block is copied, if it is, all but the last token."""
    copied_tokens: int = 0
    goes_behind: VllmRequest | None = None
    """A hint's own request lets that of its session have its answer first."""
    until_s: float = 0.0
    """It waits until then at most."""
    table: list[int] = field(default_factory=list[int])
    """Its slots, as far as the steps have told."""
    computed: int = 0
    """Its tokens up to the last one that some step computes, of those that were known then."""
    named: int = 0
    """Blocks of its table, from the first, that are in the directory."""
    ends: list[int] = field(default_factory=list[int])
    """Where its path is to become an end, last first: blocks up to there."""
    session: Session | None = None
    _keys: bytes = b""

    def keys(self) -> bytes:
        """The hashes of all its blocks so far, one behind the other: the same object until there
        are more.
        """
        hashes = self.request.block_hashes
        last = hashes[-1] if hashes else b""
        # Each hash is of all before it too.
        if len(self._keys) != len(hashes) * len(last) or not self._keys.endswith(last):
            self._keys = b"".join(hashes)
        return self._keys

    def scheduled(self, part: Scheduled) -> None:
        """A step computes `part` of it."""
        if part.whole:
            self.table = list(part.blocks)
            self.named = 0
        else:
            self.table.extend(part.blocks)

    def waits_again(self) -> None:
        """It was preempted."""
        self.turn, self.local_tokens = Turn.NOT_ASKED, 0
        self.copied_from, self.copied_tokens = -1, 0
        self.asked_s = None
        self.table, self.named, self.session = [], 0, None

    def waiting(self, namespace: bytes, priority: int) -> Request:
        """What it asks the cache for while it waits."""
        request = self.request
        return Request(
            id=self.id,
            namespace=namespace,
            keys=self.keys(),
            tokens=request.num_tokens,
            max_answer_tokens=request.max_tokens,
            arrival_s=self.arrival_s,
            priority=priority,
            no_cache=self.wishes.no_cache,
            no_save=self.wishes.no_save,
            hint=self.hint,
        )

    def lets_pass(self, now_s: float) -> bool:
        """Whether it lets another go first."""
        if self.goes_behind is not None and over(self.goes_behind):
            self.goes_behind = None
            self.until_s = min(self.until_s, now_s + _AFTER_S)
        return now_s < self.until_s

    @property
    def found_tokens(self) -> int:
        """Those of its prompt that need not be computed when it starts."""
        return self.local_tokens + self.copied_tokens

    def found_blocks(self, block_tokens: int) -> int:
        """Blocks of its prompt that are there when it starts."""
        return self.local_tokens // block_tokens + (self.copied_tokens > 0)

    def progress(self, rates: Rates) -> Running:
        """What it has left to compute and to answer. Answers end before they must: no more is left
        than of an average one.
        """
        request = self.request
        left = max(0, request.num_tokens - request.num_computed_tokens)
        answer = min(request.max_tokens, int(rates.answer_tokens.value)) - request.num_output_tokens
        return Running(left if left > 1 else 0, max(0, answer))

    def answer(self) -> dict[str, Any] | None:
        """What its client is told in the answer's `kv_transfer_params`, if it asked for anything.

        `found_tokens` of the prompt were on the device when it started.
        """
        wishes = self.wishes
        if not wishes.said:
            return None
        told: dict[str, Any] = {}
        if wishes.ignored:
            told["ignored"] = wishes.complaints()
        if self.hint_refused:
            told["hint"] = {"refused": self.hint_refused}
        elif self.hint is not None:
            told["hint"] = {
                "found_tokens": self.found_tokens,
                "expiry_s": round(self.hint.expires_s - self.hint.eta_s, 3),
            }
        return {NAME: told}
