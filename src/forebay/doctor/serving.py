"""The server's side: its port, its connections."""

from __future__ import annotations

import errno
import resource
import socket
from collections.abc import Iterator

from forebay.doctor.finding import Finding, Level, Machine, Wanted
from forebay.errors import SettingsError
from forebay.server.settings import ServerSettings

# Beside connections: libraries, model files, the event loop's own.
_OTHER_FILES = 256
_SOMAXCONN = "/proc/sys/net/core/somaxconn"
# As many as the server lets wait to be accepted.
_BACKLOG = 2048


def check_port(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """Whether the server can listen where it shall, and what that address means."""
    where = f"{wanted.host}:{wanted.port}"
    try:
        settings = ServerSettings(host=wanted.host, port=wanted.port)
        _try_to_listen(wanted.host, wanted.port)
    except SettingsError as error:
        yield Finding("port", Level.FAIL, str(error), "the server does not start")
        return
    except OSError as error:
        read = f"{where}: {error.strerror or error}"
        yield Finding("port", Level.FAIL, read, "the server does not start", _todo(machine, error))
        return
    if settings.on_loopback:
        yield Finding("port", Level.OK, f"{where} is free, for this machine's own clients")
    elif machine.environ.get("FOREBAY_OPERATOR_KEY") and machine.environ.get("FOREBAY_API_KEY"):
        yield Finding("port", Level.OK, f"{where} is free, for the net")
    else:
        yield Finding(
            "port",
            Level.NOTE,
            f"{where} is free, for the net",
            "without an API key everybody may use the server; without an operator key nobody sees "
            "its metrics",
            "forebay serve --api-key-file FILE, and FOREBAY_OPERATOR_KEY in its environment",
        )


def check_files(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """Open files against connections."""
    limit = machine.limit(resource.RLIMIT_NOFILE)
    needed = wanted.max_connections + _OTHER_FILES
    if limit is None or limit >= needed:
        yield Finding("open files", Level.OK, "unlimited" if limit is None else f"limit {limit}")
    else:
        yield Finding(
            "open files",
            Level.WARN,
            f"limit {limit} (ulimit -n)",
            f"the server takes {wanted.max_connections} connections and gets stuck at about "
            f"{max(0, limit - _OTHER_FILES)}",
            f"ulimit -n {needed}, docker run --ulimit nofile={needed}, or LimitNOFILE={needed} in "
            "systemd",
        )
    queue = machine.tree.number(_SOMAXCONN)
    if queue is not None and queue < _BACKLOG:
        yield Finding(
            "listen queue",
            Level.NOTE,
            f"{_SOMAXCONN} is {queue}",
            "of many clients that connect at once, some have to try again",
            f"sysctl -w net.core.somaxconn={_BACKLOG}",
        )


def _try_to_listen(host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)


def _todo(machine: Machine, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another --port; `ss -ltnp` says who has this one"
    if error.errno == errno.EACCES:
        first = machine.tree.number("/proc/sys/net/ipv4/ip_unprivileged_port_start") or 1024
        return f"a --port of {first} or more, or AmbientCapabilities=CAP_NET_BIND_SERVICE"
    return "--host with an address of this machine: `ip address` lists them"
