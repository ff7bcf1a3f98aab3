"""For Schemathesis: of the requests that fit the schema, some are made to fit the model too.

What the schema cannot say is that a name is the model's, that an answer fits its context, and that
a header and a body agree. Every other request is left as it was.
"""

from __future__ import annotations

import itertools
from typing import Any

import schemathesis
from schemathesis.generation import GenerationMode

_turn = itertools.count()
_ONLY_TOGETHER = ("stream_options", "top_logprobs", "min_tokens")


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    if case.meta is None or case.meta.generation.mode is not GenerationMode.POSITIVE:
        return
    if not isinstance(case.body, dict) or next(_turn) % 3 == 0:
        return
    case.body.pop("model", None)
    for name in _ONLY_TOGETHER:
        case.body.pop(name, None)
    for name in ("max_tokens", "max_completion_tokens"):
        if isinstance(case.body.get(name), int):
            case.body[name] = 1 + case.body[name] % 8
    if isinstance(case.body.get("n"), int):
        case.body["n"] = 1 + case.body["n"] % 3
    for name, value in list((case.headers or {}).items()):
        field = name.lower().removeprefix("x-forebay-").replace("-", "_")
        if case.body.get(field) is not None and case.body[field] != value:
            del case.headers[name]
