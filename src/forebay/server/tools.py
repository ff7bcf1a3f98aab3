"""Tool calls in the text of an answer, in the form of Hermes and Qwen:
``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

What is no such call stays text, whatever it looks like.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Call:
    """A function call that the model made; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class ToolCallParser:
    """Parts a growing answer into text and calls."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        """The text and the whole calls that are settled by `text`."""
        self._held += text
        shown: list[str] = []
        calls: list[Call] = []
        while True:
            mark = _CLOSE if self._inside else _OPEN
            at = self._held.find(mark)
            if at < 0:
                break
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            if not self._inside:
                shown.append(before)
            elif (call := _parse(before)) is not None:
                calls.append(call)
            else:
                shown.append(f"{_OPEN}{before}{_CLOSE}")
            self._inside = not self._inside
        if not self._inside:
            safe = len(self._held) - _start_of(_OPEN, self._held)
            shown.append(self._held[:safe])
            self._held = self._held[safe:]
        return "".join(shown), calls

    def finish(self) -> tuple[str, list[Call]]:
        """What is still held back: an answer may end without the closing mark."""
        held, self._held = self._held, ""
        if not self._inside:
            return held, []
        self._inside = False
        call = _parse(held)
        return ("", [call]) if call is not None else (f"{_OPEN}{held}", [])


def _parse(text: str) -> Call | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return Call(f"call_{secrets.token_hex(12)}", value["name"], arguments)


def _start_of(mark: str, text: str) -> int:
    """How many of the last characters of `text` may be the start of `mark`."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0
