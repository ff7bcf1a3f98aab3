"""How long an H200 takes for each part, so that a batch can be planned before it is paid for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from arms import ARMS, Arm
from sizes import Sizes

from forebay.errors import SettingsError

WARM_UP = "warm_up"
PREPARE_S = 50.0
"""The link is measured and vLLM imported; and what the first engine of a batch compiles is found by
the others.
"""
END_S = 5.0
"""An engine ends."""

# Seconds of the first round, and of each further one.
ROUND_S: dict[str, tuple[float, float]] = {
    WARM_UP: (3.0, 3.0),
    "solo": (6.0, 6.0),
    "backlog_64": (17.0, 17.0),
    "backlog_16": (14.0, 14.0),
    "no_hits": (4.5, 4.5),
    "itl": (17.0, 17.0),
    "thrash": (16.0, 7.0),
    "convoy": (6.0, 6.0),
    "accuracy": (40.0, 40.0),
}
_WITHOUT_TIER = {"solo": 4.5, "backlog_64": 32.0, "backlog_16": 28.0}
"""Everything is computed again; and there is no hit in host memory to wait for."""
_START_S = 42.0
_START_OURS_S = 47.0
_START_NATIVE_S = 56.0
"""Longer, since they pin their memory before they are up."""


@dataclass(frozen=True, slots=True)
class Planned:
    """An arm, and how many rounds of each workload it runs."""

    arm: Arm
    rounds: Mapping[str, int]

    @classmethod
    def parse(cls, text: str) -> Planned:
        """From "forebay:solo=4,backlog_64,no_hits=5". Raises SettingsError for others."""
        name, _, told = text.partition(":")
        rounds: dict[str, int] = {}
        for each in told.split(",") if told else []:
            workload, _, count = each.partition("=")
            if workload not in ROUND_S or not (count or "1").isdecimal():
                raise SettingsError(
                    f"{each!r} of {text!r} is no workload with its rounds, like solo=4; workloads "
                    f"are {', '.join(ROUND_S)}"
                )
            rounds[workload] = int(count or 1)
        if name not in ARMS:
            raise SettingsError(f"{name!r} is no arm; arms are {', '.join(ARMS)}")
        return cls(ARMS[name], rounds)


Group = Sequence[Planned]


def parse(groups: Sequence[str]) -> list[Group]:
    """The groups that the command line names."""
    return [[Planned.parse(text) for text in group.split("+")] for group in groups]


def start_s(sizes: Sizes, arm: Arm) -> float:
    """Until an arm's engine is up and its host memory is there; 0 in a rehearsal."""
    if not sizes.gpu:
        return 0.0
    if arm.connector is None:
        return _START_S
    return _START_OURS_S if arm.ours else _START_NATIVE_S


def round_s(sizes: Sizes, arm: Arm, workload: str, number: int) -> float:
    """One round of a workload on an arm; 0 in a rehearsal."""
    if not sizes.gpu:
        return 0.0
    if arm.connector is None and workload in _WITHOUT_TIER and arm.pool != "all_resident_blocks":
        return _WITHOUT_TIER[workload]
    return ROUND_S[workload][min(number, 1)]


def turns(group: Group) -> Iterator[tuple[Planned, str, int]]:
    """What a group runs, in order: of each workload every round on all arms, and who is first
    changes from round to round.
    """
    for workload in dict.fromkeys(name for planned in group for name in planned.rounds):
        most = max(planned.rounds.get(workload, 0) for planned in group)
        for number in range(most):
            for planned in group if number % 2 == 0 else group[::-1]:
                if number < planned.rounds.get(workload, 0):
                    yield planned, workload, number


def table(groups: Sequence[Group], sizes: Sizes, seconds: float) -> str:
    """The plan as text: what begins when, and what does not fit into `seconds`."""
    lines = [f"{'at':>6} {'for':>6}"]
    at_s = PREPARE_S if sizes.gpu else 0.0
    for group in groups:
        steps = [(f"{each.arm.name} starts", start_s(sizes, each.arm)) for each in group]
        steps += [
            (f"{each.arm.name}: {WARM_UP}", round_s(sizes, each.arm, WARM_UP, 0)) for each in group
        ]
        steps += [
            (f"{each.arm.name}: {workload} {number}", round_s(sizes, each.arm, workload, number))
            for each, workload, number in turns(group)
        ]
        if sizes.gpu:
            steps.append(("they end", END_S * len(group)))
        for what, took_s in steps:
            late = "   DOES NOT FIT" if at_s + took_s > seconds else ""
            lines.append(f"{at_s:6.0f} {took_s:6.0f}  {what}{late}")
            at_s += took_s
    lines.append(f"{at_s:6.0f} of {seconds:.0f} s")
    return "\n".join(lines)
