"""What a cache takes in: requests that could run in its pool and whose keys fit their tokens, and a
mover whose pools its settings describe.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable

from forebay.config import CacheSettings
from forebay.core.requests import Request
from forebay.errors import ProtocolError, RequestError, SettingsError
from forebay.transfer.mover import Mover
from forebay.transfer.pool import Pool


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_tokens)


def fits(request: Request, most_blocks: int, block_tokens: int) -> bool:
    """Whether its prompt and its longest answer fit `most_blocks` blocks."""
    return blocks_for(request.tokens + request.max_answer_tokens, block_tokens) <= most_blocks


def check_new(request: Request, here: Iterable[Container[int]], *, closed: bool) -> None:
    """Raises ProtocolError for a request that is here already, or comes to a closed cache."""
    if closed:
        raise ProtocolError("the cache is closed and takes no request: make another one")
    if any(request.id in each for each in here):
        raise ProtocolError(f"request {request.id} is here already")


def check_room(request: Request, most_blocks: int, block_tokens: int) -> None:
    """Raises RequestError for a request that can never run in `most_blocks` blocks."""
    if not fits(request, most_blocks, block_tokens):
        raise RequestError(
            f"{request.tokens} tokens and an answer of up to {request.max_answer_tokens} do "
            f"not fit the {most_blocks} blocks of {block_tokens} tokens "
            "that the device pool can give one request; shorten it or enlarge the pool"
        )


def check_numbers(request: Request) -> None:
    """Raises RequestError for a request without tokens, with less than no answer, or of no time."""
    if request.tokens < 1:
        raise RequestError("a request needs at least one token")
    if request.max_answer_tokens < 0:
        raise RequestError(f"there is no answer of {request.max_answer_tokens} tokens: give 0")
    if math.isnan(request.arrival_s):
        raise RequestError("arrival_s is not a number, and the queue is sorted by it")


def check_keys(request: Request, key_bytes: int, block_tokens: int) -> None:
    """Raises RequestError unless the request has a key for each of its whole blocks, in bytes."""
    if {type(request.namespace), type(request.keys)} != {bytes}:
        raise RequestError(
            f"namespace and keys must be bytes, not {type(request.namespace).__name__} and "
            f"{type(request.keys).__name__}"
        )
    whole = request.tokens // block_tokens
    if len(request.keys) != whole * key_bytes:
        raise RequestError(
            f"{request.tokens} tokens are {whole} whole blocks of {key_bytes} key "
            f"bytes; {len(request.keys)} bytes were given"
        )


def check_mover(mover: Mover, settings: CacheSettings) -> Mover:
    """`mover`. Raises SettingsError if it shows its pools and they are not those of `settings`."""
    pools: tuple[Pool, Pool] | None = getattr(mover, "pools", None)
    slots = {"device_slots": settings.device_slots, "host_slots": settings.host_slots}
    for pool, (name, count) in zip(pools or (), slots.items(), strict=False):
        if pool.block_bytes != settings.block_bytes:
            raise SettingsError(
                f"block_bytes is {settings.block_bytes}, and the mover's pools have blocks of "
                f"{pool.block_bytes} bytes: give the same"
            )
        if count > pool.slots:
            raise SettingsError(f"{name} is {count}, and the mover's pool has {pool.slots} slots")
    return mover
