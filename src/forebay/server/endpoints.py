"""The endpoints: from a checked body to the plan of an answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from numpy.typing import NDArray

from forebay.core.modes import MODE
from forebay.errors import SettingsError
from forebay.release import installed_version
from forebay.server.access import Tenant
from forebay.server.driver import Job
from forebay.server.errors import ApiError, ErrorBody
from forebay.server.exchange import Exchange
from forebay.server.front import Front
from forebay.server.generation import Generation, Plan
from forebay.server.headers import MAX_LENGTH, described, fields_of
from forebay.server.metrics import CONTENT_TYPE, Metrics
from forebay.server.prompts import Prompts
from forebay.server.schemas import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    ModeRequest,
)
from forebay.server.settings import ServerSettings
from forebay.server.shapes import ChatShape, CompletionShape, UsageSoFar
from forebay.server.state import State
from forebay.server.watching import watching_routes
from forebay.server.wire import ChatChunk, ChatCompletion, Completion, ModelList, ModeState, Version
from forebay.server.wire import Model as ModelCard

# OpenAI's default for plain completions.
_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Service:
    """What the endpoints work with."""

    front: Front
    prompts: Prompts
    metrics: Metrics
    settings: ServerSettings
    model_name: str
    started: int


def _answers(kind: type, *errors: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI description of an endpoint's answers."""
    described: dict[int | str, dict[str, Any]] = {200: _answer("The answer.", kind)}
    for status in errors:
        described[status] = _answer("An error.", ErrorBody)
    return described


def _answer(text: str, kind: type) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _generated(kind: type, event: type) -> dict[int | str, dict[str, Any]]:
    """That of an endpoint which answers as a whole, or with a stream of events."""
    described = _answers(kind, *_GENERATION_ERRORS)
    described[200]["content"]["text/event-stream"] = {
        "schema": {
            "type": "object",
            "description": f"Of a stream, one event: data is a {event.__name__}, at last [DONE].",
            "properties": {"data": {"type": "string"}},
            "required": ["data"],
        }
    }
    return described


_GENERATION_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503)


def routes(service: Service) -> APIRouter:
    """All endpoints over `service`."""
    router = APIRouter(default_response_class=Response)
    _add_generation(router, service)
    _add_information(router, service)
    _add_operation(router, service)
    keep_alive_s = service.settings.keep_alive_s
    router.include_router(watching_routes(service.front, service.model_name, keep_alive_s))
    return router


