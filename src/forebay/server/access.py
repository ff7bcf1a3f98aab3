"""Who may ask what: bearer keys compared in constant time, before a body is read.

A tenant's salt goes around what the client sends as `cache_salt`, so that no client can name its
way into another's namespace.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import dataclass
from urllib.parse import urlsplit

from forebay.server.errors import ApiError
from forebay.server.settings import ServerSettings, is_loopback

_Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose request it is: the salt that its key is bound to, if any."""

    salt: str | None = None

    def salted(self, cache_salt: str | None) -> str:
        """The salt of a request; different tenants' never agree."""
        return json.dumps([self.salt, cache_salt or ""])

    @staticmethod
    def of(salted: str) -> Tenant:
        """Whose request :meth:`salted` made this of."""
        return Tenant(json.loads(salted)[0])

    def owns(self, salted: str) -> bool:
        """Whether :meth:`salted` made this of a request of the same tenant."""
        return salted.startswith(json.dumps([self.salt])[:-1] + ",")


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who watches: a tenant, who sees what is its own, or, with None, an operator, who sees all."""

    tenant: Tenant | None = None


class Access:
    """Checks keys. Keeps digests, so that a comparison says nothing of a key's length."""

    def __init__(self, settings: ServerSettings) -> None:
        self._tenants = [(_digest(k.key.encode()), Tenant(k.salt)) for k in settings.api_keys]
        operator = settings.operator_key
        self._operator = None if operator is None else _digest(operator.encode())
        self._open_to_operators = (
            operator is None and settings.on_loopback and not settings.api_keys
        )

    def tenant(self, headers: _Headers) -> Tenant:
        """Whose request this is. Raises ApiError 401."""
        if not self._tenants:
            return Tenant()
        given = _digest(_bearer(headers))
        found: Tenant | None = None
        for digest, tenant in self._tenants:
            # Every key is compared, so that the time does not tell which one was near.
            if hmac.compare_digest(digest, given):
                found = tenant
        if found is None:
            raise _unauthorised()
        return found

    def require_operator(self, headers: _Headers) -> None:
        """Raises ApiError 401, or 403 where no operator key was set and the net can reach us.

        Without a key, only by a name of this machine itself: a page from elsewhere, whose own name
        was made to lead here, would otherwise be let in by the browser.
        """
        if self._open_to_operators:
            if not _names_loopback(headers):
                raise ApiError(
                    403, "without an operator key this is open to localhost and 127.0.0.1 only"
                )
            return
        if self._operator is None:
            raise ApiError(
                403, "this needs an operator key, and the server was started without one"
            )
        if not hmac.compare_digest(self._operator, _digest(_bearer(headers))):
            raise _unauthorised()

    def viewer(self, headers: _Headers) -> Viewer:
        """Who may watch. A key without a salt has nothing of its own. Raises ApiError 401, 403."""
        given = _digest(_bearer(headers))
        found: Tenant | None = None
        for digest, tenant in self._tenants:
            if hmac.compare_digest(digest, given):
                found = tenant
        if found is None or self._is_operator(given):
            self.require_operator(headers)
            return Viewer()
        if found.salt is None:
            raise ApiError(
                403,
                "this key is bound to no tenant, so nothing is its own: use an operator key, or a "
                "key with a salt",
            )
        return Viewer(found)

    def _is_operator(self, given: bytes) -> bool:
        return self._operator is not None and hmac.compare_digest(self._operator, given)


def _bearer(headers: _Headers) -> bytes:
    given = [value for name, value in headers if name == b"authorization"]
    if len(given) != 1:
        return b""
    scheme, _, key = given[0].partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _names_loopback(headers: _Headers) -> bool:
    """Whether every `Host` that was sent is this machine, by its loopback name or address."""
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    try:
        return all(is_loopback(urlsplit(f"//{host}").hostname or "") for host in hosts)
    except ValueError:  # not a host at all
        return False


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _unauthorised() -> ApiError:
    return ApiError(401, "a valid key is needed: Authorization: Bearer KEY", code="invalid_api_key")
