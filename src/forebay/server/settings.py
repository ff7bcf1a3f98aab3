"""What an operator sets of the server: where it listens, who may use it, and every bound."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from forebay.bounds import SECONDS, Bound, Made, OrNone, Real, Whole, settle
from forebay.config import MIB
from forebay.errors import SettingsError


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that clients send; a key with `salt` is a tenant whose blocks nobody else meets."""

    key: str = field(repr=False)
    salt: str | None = None

    def __post_init__(self) -> None:
        if not self.key or not self.key.isascii() or not self.key.isprintable() or " " in self.key:
            raise SettingsError("an API key is printable ASCII without spaces, and not empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Without `api_keys` everybody may ask. Without `operator_key` nobody may see metrics and the
    live page and change the mode, but where there are no keys at all and the server listens on
    loopback only, everybody.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    # What clients call the model; "": its own name, of a folder the last part.
    model_name: str = ""
    api_keys: tuple[ApiKey, ...] = ()
    operator_key: str | None = field(default=None, repr=False)
    # A prompt of a million token ids has 8 MB.
    max_body_bytes: int = 16 * MIB
    max_header_bytes: int = 64 * 1024
    # From a connection's first byte to the end of a request's headers, and for its whole body.
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    # Connections at once; more are closed as they come.
    max_connections: int = 4096
    # Answers that one HTTP request may ask for: its prompts times n.
    max_answers: int = 64
    # A client that takes no byte for so long is gone.
    client_timeout_s: float = 60.0
    # Proxies close streams that are silent for a minute; a comment comes after this or twice this.
    keep_alive_s: float = 15.0
    # Live pages that may be open at once.
    max_watchers: int = 16
    # After SIGTERM running answers have so long to end.
    drain_s: float = 30.0
    # Conversations whose last match is remembered, a few hundred bytes each.
    max_sessions: int = 4096

    def __post_init__(self) -> None:
        settle(self, SERVER_BOUNDS)
        if len({key.key for key in self.api_keys}) < len(self.api_keys):
            raise SettingsError("an API key is listed twice; one key has one salt")

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine's own clients can reach the server."""
        return is_loopback(self.host)


SERVER_BOUNDS: dict[str, Bound] = {
    "host": Made(str),
    "port": Whole(0, 65535, note="0 takes a free one"),
    "model_name": Made(str),
    "api_keys": Made(tuple),
    "operator_key": OrNone(Made(str), "is for no operator"),
    "max_body_bytes": Whole(1),
    "max_header_bytes": Whole(1),
    "header_timeout_s": SECONDS,
    "body_timeout_s": SECONDS,
    "max_connections": Whole(1),
    "max_answers": Whole(1),
    "client_timeout_s": SECONDS,
    "keep_alive_s": SECONDS,
    "max_watchers": Whole(0),
    "drain_s": Real(0.0, SECONDS.most),
    "max_sessions": Whole(0),
}
"""What each field of `ServerSettings` may be."""


def is_loopback(host: str) -> bool:
    """Whether a name or address can only be this machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
