"""Look-ahead KV-cache prefetching for LLM serving.

`Cache` decides and keeps the books, `NativeMover` moves blocks between your device memory and a
`HostArena`. The reference engine is in `forebay.engine` and needs torch.
"""

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
