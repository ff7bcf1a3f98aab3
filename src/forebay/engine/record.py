"""What a step was made of: enough to run the same schedule again without a cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
