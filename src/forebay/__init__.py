"""Look-ahead KV-cache prefetching for LLM serving.

`Cache` decides and keeps the books, `NativeMover` moves blocks between your device memory and a
`HostArena`. The reference engine is in `forebay.engine` and needs torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.cache import Cache, CacheStats
    from forebay.config import BatchSettings, CacheSettings, SaveMode
    from forebay.core.batch import Batcher
    from forebay.core.modes import Mode
    from forebay.core.requests import Growth, NotYet, Request, Ticket
    from forebay.errors import ForebayError
    from forebay.geometry import Geometry, geometry_from_config
    from forebay.transfer.arena import HostArena
    from forebay.transfer.native import NativeMover
    from forebay.transfer.pool import Pool

__all__ = [
    "BatchSettings",
    "Batcher",
    "Cache",
    "CacheSettings",
    "CacheStats",
    "ForebayError",
    "Geometry",
    "Growth",
    "HostArena",
    "Mode",
    "NativeMover",
    "NotYet",
    "Pool",
    "Request",
    "SaveMode",
    "Ticket",
    "geometry_from_config",
]

# Imported when first used: where the extension does not load, `forebay doctor` must, to say why.
_HOMES = {
    "forebay.cache": ("Cache", "CacheStats"),
    "forebay.config": ("BatchSettings", "CacheSettings", "SaveMode"),
    "forebay.core.batch": ("Batcher",),
    "forebay.core.modes": ("Mode",),
    "forebay.core.requests": ("Growth", "NotYet", "Request", "Ticket"),
    "forebay.errors": ("ForebayError",),
    "forebay.geometry": ("Geometry", "geometry_from_config"),
    "forebay.transfer.arena": ("HostArena",),
    "forebay.transfer.native": ("NativeMover",),
    "forebay.transfer.pool": ("Pool",),
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("forebay.release").installed_version()
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(home), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
