"""The cache: the one object that an engine talks to."""

from forebay.cache.cache import Cache, CacheStats

__all__ = ["Cache", "CacheStats"]
