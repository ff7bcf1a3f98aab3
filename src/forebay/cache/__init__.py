"""The cache: the one object that an engine talks to."""

from forebay.cache.account import CacheStats
from forebay.cache.cache import Cache

__all__ = ["Cache", "CacheStats"]
