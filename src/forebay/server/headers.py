"""Per-request fields as headers, for clients and proxies that cannot add fields to a body.

A field may be said in the body, in its header, or in both alike. Two that differ are refused: to
let either win would let a client undo what a proxy set, or the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from forebay.server.errors import ApiError

MAX_LENGTH = 256
"""Characters of a text field, in a header or in a body."""
LEAST_PRIORITY, MOST_PRIORITY = -1000, 1000

_PREFIX = b"x-forebay-"
_PRINTABLE = re.compile(rb"[\x20-\x7e]+")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_WHOLE = re.compile(r"-?\d{1,4}")

Value = str | bool | int


def _text(value: str) -> str:
    return value


def _boolean(value: str) -> bool:
    return _BOOLEANS[value.lower()]


def _whole(value: str) -> int:
    if _WHOLE.fullmatch(value) is None or not LEAST_PRIORITY <= int(value) <= MOST_PRIORITY:
        raise ValueError(value)
    return int(value)


_FIELDS: dict[bytes, tuple[str, Callable[[str], Value], str]] = {
    b"x-forebay-cache-salt": ("cache_salt", _text, "text"),
    b"x-forebay-session": ("session", _text, "text"),
    b"x-forebay-no-cache": ("no_cache", _boolean, "true or false"),
    b"x-forebay-no-save": ("no_save", _boolean, "true or false"),
    b"x-forebay-priority": ("priority", _whole, "a whole number, -1000 to 1000"),
}


def fields_of(headers: list[tuple[bytes, bytes]]) -> dict[str, Value]:
    """The fields in `headers`, raw and with names in lower case. Raises ApiError 400."""
    fields: dict[str, Value] = {}
    for name, raw in headers:
        if not name.startswith(_PREFIX):
            continue
        header = name.decode("latin-1")
        if name not in _FIELDS:
            known = ", ".join(known.decode() for known in _FIELDS)
            raise ApiError(400, f"there is no header {header[:64]}; there are {known}")
        field, parse, form = _FIELDS[name]
        if field in fields:
            raise ApiError(400, f"{header} is given twice", param=field)
        if len(raw) > MAX_LENGTH or _PRINTABLE.fullmatch(raw) is None:
            raise ApiError(
                400,
                f"{header} takes 1 to {MAX_LENGTH} printable ASCII characters; the body takes "
                "others",
                param=field,
            )
        try:
            fields[field] = parse(raw.decode("ascii"))
        except (KeyError, ValueError):
            raise ApiError(400, f"{header} is {form}", param=field) from None
    return fields


def described() -> list[dict[str, Any]]:
    """The headers as parameters of an OpenAPI operation."""
    kinds: dict[Callable[[str], Value], dict[str, Any]] = {
        _text: {
            "type": "string",
            "minLength": 1,
            "maxLength": MAX_LENGTH,
            "pattern": r"^[!-~]([ -~]*[!-~])?$",
        },
        _boolean: {"type": "boolean"},
        _whole: {"type": "integer", "minimum": LEAST_PRIORITY, "maximum": MOST_PRIORITY},
    }
    return [
        {
            "name": "-".join(part.capitalize() for part in name.decode().split("-")),
            "in": "header",
            "required": False,
            "description": f"The same as {field} in the body; if both are given, they agree.",
            "schema": kinds[parse],
        }
        for name, (field, parse, _) in _FIELDS.items()
    ]