def _add_generation(router: APIRouter, service: Service) -> None:
    @router.post(
        "/v1/completions",
        response_class=Response,
        responses=_generated(Completion, Completion),
        openapi_extra={"parameters": described()},
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a prompt, or several."""
        _check(body, request, service)
        prompts = body.prompts()
        per_prompt = body.n or 1

        async def jobs(exchange: Exchange) -> list[Job]:
            rows = [await service.prompts.plain(prompt) for prompt in prompts]
            longest = body.max_tokens or _COMPLETION_TOKENS
            return _jobs(exchange, request, body, rows, longest, body.logprobs, so_far)

        so_far = UsageSoFar(per_prompt) if body.usage_so_far else None
        shape = CompletionShape(
            service.model_name, body.logprobs is not None, service.prompts.names, so_far
        )
        return _generation(service, body, len(prompts) * per_prompt, jobs, shape)

    @router.post(
        "/v1/chat/completions",
        response_class=Response,
        responses=_generated(ChatCompletion, ChatChunk),
        openapi_extra={"parameters": described()},
    )
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        _check(body, request, service)
        room = min(service.front.loaded.context_tokens, service.front.pool_tokens)

        async def jobs(exchange: Exchange) -> list[Job]:
            row = await service.prompts.chat(body)
            longest = body.most_tokens or max(1, room - len(row))
            return _jobs(exchange, request, body, [row], longest, body.alternatives, so_far)

        so_far = UsageSoFar(body.n or 1) if body.usage_so_far else None
        shape = ChatShape(
            service.model_name,
            bool(body.logprobs),
            service.prompts.names,
            tools=body.wants_tools,
            parallel=body.parallel_tool_calls is not False,
            so_far=so_far,
        )
        return _generation(service, body, body.n or 1, jobs, shape)


def _add_information(router: APIRouter, service: Service) -> None:
    card = ModelCard(service.model_name, service.started, service.front.loaded.context_tokens)

    @router.get("/v1/models", response_class=Response, responses=_answers(ModelList, 401))
    async def models() -> Response:
        """The model that is served, in a list."""
        return _json(ModelList([card]))

    @router.get(
        "/v1/models/{model:path}", response_class=Response, responses=_answers(ModelCard, 401, 404)
    )
    async def one_model(model: str) -> Response:
        """The model that is served, by its name."""
        if model != service.model_name:
            raise _no_such_model(model, service)
        return _json(card)

    @router.get("/version", response_class=Response, responses=_answers(Version))
    async def version_of_server() -> Response:
        """The version of the server."""
        return _json(Version(installed_version()))

    @router.get(
        "/health",
        response_class=Response,
        responses={200: {"description": "It serves."}, 503: _answer("It does not.", ErrorBody)},
    )
    async def health() -> Response:
        """Whether requests are taken: 200, or 503 while starting and ending and after a failure."""
        if service.front.state is not State.SERVING:
            raise ApiError(503, f"the server is {service.front.state.value}")
        return Response()


def _add_operation(router: APIRouter, service: Service) -> None:
    @router.get(
        "/metrics",
        response_class=Response,
        responses={
            200: {"description": "Metrics.", "content": {"text/plain": {}}},
            401: _answer("An error.", ErrorBody),
            403: _answer("An error.", ErrorBody),
        },
    )
    async def metrics() -> Response:
        """Metrics in Prometheus' text form, for operators."""
        return Response(service.metrics.page(), headers={"content-type": CONTENT_TYPE})

    @router.post(
        "/v1/forebay/mode",
        response_class=Response,
        responses=_answers(ModeState, 400, 401, 403, 408, 413, 415, 503),
    )
    async def set_mode(body: ModeRequest) -> Response:
        """Change how the cache works while it runs, for operators: b0 switches it off."""
        try:
            MODE("mode", body.mode)
        except SettingsError as error:
            raise ApiError(400, str(error), param="mode") from error
        await service.front.set_mode(body.mode)
        return _json(ModeState(body.mode.value))

    @router.get(
        "/v1/forebay/mode", response_class=Response, responses=_answers(ModeState, 401, 403)
    )
    async def mode() -> Response:
        """The mode in use, for operators."""
        return _json(ModeState(service.front.stats.mode.value))


def _check(body: GenerationRequest, request: Request, service: Service) -> None:
    body.take(fields_of(request.scope["headers"]))
    body.check_supported()
    if body.model is not None and body.model != service.model_name:
        raise _no_such_model(body.model, service)


def _no_such_model(name: str, service: Service) -> ApiError:
    return ApiError(
        404,
        f"the model {name[:MAX_LENGTH]!r} is not served here; {service.model_name!r} is",
        code="model_not_found",
        param="model",
    )


def _jobs(
    exchange: Exchange,
    request: Request,
    body: GenerationRequest,
    rows: list[NDArray[Any]],
    longest: int,
    logprobs: int | None,
    so_far: UsageSoFar | None,
) -> list[Job]:
    """The jobs of all answers, in order of their index."""
    if so_far is not None:
        so_far.prompt_tokens = [len(row) for row in rows]
    tenant: Tenant = request.scope["state"]["tenant"]
    per_prompt = body.n or 1
    params = [body.sampling(longest, choice, logprobs) for choice in range(per_prompt)]
    return [
        Job(
            exchange=exchange,
            index=row * per_prompt + choice,
            prompt_ids=rows[row],
            params=params[choice],
            salt=tenant.salted(body.cache_salt),
            session=body.session or "",
            priority=body.priority or 0,
            no_cache=bool(body.no_cache),
            no_save=bool(body.no_save),
            each_token=logprobs is not None or so_far is not None,
        )
        for row in range(len(rows))
        for choice in range(per_prompt)
    ]


def _generation(
    service: Service, body: GenerationRequest, answers: int, jobs: Any, shape: Any
) -> Generation:
    most = service.settings.max_answers
    if answers > most:
        raise ApiError(400, f"{answers} answers are more than the {most} of one request", param="n")
    plan = Plan(
        answers=answers,
        per_prompt=body.n or 1,
        jobs=jobs,
        shape=shape,
        stream=bool(body.stream),
        include_usage=body.include_usage,
    )
    return Generation(service.front, plan)


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def new_service(
    front: Front, metrics: Metrics, settings: ServerSettings, model_name: str
) -> Service:
    """A service that starts now."""
    return Service(front, Prompts(front.loaded), metrics, settings, model_name, int(time.time()))
