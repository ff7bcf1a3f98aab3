"""The process around the application: sockets, signals, and an end within a bound."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from forebay.engine.engine import Engine
from forebay.errors import SettingsError
from forebay.server.app import make_app
from forebay.server.endpoints import new_service
from forebay.server.front import Front
from forebay.server.metrics import Metrics
from forebay.server.settings import ServerSettings

logger = logging.getLogger("forebay.server")

# Beyond the drain: to write the last events and to close.
_CLOSE_S = 5
_BACKLOG = 2048
# Longer than the minute for which proxies keep a connection, so that none is closed under them.
_KEEP_ALIVE_S = 75


class Server(uvicorn.Server):
    """Serves `engine`, which it owns from now on, until SIGTERM or SIGINT. Call `run` once.

    `place` is a socket that was :func:`reserved`; None makes one.
    """

    def __init__(
        self, engine: Engine, settings: ServerSettings, place: socket.socket | None = None
    ) -> None:
        name = settings.model_name or public_name(engine.loaded.name)
        metrics = Metrics(name)
        self.front = Front(engine, settings, metrics)
        metrics.watch(
            lambda: self.front.stats, lambda: self.front.state, engine.pool.geometry.block_bytes
        )
        self.socket = _listening(place or reserved(settings), settings)
        self._drain_s = settings.drain_s
        super().__init__(
            uvicorn.Config(
                make_app(new_service(self.front, metrics, settings, name)),
                http=_protocol(settings),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(settings.drain_s) + _CLOSE_S,
            )
        )

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal, or `should_exit`."""
        super().run(sockets or [self.socket])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take nothing new, let what runs end within the drain, then end the rest."""
        self.front.drain(self._drain_s)
        await super().shutdown(sockets)


def public_name(model: str) -> str:
    """What clients call a model: a hub id as it is, a folder by its last part."""
    folder = Path(model)
    name = folder.resolve().name if folder.is_dir() else model
    return name.encode(errors="replace").decode() or "model"


def reserved(settings: ServerSettings) -> socket.socket:
    """A socket at the settings' address that does not listen yet: before the model is loaded.

    Whoever tries to connect meanwhile is refused. Raises SettingsError if it cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        place = socket.socket(family, kind, protocol)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit these. The first also ends one whose window stays shut.
        user_timeout = getattr(socket, "TCP_USER_TIMEOUT", None)
        if user_timeout is not None:
            milliseconds = int(settings.client_timeout_s * 1000)
            place.setsockopt(socket.IPPROTO_TCP, user_timeout, milliseconds)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        place.bind(address)
    except OSError as error:
        raise _not_had(settings, error) from error
    return place


def _listening(place: socket.socket, settings: ServerSettings) -> socket.socket:
    try:
        place.listen(_BACKLOG)
    except OSError as error:
        raise _not_had(settings, error) from error
    place.setblocking(False)
    return place


def _not_had(settings: ServerSettings, error: OSError) -> SettingsError:
    return SettingsError(
        f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}; choose "
        "another host or port"
    )


def _protocol(settings: ServerSettings) -> type[asyncio.Protocol]:
    """uvicorn's protocol with a bound on the time and the size of a request's headers."""
    most_bytes, timeout_s = settings.max_header_bytes, settings.header_timeout_s
    most_connections = settings.max_connections

    class BoundedProtocol(HttpToolsProtocol):
        _header_bytes = 0
        _in_headers = True
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._deadline = self.loop.call_later(timeout_s, self._too_slow)
            if len(self.connections) > most_connections:
                transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_deadline()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._in_headers:
                self._header_bytes += len(data)
                if self._deadline is None:
                    self._deadline = self.loop.call_later(timeout_s, self._too_slow)
            super().data_received(data)
            # What came with the headers may be body: only what the parser still wants counts.
            if self._in_headers and self._header_bytes > most_bytes:
                logger.warning("a request's headers exceed %s bytes", most_bytes)
                self.send_400_response("The headers are too large.")

        def on_headers_complete(self) -> None:
            self._in_headers = False
            self._end_deadline()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            # What comes next are the next request's headers.
            self._in_headers, self._header_bytes = True, 0
            super().on_message_complete()

        def _too_slow(self) -> None:
            self._deadline = None
            if not self.transport.is_closing():
                self.transport.abort()

        def _end_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return BoundedProtocol
