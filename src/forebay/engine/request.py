"""A request in the engine: its tokens, its sampler and its text, all of which outlive
preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.core.directory import Session
from forebay.core.ledger import Source
from forebay.core.requests import Request, Ticket
from forebay.engine.sampler import SampledToken, Sampler, SamplingParams, sample
from forebay.engine.text import Detokeniser, StopStrings
from forebay.errors import ModelError
from forebay.timeline.record import Kind, Records

_CONTEXT_FOR_TEXT = 8


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to a request; `finished` with the last one."""

    request_id: int
    text: str
    tokens: tuple[SampledToken, ...]
    finished: FinishReason | None


@dataclass(slots=True)
class Timing:
    """Moments of a request, on the engine's clock; None before they came."""

    arrival_s: float
    started_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def ttft_s(self) -> float:
        """Arrival to first token; infinite if there was none."""
        first = self.first_token_s
        return float("inf") if first is None else first - self.arrival_s


@dataclass(eq=False, slots=True)
class EngineRequest:
    """One request. `tokens` are its prompt and answer; KV is in place for `computed_tokens`."""

    id: int
    prompt_ids: NDArray[np.int64]
    params: SamplingParams
    namespace: bytes
    block_tokens: int
    timing: Timing
    tokenizer: Any
    eos_token_ids: frozenset[int]
    label: str = ""
    priority: int = 0
    no_cache: bool = False
    no_save: bool = False
    session: Session | None = None
    ticket: Ticket | None = None
    computed_tokens: int = 0
    stepped: bool = False
    """Whether a step has computed any of it."""
    finished: FinishReason | None = None
    error: str = ""
    """Why it ended as FAILED."""
    text: str = ""
    sources: dict[Source, int] = field(default_factory=dict[Source, int])
    prefetched_blocks: int = 0
    """Blocks that it read and that were copied before its turn was known to come."""
    load_wait_s: float = 0.0
    """How long it lacked nothing but a load."""
    drawn: list[SampledToken] = field(default_factory=list[SampledToken])
    sampler: Sampler = field(init=False)
    _ending: frozenset[int] = field(init=False)
    _tokens: NDArray[np.int64] = field(init=False)
    _count: int = field(init=False)
    _detokeniser: Detokeniser | None = field(init=False)
    _stops: StopStrings = field(init=False)

    def __post_init__(self) -> None:
        ending = self.params.stop_token_ids
        self._ending = ending if self.params.ignore_eos else ending | self.eos_token_ids
        self.sampler = Sampler(self.params, self.prompt_ids, self._ending)
        self._count = len(self.prompt_ids)
        self._tokens = np.concatenate(
            [self.prompt_ids, np.zeros(min(self.params.max_tokens, 1024), np.int64)]
        )
        after = self.prompt_ids[-_CONTEXT_FOR_TEXT:].tolist()
        self._detokeniser = Detokeniser(self.tokenizer, after=after) if self.tokenizer else None
        self._stops = StopStrings(self.params.stop)

    @property
    def request_id(self) -> int:
        """The id under which the cache knows it."""
        return self.id

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Prompt and answer so far: a view, valid until the next token."""
        return self._tokens[: self._count]

    @property
    def known_tokens(self) -> int:
        """Tokens of prompt and answer so far."""
        return self._count

    @property
    def answer_left(self) -> int:
        """Tokens that it may still generate."""
        return self.params.max_tokens - len(self.drawn)

    def keys(self) -> bytes:
        """The block keys of all whole blocks: the tokens themselves, four bytes each."""
        whole = self._count // self.block_tokens * self.block_tokens
        return self._tokens[:whole].astype(np.int32).tobytes()

    def renew(self) -> Request:
        """The request with all tokens known by now."""
        return Request(
            id=self.id,
            namespace=self.namespace,
            keys=self.keys(),
            tokens=self._count,
            max_answer_tokens=self.answer_left,
            arrival_s=self.timing.arrival_s,
            priority=self.priority,
            no_cache=self.no_cache,
            no_save=self.no_save,
            session=self.session,
        )

    def start(self, ticket: Ticket, now_s: float) -> bool:
        """Admitted, for the first time or anew. Returns whether it was the first."""
        # What an earlier ticket promised and then lost was not read. Once a step has run, part of
        # what is found is the request's own.
        if not self.stepped:
            self.sources = dict(ticket.sources)
            self.load_wait_s += ticket.load_wait_s
            self.prefetched_blocks = ticket.prefetched_blocks
        first = self.timing.started_s is None
        if first:
            self.timing.started_s = now_s
            self.session = ticket.session.rested() if ticket.session is not None else None
        return first

    def accept(self, token: SampledToken, now_s: float) -> Delta:
        """Take the next token of the answer: append it, and see whether it ends the request."""
        if self._count == len(self._tokens):
            spare = np.zeros(len(self._tokens), np.int64)
            self._tokens = np.concatenate([self._tokens, spare])
        self._tokens[self._count] = token.token_id
        self._count += 1
        self.drawn.append(token)
        if self.timing.first_token_s is None:
            self.timing.first_token_s = now_s
        ends = token.token_id in self._ending
        text = "" if ends else self._show(token.token_id)
        if self._stops.matched is not None:
            ends = True
        reason = FinishReason.STOP if ends else None
        if reason is None and self.answer_left <= 0:
            reason = FinishReason.LENGTH
        if reason is not None:
            text += self.end(reason, now_s)
        self.text += text
        return Delta(self.id, text, (token,), reason)

    def end(self, reason: FinishReason, now_s: float) -> str:
        """The request is over. Returns text that had been held back."""
        self.finished = reason
        self.timing.finished_s = now_s
        if self._stops.matched is not None or self._detokeniser is None:
            return ""
        return self._passed(self._detokeniser.finish()) + self._stops.finish()

    def show_on(self, timeline: Records) -> None:
        """Draw the ended request's row, if it came as far as a token."""
        timing = self.timing
        started_s, first_s, end_s = timing.started_s, timing.first_token_s, timing.finished_s
        if started_s is None or first_s is None or end_s is None:
            return
        timeline.request(self.label, Kind.QUEUED, timing.arrival_s, started_s)
        timeline.request(self.label, Kind.PREFILL, started_s, first_s)
        timeline.request(self.label, Kind.DECODE, first_s, end_s)

    def _show(self, token_id: int) -> str:
        if self._detokeniser is None:
            return ""
        return self._passed(self._detokeniser.push(token_id))

    def _passed(self, text: str) -> str:
        return self._stops.push(text, search=len(self.drawn) > self.params.min_tokens)


def draw(
    requests: Sequence[EngineRequest], logits: torch.Tensor, rows: list[int]
) -> dict[int, SampledToken]:
    """The next token by row; a request whose own logits are broken gets an error instead."""
    mine = logits if len(rows) == len(logits) else logits[rows]
    try:
        tokens = sample([requests[row].sampler for row in rows], mine)
    except ModelError as error:
        if len(rows) > 1:
            each = [draw(requests, logits, [row]) for row in rows]
            return {row: token for one in each for row, token in one.items()}
        requests[rows[0]].error = str(error)
        return {}
    return dict(zip(rows, tokens, strict=True))
