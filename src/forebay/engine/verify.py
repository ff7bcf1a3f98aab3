"""Debug mode: every block read from the cache must be, bit for bit, what its step wrote.

A block's checksum is taken right behind the step that filled it and compared right before the first
step of every request that finds it in the cache, wherever it has been in between.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from forebay.core.requests import Ticket
from forebay.engine.pool import KVPool
from forebay.errors import CorruptBlockError

Serials = Callable[[Ticket], NDArray[np.int64]]


class BlockVerifier:
    """Checksums by block serial. For tests and fault finding: it keeps one number for each
    block.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._written: dict[int, int] = {}
        self.compared = 0

    def wrote(self, ticket: Ticket, serials: Serials) -> None:
        """Take the checksum of the blocks of `ticket` that are full and not known yet."""
        full = ticket.launched_tokens // self._pool.block_tokens
        names = serials(ticket)[:full].tolist()
        fresh = [i for i, name in enumerate(names) if name not in self._written]
        if fresh:
            sums = self._pool.checksums(ticket.slots[fresh])
            self._written.update(zip((names[i] for i in fresh), sums.tolist(), strict=True))

    def read(self, ticket: Ticket, serials: Serials, tokens: int) -> None:
        """Compare the blocks that hold the first `tokens` tokens of `ticket`.

        Raises CorruptBlockError for one that is not as it was written.
        """
        full = tokens // self._pool.block_tokens
        if not full:
            return
        names = serials(ticket)[:full].tolist()
        sums = self._pool.checksums(ticket.slots[:full]).tolist()
        for place, (name, found) in enumerate(zip(names, sums, strict=True)):
            if self._written.get(name) != found:
                raise CorruptBlockError(
                    f"block {place} of request {ticket.request.id} (serial {name}) differs from "
                    "what its step wrote: a copy went wrong or overtook its order; please report it"
                )
            self.compared += 1
