"""A user's side: chat completions from a server, streamed over HTTP as any client would.

Only the standard library, so that the demonstration needs nothing that the server does not.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.core.ledger import Source
from forebay.errors import RequestError

# A stream that is silent says so every 15 to 30 s.
_TIMEOUT_S = 120.0
_SOURCES = {"device": Source.DEVICE, "host": Source.HOST, "recomputed": Source.RECOMPUTED}


@dataclass(frozen=True, slots=True)
class Answer:
    """What one turn got, as its client saw it.

    `tokens` are the texts of its tokens and `gaps`, one for each, how far the best was ahead of the
    second best (a difference of log-probabilities is one of logits). `ttft_s` runs from sending the
    request to the first piece of the answer.
    """

    text: str
    tokens: tuple[str, ...]
    gaps: tuple[float, ...]
    ttft_s: float
    tokens_by_source: dict[Source, int]


def ask(
    address: tuple[str, int], messages: Sequence[Mapping[str, str]], max_tokens: int, session: str
) -> Answer:
    """The greedy answer of `max_tokens` to a conversation.

    Raises RequestError with the server's words if it refuses or breaks off, OSError or
    HTTPException if there is no server.
    """
    body = {
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 2,
        "session": session,
    }
    connection = http.client.HTTPConnection(*address, timeout=_TIMEOUT_S)
    try:
        began_s = time.monotonic()
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise RequestError(_message(json.loads(response.read())))
        return _answer(response, began_s)
    finally:
        connection.close()


def _answer(response: http.client.HTTPResponse, began_s: float) -> Answer:
    texts: list[str] = []
    tokens: list[str] = []
    gaps: list[float] = []
    ttft_s: float | None = None
    usage: dict[str, Any] | None = None
    for event in _events(response):
        if "error" in event:
            raise RequestError(_message(event))
        for choice in event["choices"]:
            for token in (choice["logprobs"] or {}).get("content", ()):
                if ttft_s is None:
                    ttft_s = time.monotonic() - began_s
                best, second = (other["logprob"] for other in token["top_logprobs"])
                tokens.append(token["token"])
                gaps.append(abs(best - second))
            texts.append(choice["delta"].get("content") or "")
        usage = event.get("usage") or usage
    if usage is None or ttft_s is None:
        raise RequestError("the server broke off in the middle of an answer")
    sources = usage["forebay"]["tokens_by_source"]
    return Answer(
        "".join(texts),
        tuple(tokens),
        tuple(gaps),
        ttft_s,
        {source: sources[name] for name, source in _SOURCES.items()},
    )


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The server-sent events up to [DONE]; comments are left out."""
    for line in response:
        name, _, data = line.partition(b":")
        if name == b"data" and data.strip() != b"[DONE]":
            yield json.loads(data)


def _message(body: dict[str, Any]) -> str:
    return str(body["error"]["message"])
