"""Typed errors. Each says what was wrong and what to do about it.

A *fault of the cache* (a copy that failed, a link that stopped, a lost block) is not an error: it
becomes a miss with a reason. Errors are for a caller who asked for what cannot be, or who broke the
order of calls.
"""

from __future__ import annotations


class ForebayError(Exception):
    """Every error that Forebay raises on purpose."""


class SettingsError(ForebayError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class CalibrationError(SettingsError):
    """A calibration file that is not whole, or is of another format than this version reads."""


class RequestError(ForebayError, ValueError):
    """A request that can never be served as it stands (too long, empty, tokens out of range)."""


class QueueFullError(RequestError):
    """As many requests wait as may; the same request can be served later."""


class ModelError(ForebayError):
    """A model folder that cannot be read, or a model that needs what is not supported."""


class ProtocolError(ForebayError, RuntimeError):
    """Calls in an order that would break ownership: a fault of the caller, not of the cache."""


class NotIssuedError(ProtocolError):
    """A wait on a transfer whose windows have not all been handed to the link yet."""


class ParentMissingError(ProtocolError):
    """A block was to be published under a path that is not published."""


class NotLeafError(ProtocolError):
    """A block was to be removed while a published child still depends on it."""


class LinkTimeoutError(ForebayError, TimeoutError):
    """A bounded wait on the link passed its bound."""


class DeviceError(ForebayError, RuntimeError):
    """The driver of a device refused a call. The text has its name for the reason."""


class CorruptBlockError(ForebayError):
    """A block read from the cache differs from what its step wrote. Found in debug mode only."""
