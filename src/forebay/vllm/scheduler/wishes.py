"""What a request asks of the cache: `kv_transfer_params` under "forebay", or vLLM's `kv_hints`.

vLLM lets no connector refuse a request, and this comes from whoever may send one. So nothing here
raises: what is not understood is left out, counted by why, and named in the answer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, cast

from forebay.vllm.adapter import VllmRequest

NAME = "forebay"
HINT_ACTION = "prefetch"
"""The type of the actions in `kv_hints` that are hints."""
MOST_ETA_S = 3600.0

_FLAGS = ("no_cache", "no_save")
_TIMES = ("eta_s", "expiry_s")
# What an answer repeats of somebody's words.
_MOST_NAMED = 8
_MOST_LETTERS = 60


class Ignored(StrEnum):
    """Why a part of what a request asks is left out."""

    UNKNOWN = "unknown"
    TYPE = "type"
    VALUE = "value"
    CONFLICT = "conflict"


_WHY = {
    Ignored.UNKNOWN: f"not known; known are {', '.join((*_FLAGS, 'hint'))}, and in hint "
    f"{', '.join(_TIMES)}",
    Ignored.TYPE: "not of the right type: no_cache and no_save are true or false, hint is an "
    "object, times are seconds",
    Ignored.VALUE: f"out of range: eta_s is 0 to {MOST_ETA_S:g}, expiry_s above 0",
    Ignored.CONFLICT: "a hint needs max_tokens 1, and no no_cache",
}


@dataclass(frozen=True, slots=True)
class AskedHint:
    """A request like this one comes in `eta_s` seconds; after `expiry_s` more it does not."""

    eta_s: float
    expiry_s: float | None


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a request asks of the cache. `ignored`: names that were left out, and why.

    `said`: it named this cache at all, and is told what came of it.
    """

    no_cache: bool = False
    no_save: bool = False
    hint: AskedHint | None = None
    ignored: tuple[tuple[str, Ignored], ...] = ()
    said: bool = False

    @classmethod
    def of(cls, request: VllmRequest) -> Wishes:
        """The wishes of `request`."""
        ignored: list[tuple[str, Ignored]] = []
        params = _mapping(request.kv_transfer_params)
        given = params.get(NAME)
        asked = _mapping(given)
        if given is not None and not isinstance(given, dict):
            ignored.append((NAME, Ignored.TYPE))
        flags = {name: _flag(asked, name, ignored) for name in _FLAGS}
        ignored += [(name, Ignored.UNKNOWN) for name in asked if name not in (*_FLAGS, "hint")]
        hint = _hint("hint", asked["hint"], ignored) if "hint" in asked else None
        for payload in _hinted(request):
            hint = hint or _hint("kv_hints", payload, ignored)
        no_cache = flags["no_cache"] or request.skip_reading_prefix_cache
        if hint is not None and (no_cache or request.max_tokens != 1):
            ignored.append(("hint", Ignored.CONFLICT))
            hint = None
        return cls(
            no_cache=bool(no_cache),
            no_save=flags["no_save"],
            hint=hint,
            ignored=tuple(ignored),
            said=given is not None,
        )

    @property
    def keeps_out(self) -> bool:
        """Whether nothing is loaded or saved for it."""
        return self.no_cache and self.no_save

    def kept_out(self) -> Wishes:
        """The same of a request that keeps out. A hint of it is refused."""
        return replace(self, no_cache=True, no_save=True)

    def complaints(self) -> dict[str, str]:
        """What the client is told of what was left out, by name."""
        named = self.ignored[:_MOST_NAMED]
        return {str(name)[:_MOST_LETTERS]: _WHY[why] for name, why in named}


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _flag(asked: Mapping[str, Any], name: str, ignored: list[tuple[str, Ignored]]) -> bool:
    value = asked.get(name, False)
    if not isinstance(value, bool):
        ignored.append((name, Ignored.TYPE))
        return False
    return value


def _hint(where: str, given: object, ignored: list[tuple[str, Ignored]]) -> AskedHint | None:
    """The hint in `given`: all of it is understood, or it is none."""
    if not isinstance(given, dict):
        ignored.append((where, Ignored.TYPE))
        return None
    asked, before = _mapping(cast("object", given)), len(ignored)
    ignored += [(f"{where}.{name}", Ignored.UNKNOWN) for name in asked if name not in _TIMES]
    for name in _TIMES:
        if name in asked:
            ignored += [(f"{where}.{name}", why) for why in _time(name, asked[name])]
    if len(ignored) > before:
        return None
    expiry_s = asked.get("expiry_s")
    return AskedHint(float(asked.get("eta_s", 0.0)), None if expiry_s is None else float(expiry_s))


def _time(name: str, value: object) -> Iterator[Ignored]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        yield Ignored.TYPE
        return
    # An int may be too much for a float.
    right = 0.0 <= value <= MOST_ETA_S if name == "eta_s" else 0.0 < value <= sys.float_info.max
    if not right:
        yield Ignored.VALUE


def _hinted(request: VllmRequest) -> Iterator[object]:
    """The payloads of hints in vLLM's envelope, in the versions that have one."""
    envelope = getattr(request, "kv_hints", None)
    for action in getattr(envelope, "actions", None) or ():
        if action.action_type == HINT_ACTION:
            yield action.payload
