"""How long steps take, where the host runs ahead of them.

On a GPU a launch returns before the step has run. Only a step whose logits were read has certainly
ended; those since the last such one are measured together with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.core.batch import Work
from forebay.core.rates import Rates


@dataclass(slots=True)
class Pace:
    """Measures the steps of one engine and tells `rates`."""

    rates: Rates
    _began_s: float | None = None
    _prefill_tokens: int = 0
    _decode_tokens: int = 0

    def stepped(self, work: list[Work], began_s: float, now_s: float, *, ended: bool) -> None:
        """A step of `work` was launched at `began_s`; `ended` says that it is over by `now_s`."""
        if self._began_s is None:
            self._began_s = began_s
        self._prefill_tokens += prefill_tokens(work)
        self._decode_tokens += decode_tokens(work)
        if ended:
            self.rates.stepped(self._prefill_tokens, self._decode_tokens, now_s - self._began_s)
            self._began_s, self._prefill_tokens, self._decode_tokens = None, 0, 0


def prefill_tokens(work: list[Work]) -> int:
    """Prompt tokens that a step computes."""
    return sum(item.tokens for item in work if item.tokens > 1)


def decode_tokens(work: list[Work]) -> int:
    """Requests that a step gives one token."""
    return sum(1 for item in work if item.tokens == 1)
