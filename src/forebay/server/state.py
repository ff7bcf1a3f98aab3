"""The state of a server."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Whether requests are taken."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    DEAD = "dead"
