"""Requests whose blocks vLLM's hashes may not tell from those of others.

vLLM names a block by its tokens, by all before it, and by what else its KV depends on: images and
other items whose tokens lie in it, the LoRA, the salt. Where such a name leaves something out, vLLM
itself answers over the KV of another for as long as its own pool has it. Host memory would have it
for much longer: requests to which that may happen have nothing to do with it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from itertools import pairwise

from forebay.vllm.adapter import VllmRequest, lora_name
from forebay.vllm.names import Item, items_of

_logger = logging.getLogger("forebay.vllm")

_DIGEST = re.compile(r"[0-9a-f]{64}([0-9a-f]{64})?")
"""What vLLM names an item by that its client does not name: BLAKE3, SHA-256 or SHA-512 of it."""


class Misnamed:
    """Looks at requests when they arrive. Blocks have `block_tokens` tokens.

    `salts`: vLLM takes a salt for a LoRA of that name. `items`: KV of a prompt with items depends
    on what no name tells. `tails`: of a block that a prompt's last tokens and its answer share,
    vLLM knows the last item alone.
    """

    def __init__(self, block_tokens: int, *, salts: bool, items: bool, tails: bool) -> None:
        self._block_tokens = block_tokens
        self._salts = salts
        self._items = items
        self._tails = tails
        self._told = False

    def may_be(self, request: VllmRequest) -> bool:
        """Whether blocks of `request` may have the names of others."""
        # Of a session that goes on (streaming input) later prompts may have anything, and in 0.26 a
        # block keeps the name of a token that was taken back.
        if request.resumable or (self._salts and request.cache_salt):
            return True
        items = items_of(request)
        if not items:
            return False
        return (
            self._items
            or self._named_by_client(request, items)
            # vLLM goes through them one by one, and looks for the next where one ends.
            or any(after.start < item.end for item, after in pairwise(items))
            or (self._tails and self._end_in_one_block(request, items))
        )

    def _named_by_client(self, request: VllmRequest, items: Sequence[Item]) -> bool:
        """A client may give two items one name, and vLLM takes the name."""
        # As vLLM has it where a LoRA has a part in what is made of items.
        prefix = f"{lora_name(request)}:"
        if all(_DIGEST.fullmatch(item.name.removeprefix(prefix)) for item in items):
            return False
        if not self._told:
            self._told = True
            _logger.warning(
                "a request names its images itself (uuid): such requests are kept out of host "
                "memory, since nothing tells whether a name stands for the same image as before"
            )
        return True

    def _end_in_one_block(self, request: VllmRequest, items: Sequence[Item]) -> bool:
        whole = request.num_tokens // self._block_tokens * self._block_tokens
        return sum(item.end > whole for item in items) > 1
