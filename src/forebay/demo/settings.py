"""The sizes of the demonstration, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forebay.demo.workload import Turn
from forebay.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Sizes and times of the demonstration. Pools are in tokens of KV."""

    # Three conversations that run and the greater part of one that comes next, of six.
    device_tokens: int = 2688
    # Several times what all conversations need together.
    host_tokens: int = 12_288
    max_running: int = 3
    step_tokens: int = 256
    # From turn to turn by half as much more or less, so that requests do not end together.
    answer_tokens: int = 12
    # Users begin one after the other, and come back this long after an answer.
    stagger_s: float = 1.5
    pause_s: float = 0.5
    # How much faster a load is than computing the same tokens: the link is slowed down to it. Six
    # to ten were measured end to end for a model of 8 billion weights on one H200 (PCIe 5).
    load_advantage: float = 8.0
    # A picture of a timeline shows so much: a few turns.
    picture_s: float = 6.0

    def __post_init__(self) -> None:
        for name in ("device_tokens", "answer_tokens", "load_advantage"):
            if getattr(self, name) <= 0:
                raise SettingsError(f"{name} must be positive, not {getattr(self, name)}")

    def on_gpu(self) -> DemoSettings:
        """The same for a GPU: users begin together and come back at once.

        A turn takes far less time there. With the pauses above each user would find the GPU idle,
        and the KV still where the last turn left it.
        """
        return replace(self, stagger_s=0.0, pause_s=0.0, picture_s=self.picture_s / 10)

    def answer_tokens_of(self, turn: Turn) -> int:
        """How long the answer to `turn` is, in every mode."""
        step = (turn.user + turn.number) % 3 - 1
        return max(1, self.answer_tokens + step * self.answer_tokens // 2)
