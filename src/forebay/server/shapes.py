"""The two endpoints' forms: pieces of answers to JSON, whole or as events of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from forebay.engine.request import FinishReason
from forebay.engine.sampler import SampledToken
from forebay.server.exchange import Piece
from forebay.server.token_names import TextOffset, TokenNames
from forebay.server.tools import Call, ToolCallParser
from forebay.server.wire import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    FunctionPart,
    TokenLogprob,
    ToolCallPart,
    TopLogprob,
    Usage,
)

_encode = msgspec.json.Encoder().encode
# Stands where a text will be; in nothing else that is sent.
_MARK = secrets.token_hex(16)


def event_of(body: bytes) -> bytes:
    """A server-sent event that carries `body`, JSON."""
    return b"data: %b\n\n" % body


class Shape(Protocol):
    """Turns the pieces of one exchange into events, or keeps them for a whole answer, JSON."""

    def opening(self, answers: int) -> bytes:
        """Events before the first piece, if any."""
        ...

    def event(self, piece: Piece) -> bytes:
        """The event of a piece; empty if there is nothing to say yet."""
        ...

    def closing(self, usage: Usage) -> bytes:
        """The event with the usage."""
        ...

    def keep(self, piece: Piece) -> None:
        """Take a piece of a whole answer."""
        ...

    def whole(self, usage: Usage) -> bytes:
        """The whole answer, from what was kept."""
        ...


class UsageSoFar:
    """The usage of each answer of a stream as far as it came. Give it the prompts' lengths."""

    def __init__(self, per_prompt: int) -> None:
        self.prompt_tokens: list[int] = []
        self._per_prompt = per_prompt
        self._answer_tokens: dict[int, int] = {}

    def add(self, index: int, tokens: int) -> Usage:
        """Answer `index` grew by so many tokens."""
        drawn = self._answer_tokens[index] = self._answer_tokens.get(index, 0) + tokens
        prompt = self.prompt_tokens[index // self._per_prompt]
        return Usage(prompt, drawn, prompt + drawn)


class _TextEvents(dict[int, tuple[bytes, bytes]]):
    """The events that say nothing but a text: encoded once for each answer, with a gap for it."""

    def of(self, index: int, text: str, event: Callable[[int, str], bytes]) -> bytes:
        """What `event` would give."""
        around = self.get(index)
        if around is None:
            before, _, after = event(index, _MARK).partition(_encode(_MARK))
            around = self[index] = before, after
        return around[0] + _encode(text) + around[1]


@dataclass(slots=True)
class CompletionShape:
    """/v1/completions."""

    model: str
    logprobs: bool
    names: TokenNames
    so_far: UsageSoFar | None = None
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    _offsets: dict[int, TextOffset] = field(default_factory=dict[int, TextOffset])
    _kept: dict[int, list[Piece]] = field(default_factory=dict[int, list[Piece]])
    _texts: _TextEvents = field(default_factory=_TextEvents)

    def opening(self, answers: int) -> bytes:
        """Nothing."""
        return b""

    def event(self, piece: Piece) -> bytes:
        """Its text and tokens."""
        if not (piece.text or piece.tokens or piece.outcome):
            return b""
        if piece.outcome is None and not self.logprobs and self.so_far is None:
            return self._texts.of(piece.index, piece.text, self._text_event)
        return event_of(_encode(self._of([self._choice([piece])], _so_far(self.so_far, piece))))

    def _text_event(self, index: int, text: str) -> bytes:
        return event_of(_encode(self._of([self._choice([Piece(index, text)])], msgspec.UNSET)))

    def closing(self, usage: Usage) -> bytes:
        """An event without choices."""
        return event_of(_encode(self._of([], usage)))

    def keep(self, piece: Piece) -> None:
        """Take a piece of a whole answer."""
        self._kept.setdefault(piece.index, []).append(piece)

    def whole(self, usage: Usage) -> bytes:
        """All answers."""
        return _encode(self._of([self._choice(self._kept[i]) for i in sorted(self._kept)], usage))

    def _of(self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType) -> Completion:
        return Completion(self.id, self.created, self.model, choices, usage=usage)

    def _choice(self, pieces: Sequence[Piece]) -> CompletionChoice:
        index = pieces[0].index
        tokens = [token for piece in pieces for token in piece.tokens]
        return CompletionChoice(
            index,
            "".join(piece.text for piece in pieces),
            self._logprobs(index, tokens) if self.logprobs else None,
            _reason(pieces[-1]),
        )

    def _logprobs(self, index: int, tokens: list[SampledToken]) -> CompletionLogprobs:
        names = [self.names(token.token_id) for token in tokens]
        offset = self._offsets.setdefault(index, TextOffset())
        texts = [name.in_old_form for name in names]
        return CompletionLogprobs(
            tokens=texts,
            token_logprobs=[token.logprob or 0.0 for token in tokens],
            # The token itself counts as one of them, likely or not.
            top_logprobs=[
                {self.names(other).in_old_form: logprob for other, logprob in token.alternatives}
                | {text: token.logprob or 0.0}
                for text, token in zip(texts, tokens, strict=True)
            ],
            text_offset=[offset.passed(name) for name in names],
        )


@dataclass(slots=True)
class _Answer:
    """One answer of a chat as far as it came."""

    parser: ToolCallParser | None
    text: list[str] = field(default_factory=list[str])
    calls: list[Call] = field(default_factory=list[Call])
    tokens: list[SampledToken] = field(default_factory=list[SampledToken])
    reason: str | None = None


@dataclass(slots=True)
class ChatShape:
    """/v1/chat/completions. `tools`: look for calls; `parallel`: more than one may be made."""

    model: str
    logprobs: bool
    names: TokenNames
    tools: bool = False
    parallel: bool = True
    so_far: UsageSoFar | None = None
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    _answers: dict[int, _Answer] = field(default_factory=dict[int, _Answer])
    _texts: _TextEvents = field(default_factory=_TextEvents)
    _looks_closer: bool = field(init=False)

    def __post_init__(self) -> None:
        """A text that goes out as it comes is most of what is sent."""
        self._looks_closer = self.tools or self.logprobs or self.so_far is not None

    def opening(self, answers: int) -> bytes:
        """The role, once for each answer."""
        delta = Delta(role="assistant", content="")
        return b"".join(
            self._chunk(
                [ChunkChoice(index, delta)],
                msgspec.UNSET if self.so_far is None else self.so_far.add(index, 0),
            )
            for index in range(answers)
        )

    def event(self, piece: Piece) -> bytes:
        """Its text, and the calls that it completes."""
        if piece.outcome is None and piece.text and not self._looks_closer:
            return self._texts.of(piece.index, piece.text, self._text_event)
        answer = self._answer(piece.index)
        text, calls = self._parted(answer, piece)
        if not (text or calls or piece.tokens or piece.outcome):
            return b""
        if not (calls or self.logprobs or piece.outcome or self.so_far):
            return self._texts.of(piece.index, text, self._text_event)
        first = len(answer.calls) - len(calls)
        parts = [_part(call, first + i) for i, call in enumerate(calls)]
        return self._chunk(
            [
                ChunkChoice(
                    piece.index,
                    Delta(content=text or msgspec.UNSET, tool_calls=parts or msgspec.UNSET),
                    self._logprobs(piece.tokens) if self.logprobs else None,
                    _chat_reason(answer, piece),
                )
            ],
            _so_far(self.so_far, piece),
        )

    def _text_event(self, index: int, text: str) -> bytes:
        return self._chunk([ChunkChoice(index, Delta(content=text))], msgspec.UNSET)

    def closing(self, usage: Usage) -> bytes:
        """An event without choices."""
        return self._chunk([], usage)

    def keep(self, piece: Piece) -> None:
        """Take a piece of a whole answer."""
        answer = self._answer(piece.index)
        text, _ = self._parted(answer, piece)
        answer.text.append(text)
        answer.tokens.extend(piece.tokens)
        answer.reason = _chat_reason(answer, piece)

    def whole(self, usage: Usage) -> bytes:
        """All answers."""
        choices = [self._choice(index, self._answers[index]) for index in sorted(self._answers)]
        return _encode(ChatCompletion(self.id, self.created, self.model, choices, usage))

    def _answer(self, index: int) -> _Answer:
        answer = self._answers.get(index)
        if answer is None:
            answer = self._answers[index] = _Answer(ToolCallParser() if self.tools else None)
        return answer

    def _parted(self, answer: _Answer, piece: Piece) -> tuple[str, list[Call]]:
        if answer.parser is None:
            return piece.text, []
        text, calls = answer.parser.push(piece.text)
        if piece.outcome is not None:
            rest, more = answer.parser.finish()
            text, calls = text + rest, calls + more
        if not self.parallel:
            calls = calls[: max(0, 1 - len(answer.calls))]
        answer.calls.extend(calls)
        return text, calls

    def _choice(self, index: int, answer: _Answer) -> ChatChoice:
        text = "".join(answer.text)
        calls = [_part(call) for call in answer.calls]
        message = ChatMessage(text, tool_calls=msgspec.UNSET)
        if calls:
            message = ChatMessage(text.strip() or None, tool_calls=calls)
        logprobs = self._logprobs(answer.tokens) if self.logprobs else None
        return ChatChoice(index, message, logprobs, answer.reason)

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | msgspec.UnsetType) -> bytes:
        return event_of(_encode(ChatChunk(self.id, self.created, self.model, choices, usage=usage)))

    def _logprobs(self, tokens: Sequence[SampledToken]) -> ChatLogprobs:
        return ChatLogprobs(
            [
                TokenLogprob(
                    *self._named(token.token_id, token.logprob or 0.0),
                    [TopLogprob(*self._named(*other)) for other in token.alternatives],
                )
                for token in tokens
            ]
        )

    def _named(self, token_id: int, logprob: float) -> tuple[str, float, list[int] | None]:
        name = self.names(token_id)
        return name.text, logprob, None if name.raw is None else list(name.raw)


def _so_far(so_far: UsageSoFar | None, piece: Piece) -> Usage | msgspec.UnsetType:
    return msgspec.UNSET if so_far is None else so_far.add(piece.index, len(piece.tokens))


def _part(call: Call, index: int | msgspec.UnsetType = msgspec.UNSET) -> ToolCallPart:
    return ToolCallPart(call.id, FunctionPart(call.name, call.arguments), index=index)


def _reason(piece: Piece) -> str | None:
    if piece.outcome is None:
        return None
    return "length" if piece.outcome.reason is FinishReason.LENGTH else "stop"


def _chat_reason(answer: _Answer, piece: Piece) -> str | None:
    reason = _reason(piece)
    return "tool_calls" if reason == "stop" and answer.calls else reason
