"""The ASGI application: endpoints, errors in OpenAI's form, and the OpenAPI description."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from forebay.errors import ForebayError
from forebay.release import installed_version
from forebay.server.access import Access
from forebay.server.docs import docs_routes
from forebay.server.endpoints import Service, routes
from forebay.server.errors import ApiError, ErrorBody, api_error
from forebay.server.guard import OPERATOR_PATHS, Guard
from forebay.server.settings import ServerSettings
from forebay.server.wire import ChatChunk, ChatCompletion, Completion, ModelList, ModeState, Version

logger = logging.getLogger("forebay.server")

_WIRE = (ChatChunk, ChatCompletion, Completion, ErrorBody, ModelList, ModeState, Version)
_MOST_TOLD = 3
# A part of a field's path; others name the types that were tried.
_FIELD = re.compile(r"(?!(str|int|float|bool)$)\w+")
_SEE_DOCS = {
    404: "there is no such path; /docs lists those that are there",
    405: "this path takes another method; /docs lists them",
}


def make_app(service: Service) -> FastAPI:
    """The application over `service`. Its lifespan starts and ends the engine's thread."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.front.start()
        try:
            yield
        finally:
            await service.front.close()
            service.prompts.close()

    app = FastAPI(
        title="Forebay",
        version=installed_version(),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.include_router(routes(service))
    app.include_router(docs_routes())
    app.add_middleware(Guard, access=Access(service.settings), settings=service.settings)  # pyright: ignore[reportArgumentType]
    app.add_exception_handler(RequestValidationError, _not_valid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ForebayError, _forebay_error)
    app.add_exception_handler(Exception, _bug)
    app.openapi = _Description(app, service.settings)  # pyright: ignore[reportAttributeAccessIssue]
    return app


class _Description:
    """The OpenAPI description, made when it is first asked for."""

    def __init__(self, app: FastAPI, settings: ServerSettings) -> None:
        self._app = app
        self._keys = bool(settings.api_keys)
        self._operator_key = settings.operator_key is not None
        self._made: dict[str, Any] | None = None

    def __call__(self) -> dict[str, Any]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def _make(self) -> dict[str, Any]:
        app = self._app
        made = get_openapi(
            title=app.title,
            version=app.version,
            description="An OpenAI-compatible server with look-ahead KV-cache prefetching.",
            routes=app.routes,
        )
        components = made.setdefault("components", {})
        _, schemas = msgspec.json.schema_components(
            _WIRE, ref_template="#/components/schemas/{name}"
        )
        components.setdefault("schemas", {}).update(schemas)
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in made["paths"].items():
            for operation in operations.values():
                # Errors of validation are 400, as OpenAI's.
                operation["responses"].pop("422", None)
                operators = path in OPERATOR_PATHS
                if self._operator_key if operators else self._keys and path.startswith("/v1/"):
                    operation["security"] = [{"key": []}]
        return made


def _told(error: ApiError) -> Response:
    response = Response(error.body, status_code=error.status)
    response.raw_headers = list(error.headers)
    return response


async def _not_valid(request: Request, error: Exception) -> Response:
    """What was wrong with which field, without repeating what was sent."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A page of another origin can send every other type without being asked first.
        return _told(ApiError(415, "the body is JSON: send content-type: application/json"))
    found = error.errors() if isinstance(error, RequestValidationError) else []
    first = found[0]["loc"] if found else ()
    param = str(first[1]) if len(first) > 1 else None
    return _told(ApiError(400, _wrong(found) or "the body is not valid", param=_plain(param)))


def _wrong(found: Sequence[Any]) -> str:
    """Each field with what is wrong with it, once. Where a field may be of several kinds, what is
    wrong with a part of it tells more than that it is not of the other kinds.
    """
    told: dict[tuple[str, ...], dict[str, None]] = {}
    for one in found[:_MOST_TOLD]:
        where = tuple(str(part) for part in one["loc"][1:] if _FIELD.fullmatch(str(part)))
        told.setdefault(where, {})[str(one["msg"])] = None
    outer = {where[:depth] for where in told for depth in range(1, len(where))}
    return "; ".join(
        f"{'.'.join(where)[:200]}: {message}" if where else message
        for where, messages in told.items()
        if where not in outer
        for message in messages
    )


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return await _bug(request, error)
    # The router's own words for these, "Not Found" and the like, say nothing of what there is.
    said = _SEE_DOCS.get(error.status_code, str(error.detail))
    response = _told(ApiError(error.status_code, said))
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    if error.status_code == 405:
        # The router knows of one route only, where a path has one for each method.
        paths = request.app.openapi()["paths"].get(request.url.path, {})
        if paths:
            response.headers["allow"] = ", ".join(sorted(method.upper() for method in paths))
    return response


async def _forebay_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, ForebayError):
        return await _bug(_, error)
    return _told(api_error(error))


async def _bug(_: Request, error: Exception) -> Response:
    logger.error("a request failed", exc_info=error)
    return _told(ApiError(500, "the server failed on this request; its log says why"))


def _plain(text: str | None) -> str | None:
    return None if text is None else text.encode(errors="replace").decode()[:200]
