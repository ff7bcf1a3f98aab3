"""Measured rates, and the durations that follow from them.

Each rate is an exponential average over what was really moved or computed, started from a setting
and replaced by the first measurement, so that a wrong guess lasts for one observation.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Average:
    """An exponential average; `weight` is that of the newest sample."""

    value: float
    weight: float = 0.2
    samples: int = 0

    def add(self, sample: float) -> None:
        """Take in one sample; the first replaces the starting value."""
        weight = self.weight if self.samples else 1.0
        self.value += weight * (sample - self.value)
        self.samples += 1


@dataclass(slots=True)
class Rates:
    """What the planner knows of this machine. Bytes, tokens and seconds."""

    link_bytes_per_s: Average
    prefill_tokens_per_s: Average = field(default_factory=lambda: Average(1000.0))
    step_s: Average = field(default_factory=lambda: Average(0.05))
    answer_tokens: Average = field(default_factory=lambda: Average(64.0))
    load_latency_s: Average = field(default_factory=lambda: Average(0.02))

    def moved(self, copied_bytes: int, busy_s: float) -> None:
        """A transfer that had the link to itself for `busy_s` moved `copied_bytes`."""
        if copied_bytes > 0 and busy_s > 0:
            self.link_bytes_per_s.add(copied_bytes / busy_s)

    def arrived(self, copied_bytes: int, elapsed_s: float) -> None:
        """A load of `copied_bytes` was seen to be over `elapsed_s` after it was asked for."""
        self.load_latency_s.add(max(0.0, elapsed_s - self.load_s(copied_bytes)))

    def stepped(self, prefill_tokens: int, decode_tokens: int, elapsed_s: float) -> None:
        """A step took `elapsed_s`. Steps that are mostly prefill measure the prefill rate."""
        if elapsed_s <= 0:
            return
        if prefill_tokens > 4 * decode_tokens:
            self.prefill_tokens_per_s.add(prefill_tokens / elapsed_s)
        elif decode_tokens:
            self.step_s.add(elapsed_s)

    def answered(self, tokens: int) -> None:
        """A request ended after `tokens` generated tokens."""
        self.answer_tokens.add(float(tokens))

    def blocks_in(self, seconds: float, block_bytes: int) -> int:
        """Whole blocks that the link moves in `seconds`, at least one."""
        return max(1, int(seconds * self.link_bytes_per_s.value / block_bytes))

    def load_s(self, copied_bytes: int) -> float:
        """Seconds that a load of `copied_bytes` takes on an idle link."""
        return copied_bytes / self.link_bytes_per_s.value

    def patience_s(self, copied_bytes: int, tokens: int) -> float:
        """How long to wait for a load before `tokens` are computed instead.

        The smaller of twice its estimate, with what such loads take besides their bytes, and of
        computing it; at least a step.
        """
        load_s = self.load_latency_s.value + self.load_s(copied_bytes)
        return max(self.step_s.value, min(2 * load_s, self.prefill_s(tokens)))

    def longest_s(self, copied_bytes: int) -> float:
        """How long `copied_bytes` in flight may take before their link counts as stopped."""
        return 4 * (self.load_latency_s.value + self.load_s(copied_bytes))

    def prefill_s(self, tokens: int) -> float:
        """Seconds that computing `tokens` prompt tokens takes."""
        return tokens / self.prefill_tokens_per_s.value
