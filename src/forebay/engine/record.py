"""What a step was made of: enough to run the same schedule again without a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.core.batch import Work
from forebay.engine.runner import Chunk
from forebay.engine.sampler import SampledToken


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as it ran: per request its tokens, their start, its blocks' serials, the next token.

    A serial names a block's content for good, so that the schedule can be run again elsewhere.
    """

    request_ids: tuple[int, ...]
    starts: tuple[int, ...]
    token_ids: tuple[NDArray[np.int64], ...]
    serials: tuple[NDArray[np.int64], ...]
    drawn: tuple[SampledToken | None, ...]

    @classmethod
    def of(
        cls,
        work: Sequence[Work],
        chunk: Callable[[Work], Chunk],
        serials: Callable[[Work], NDArray[np.int64]],
        drawn: Mapping[int, SampledToken],
    ) -> StepRecord:
        """The record of a step of `work`, of which `drawn` are the tokens by place."""
        return cls(
            request_ids=tuple(item.sequence.request_id for item in work),
            starts=tuple(item.start for item in work),
            token_ids=tuple(chunk(item).token_ids.copy() for item in work),
            serials=tuple(serials(item) for item in work),
            drawn=tuple(drawn.get(i) for i in range(len(work))),
        )
