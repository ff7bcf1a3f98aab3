"""What the value of a setting may be: types and ranges, so that each is refused by its own name.

A class of settings lists a bound for each of its fields and calls `settle` when it is made. A value
of another type is refused and not converted (8192.0 is no number of tokens); a whole number may
stand for a real one, and an enumeration takes the text of its members.
"""

from __future__ import annotations

import numbers
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar, cast

from forebay.errors import SettingsError

MOST_SLOTS = 2**31 - 1
"""Slots are named by 32-bit numbers."""

_MOST_WHOLE = 2**63 - 1
_LONG_BITS = 200

Choice = TypeVar("Choice", bound=StrEnum)


class Bound(Protocol):
    """What one setting may be."""

    def __call__(self, name: str, value: object) -> object:
        """`value` in the setting's own type. Raises SettingsError for what it cannot be."""
        ...


def settle(settings: object, bounds: Mapping[str, Bound]) -> None:
    """Check every field of a frozen dataclass and give it its own type. Changes `settings`."""
    for name, bound in bounds.items():
        object.__setattr__(settings, name, bound(name, getattr(settings, name)))


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number from `least` to `most`, at most one of 64 bits; `note` says more about it."""

    least: int
    most: int = _MOST_WHOLE
    note: str = ""

    def __call__(self, name: str, value: object) -> int:
        """See `Bound`."""
        what = f"a whole number, {self.least} or more"
        number = _whole(value)
        if number is not None:
            if self.least <= number <= self.most:
                return number
            if number > self.most:
                what = f"at most {self.most}"
        raise _refused(name, value, what, self.note)


@dataclass(frozen=True, slots=True)
class Real:
    """A number from `least` to `most`, or above `least` if that is not `included`."""

    least: float
    most: float
    included: bool = True
    note: str = ""

    def __call__(self, name: str, value: object) -> float:
        """See `Bound`."""
        number = _real(value)
        if number is not None and self._allows(number):
            return number
        low = f"from {self.least:g}" if self.included else f"above {self.least:g}"
        up = f"to {self.most:g}" if self.included else f"and at most {self.most:g}"
        raise _refused(name, value, f"a number {low} {up}", self.note)

    def _allows(self, number: float) -> bool:
        return self.least <= number <= self.most and (self.included or number > self.least)


@dataclass(frozen=True, slots=True)
class OneOf:
    """A member of an enumeration, or its text."""

    choices: type[StrEnum]

    def __call__(self, name: str, value: object) -> StrEnum:
        """See `Bound`."""
        return chosen(self.choices, name, value)


@dataclass(frozen=True, slots=True)
class Like:
    """Text that a regular expression matches as a whole; `what` says in words which."""

    pattern: str
    what: str

    def __call__(self, name: str, value: object) -> str:
        """See `Bound`."""
        if isinstance(value, str) and re.fullmatch(self.pattern, value):
            return value
        raise _refused(name, value, self.what, "")


@dataclass(frozen=True, slots=True)
class Made:
    """A value of this class, and of no other."""

    kind: type

    def __call__(self, name: str, value: object) -> object:
        """See `Bound`."""
        if isinstance(value, self.kind):
            return value
        plain = {bool: "True or False", str: "text"}
        what = plain.get(self.kind, f"made by {self.kind.__name__}(...)")
        raise _refused(name, value, what, "")


@dataclass(frozen=True, slots=True)
class Some:
    """Any number of values of this class, as a tuple."""

    kind: type

    def __call__(self, name: str, value: object) -> object:
        """See `Bound`."""
        members = _members(value)
        if members is not None and all(isinstance(each, self.kind) for each in members):
            return members
        raise _refused(name, value, f"a tuple of {self.kind.__name__}", "")


@dataclass(frozen=True, slots=True)
class OrNone:
    """None, which means `meaning`, or what `bound` allows."""

    bound: Bound
    meaning: str

    def __call__(self, name: str, value: object) -> object:
        """See `Bound`."""
        try:
            return None if value is None else self.bound(name, value)
        except SettingsError as error:
            raise SettingsError(f"{error}; None {self.meaning}") from error


SECONDS = Real(0.0, 1e9, included=False)
RATE = Real(0.0, 1e18, included=False)
SHARE = Real(0.0, 1.0, note="it is a share of the device pool")


def chosen(
    choices: type[Choice], name: str, value: object, offered: Sequence[Choice] = ()
) -> Choice:
    """The member of `choices` that `value` is, or whose text it is. Raises SettingsError, which
    names those `offered`, or all.
    """
    if isinstance(value, str):
        for choice in choices:
            if choice.value == value:
                return choice
    known = ", ".join(_told(choice) for choice in offered or choices)
    raise _refused(name, value, f"one of {known}", "")


def shown(value: object) -> str:
    """`value` for a message: short, whatever it is."""
    if isinstance(value, int) and value.bit_length() > _LONG_BITS:
        return f"about {'-' if value < 0 else ''}2**{value.bit_length()}"
    return reprlib.repr(value)


def _members(value: object) -> tuple[object, ...] | None:
    return cast("tuple[object, ...]", value) if isinstance(value, tuple) else None


def _whole(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    return int(value)


def _real(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _told(choice: Any) -> str:
    name = choice.name.lower()
    return choice.value if name == choice.value else f"{choice.value} ({name})"


def _refused(name: str, value: object, what: str, note: str) -> SettingsError:
    return SettingsError(
        f"{name} is {shown(value)}, and must be {what}{'; ' if note else ''}{note}"
    )
