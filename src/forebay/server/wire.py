"""Answers as they go over the wire, in OpenAI's form; also the source of their OpenAPI schemas."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from forebay.server.exchange import Outcome


class TokensBySource(msgspec.Struct, frozen=True):
    """Where the KV of the prompt's tokens came from; they add up to prompt_tokens."""

    device: int
    host: int
    recomputed: int


class ForebayUsage(msgspec.Struct, frozen=True):
    """Why an answer took so long. Seconds; of several answers the longest."""

    tokens_by_source: TokensBySource
    queued_s: float
    load_wait_s: float
    prefetched_bytes: int


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Of the prompt's tokens."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of all prompts, each counted once, and of all answers. So far, without the details."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    forebay: ForebayUsage | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of an answer's tokens, in the old form."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """An answer, or what a step added to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct, frozen=True):
    """What /v1/completions answers, whole or as one event of a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType = UNSET


class FunctionPart(msgspec.Struct, frozen=True):
    """A function and its arguments, as JSON text."""

    name: str
    arguments: str


class ToolCallPart(msgspec.Struct, frozen=True):
    """A call of a function. `index` in streams only."""

    id: str
    function: FunctionPart
    type: Literal["function"] = "function"
    index: int | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    """An alternative to a token. `bytes` null: the tokenizer does not tell."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token's log-probability, and those of the likeliest."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of an answer's tokens."""

    content: list[TokenLogprob]


class ChatMessage(msgspec.Struct, frozen=True):
    """The assistant's message."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    tool_calls: list[ToolCallPart] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """An answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletion(msgspec.Struct, frozen=True):
    """What /v1/chat/completions answers when it does not stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, frozen=True):
    """What a step added to the assistant's message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    """What a step added to an answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, frozen=True):
    """One event of a stream of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType = UNSET


class Model(msgspec.Struct, frozen=True):
    """The model that is served."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "forebay"


class ModelList(msgspec.Struct, frozen=True):
    """What /v1/models answers."""

    data: list[Model]
    object: Literal["list"] = "list"


class Version(msgspec.Struct, frozen=True):
    """What /version answers."""

    version: str


class ModeState(msgspec.Struct, frozen=True):
    """The mode in use."""

    mode: str


def usage_of(outcomes: list[Outcome], per_prompt: int) -> Usage:
    """Usage of all answers, in order, `per_prompt` of them to each prompt."""
    firsts = outcomes[::per_prompt]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in firsts)
    answer_tokens = sum(outcome.answer_tokens for outcome in outcomes)
    device = sum(outcome.device_tokens for outcome in firsts)
    host = sum(outcome.host_tokens for outcome in firsts)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=answer_tokens,
        total_tokens=prompt_tokens + answer_tokens,
        prompt_tokens_details=PromptTokensDetails(device + host),
        forebay=ForebayUsage(
            tokens_by_source=TokensBySource(device, host, prompt_tokens - device - host),
            queued_s=round(max(outcome.queued_s for outcome in outcomes), 6),
            load_wait_s=round(max(outcome.load_wait_s for outcome in outcomes), 6),
            prefetched_bytes=sum(outcome.prefetched_bytes for outcome in firsts),
        ),
    )
