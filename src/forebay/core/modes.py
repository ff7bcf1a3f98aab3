"""The modes: every opponent of look-ahead is a flag of the same code, not another program.

b0 recompute, b1 load inside the step, b2 load layer by layer under the own prefill, b3 load
asynchronously from the request's turn on, b4 look ahead over the queue and over hints, b5 over
hints, b6 an oracle with loads that cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from forebay.bounds import OneOf, chosen
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
    Mode.LAYERED: "b3 and b4 load the layers one by one by themselves, when nothing else can run",
    Mode.HINTS: "b4 looks ahead over hints too, wherever somebody gives them",
    Mode.ORACLE: "it needs loads that cost nothing, which only a virtual clock has",
}


MODE = OneOf(Mode, tuple(_POLICIES))
"""What a mode may be: those that can be used are named."""


def chosen_mode(value: object) -> Mode:
    """The mode that `value` is, or whose text it is. Raises SettingsError."""
    return chosen(Mode, "mode", value, tuple(_POLICIES))


def policy_of(mode: Mode) -> Policy:
    """The policy of `mode`. Raises SettingsError for a mode that this build does not carry."""
    policy = _POLICIES.get(mode)
    if policy is None:
        mode = chosen_mode(mode)
        usable = ", ".join(known.value for known in _POLICIES)
        raise SettingsError(
            f"mode {mode.value} ({mode.name.lower()}) is not available: {_WHY_REFUSED[mode]}; "
            f"use one of {usable}"
        )
    return policy


@dataclass(slots=True)
class ModeSwitch:
    """The mode that all parts of one cache go by, so that it can change while they work."""

    mode: Mode
    policy: Policy = field(init=False)
    """What the mode allows now."""

    def __post_init__(self) -> None:
        self.policy = policy_of(self.mode)

    def change(self, mode: Mode, host_slots: int) -> None:
        """Go by `mode` from now on. Raises SettingsError if it needs a host tier that is not."""
        if mode is self.mode:
            return
        mode = chosen_mode(mode)
        if policy_of(mode).host_tier and not host_slots:
            raise SettingsError(
                f"mode {mode.value} needs a host tier, and this cache was made without one; start "
                "it with host slots, in a mode that has them"
            )
        self.mode, self.policy = mode, policy_of(mode)
