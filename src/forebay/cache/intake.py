"""What a cache takes in: requests that could run in its pool and whose keys fit their tokens."""

from __future__ import annotations

from forebay.core.requests import Request
from forebay.errors import RequestError


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_tokens)


def fits(request: Request, most_blocks: int, block_tokens: int) -> bool:
    """Whether its prompt and its longest answer fit `most_blocks` blocks."""
    return blocks_for(request.tokens + request.max_answer_tokens, block_tokens) <= most_blocks


def check_room(request: Request, most_blocks: int, block_tokens: int) -> None:
    """Raises RequestError for a request that can never run in `most_blocks` blocks."""
    if not fits(request, most_blocks, block_tokens):
        raise RequestError(
            f"{request.tokens} tokens and an answer of up to {request.max_answer_tokens} do "
            f"not fit the {most_blocks} blocks of {block_tokens} tokens "
            "that the device pool can give one request; shorten it or enlarge the pool"
        )


def check_keys(request: Request, key_bytes: int, block_tokens: int) -> None:
    """Raises RequestError unless the request has a key for each of its whole blocks."""
    if request.tokens < 1:
        raise RequestError("a request needs at least one token")
    whole = request.tokens // block_tokens
    if len(request.keys) != whole * key_bytes:
        raise RequestError(
            f"{request.tokens} tokens are {whole} whole blocks of {key_bytes} key "
            f"bytes; {len(request.keys)} bytes were given"
        )
