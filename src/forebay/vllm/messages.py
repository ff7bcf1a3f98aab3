"""What the two halves say to each other, once for each step of vLLM: plain picklable values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.transfer.messages import Report, Transfer, TransferClass


@dataclass(frozen=True, slots=True)
class Expedite:
    """See `Mover.expedite`."""

    ids: tuple[int, ...]
    transfer_class: TransferClass
    deadline_s: float


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """From a slot on the device to another, before the step."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class Orders:
    """What the worker does around step `step`, from the first field to the last.

    `settle` are saves that read slots which this step may write: they end before it starts.
    `copies` come before the step, which reads what they bring. `idle` says that the step computes
    nothing.
    """

    step: int
    settle: tuple[int, ...]
    copies: tuple[BlockCopy, ...]
    submit: Sequence[Transfer]
    cancel: tuple[int, ...]
    expedite: tuple[Expedite, ...]
    idle: bool


@dataclass(frozen=True, slots=True)
class News:
    """What the worker says with the output of a step."""

    report: Report
    host_slots: int
    """Host slots, from the first, that can be used by now."""
