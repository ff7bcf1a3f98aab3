"""The modes: every opponent of look-ahead is a flag of the same code, not another program.

b0 recompute, b1 load inside the step, b2 load layer by layer under the own prefill, b3 load
asynchronously from the request's turn on, b4 look ahead over the queue and over hints, b5 over
hints, b6 an oracle with loads that cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from forebay.bounds import chosen
from forebay.errors import SettingsError


class Mode(StrEnum):
    """How blocks in host memory come back to the device."""

    RECOMPUTE = "b0"
    SYNCHRONOUS = "b1"
    LAYERED = "b2"
    ASYNCHRONOUS = "b3"
    LOOK_AHEAD = "b4"
    HINTS = "b5"
    ORACLE = "b6"


@dataclass(frozen=True, slots=True)
class Policy:
    """What a mode allows. `stalls_step`: a step waits for the loads of its requests."""

    host_tier: bool
    look_ahead: bool
    stalls_step: bool


_POLICIES: dict[Mode, Policy] = {
    Mode.RECOMPUTE: Policy(host_tier=False, look_ahead=False, stalls_step=False),
    Mode.SYNCHRONOUS: Policy(host_tier=True, look_ahead=False, stalls_step=True),
    Mode.ASYNCHRONOUS: Policy(host_tier=True, look_ahead=False, stalls_step=False),
    Mode.LOOK_AHEAD: Policy(host_tier=True, look_ahead=True, stalls_step=False),
}

_WHY_REFUSED: dict[Mode, str] = {
    Mode.SYNCHRONOUS: "it stalls steps, and they are another engine's",
    Mode.LAYERED: "b3 and b4 load the layers one by one by themselves, when nothing else can run",
    Mode.HINTS: "b4 looks ahead over hints too, wherever somebody gives them",
    Mode.ORACLE: "it needs loads that cost nothing, which only a virtual clock has",
}

MODES = tuple(_POLICIES)
"""Those that an engine with steps of its own can go by."""
UNSTALLED_MODES = tuple(mode for mode, policy in _POLICIES.items() if not policy.stalls_step)
"""Those that can be gone by where the steps are another engine's."""


@dataclass(frozen=True, slots=True)
class ModeOf:
    """A mode that is `usable`, or its text: what a setting may be."""

    usable: tuple[Mode, ...]

    def __call__(self, name: str, value: object) -> Mode:
        """See `Bound`. The error says why a mode that there is cannot be used, and which can."""
        mode = chosen(Mode, name, value, self.usable)
        if mode not in self.usable:
            raise SettingsError(
                f"{name} {mode.value} ({mode.name.lower()}) is not available: "
                f"{_WHY_REFUSED[mode]}; use one of {', '.join(self.usable)}"
            )
        return mode


MODE = ModeOf(MODES)


def policy_of(mode: Mode) -> Policy:
    """The policy of `mode`. Raises SettingsError for one that is not in `MODES`."""
    return _POLICIES[MODE("mode", mode)]


@dataclass(slots=True)
class ModeSwitch:
    """The mode that all parts of one cache go by, so that it can change while they work."""

    mode: Mode
    policy: Policy = field(init=False)
    """What the mode allows now."""

    def __post_init__(self) -> None:
        self.policy = policy_of(self.mode)

    def change(self, mode: Mode, host_slots: int) -> None:
        """Go by `mode` from now on. Raises SettingsError, changing nothing, for one that is not in
        `MODES`, or that needs a host tier where there are no `host_slots`.
        """
        if mode is self.mode:
            return
        mode = MODE("mode", mode)
        policy = _POLICIES[mode]
        if policy.host_tier and not host_slots:
            raise SettingsError(
                f"mode {mode.value} needs a host tier, and this cache was made without one; start "
                "it with host slots, in a mode that has them"
            )
        self.mode, self.policy = mode, policy
