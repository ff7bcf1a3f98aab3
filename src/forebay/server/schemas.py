"""Requests as clients send them. The only part that knows pydantic.

Unknown fields are ignored, as others do; known ones that would change the answer and are not
carried are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from forebay.core.modes import MODES, Mode
from forebay.engine.sampler import MAX_BIAS, MAX_LOGPROBS, SamplingParams
from forebay.server.errors import ApiError
from forebay.server.headers import LEAST_PRIORITY, MAX_LENGTH, MOST_PRIORITY

_T = TypeVar("_T")
_Text = Annotated[str, Field(max_length=MAX_LENGTH)]
_Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
_TokenId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
_Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
_Stop = Annotated[str, Field(min_length=1, max_length=1024)]

# Fields of OpenAI, vLLM and SGLang that would change the answer and are not carried, with the
# values that ask for nothing.
_NOTHING: tuple[Any, ...] = (None,)
_OFF = (None, False)
_REFUSED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (None, True),
    "allowed_token_ids": _NOTHING,
    "audio": _NOTHING,
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template": _NOTHING,
    "continue_final_message": _OFF,
    "custom_logit_processor": _NOTHING,
    "documents": (None, []),
    "early_stopping": _OFF,
    "ebnf": _NOTHING,
    "echo": _OFF,
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "include_stop_str_in_output": _OFF,
    "json_schema": _NOTHING,
    "kv_transfer_params": _NOTHING,
    "length_penalty": (None, 1),
    "logits_processors": (None, []),
    "lora_path": _NOTHING,
    "modalities": (None, ["text"]),
    "no_stop_trim": _OFF,
    "prompt_embeds": _NOTHING,
    "prompt_logprobs": _NOTHING,
    "reasoning_effort": (None, "none"),
    "regex": _NOTHING,
    "response_format": (None, {"type": "text"}),
    "return_hidden_states": _OFF,
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "service_tier": (None, "auto", "default"),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "stop_regex": (None, [], ""),
    "store": _OFF,
    "structured_outputs": _NOTHING,
    "suffix": (None, ""),
    "truncate_prompt_tokens": _NOTHING,
    "use_beam_search": _OFF,
    "verbosity": (None, "medium"),
    "vllm_xargs": (None, {}),
    "web_search_options": _NOTHING,
}


def _available() -> list[JsonValue]:
    """The modes that this build has."""
    return [mode.value for mode in MODES]


class StreamOptions(BaseModel):
    """What a stream carries besides the answer."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="usage so far in every event")
    include_obfuscation: bool | None = Field(None, description="only false: there is none")


class GenerationRequest(BaseModel):
    """What both endpoints take. Left out or null, a field has its default."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: _Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    min_tokens: int | None = Field(None, ge=0, le=2**31)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31, description="0 or -1: all tokens")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: Annotated[dict[_TokenId, _Bias], Field(max_length=300)] | None = Field(
        None, description="added to the logits of tokens, which are named by their ids"
    )
    user: str | None = None
    cache_salt: _Text | None = Field(None, description="separates caches: only equal salts share")
    session: _Text | None = Field(None, description="ties the turns of a conversation together")
    no_cache: bool | None = Field(None, description="take nothing from the cache")
    no_save: bool | None = Field(None, description="leave nothing in the cache")
    priority: int | None = Field(
        None, ge=LEAST_PRIORITY, le=MOST_PRIORITY, description="smaller goes first"
    )

    def check_supported(self) -> None:
        """Raises ApiError for a field that asks for what is not carried."""
        for name, value in (self.model_extra or {}).items():
            if name in _REFUSED and value not in _REFUSED[name]:
                raise ApiError(400, f"{name} is not supported; leave it out", param=name)
        if self.stream_options is not None:
            if not self.stream:
                raise ApiError(400, "stream_options needs stream", param="stream_options")
            if self.stream_options.include_obfuscation:
                raise ApiError(400, "include_obfuscation is not supported", param="stream_options")

    def take(self, fields: Mapping[str, str | bool | int]) -> None:
        """Set fields that came as headers. Raises ApiError for one that the body contradicts."""
        for name, value in fields.items():
            said = getattr(self, name)
            if said is not None and said != value:
                raise ApiError(400, f"{name} differs between body and header", param=name)
            setattr(self, name, value)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_so_far(self) -> bool:
        """Whether every chunk of a stream has usage."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def sampling(self, max_tokens: int, choice: int, logprobs: int | None) -> SamplingParams:
        """Sampling of answer `choice` of the `n` to one prompt. Raises RequestError."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        seed = None if self.seed is None else (self.seed + choice) % 2**64
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=_or(self.min_tokens, 0),
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=max(0, _or(self.top_k, 0)),
            min_p=_or(self.min_p, 0.0),
            seed=seed,
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            stop=stops,
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
        )


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions: one prompt or several, as text or token ids."""

    prompt: (
        str
        | _Ids
        | Annotated[list[str], Field(min_length=1, max_length=128)]
        | Annotated[list[_Ids], Field(min_length=1, max_length=128)]
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        one_row = isinstance(self.prompt[0], int)
        prompts = [self.prompt] if one_row else self.prompt
        return cast("list[str | list[int]]", prompts)


class TextPart(BaseModel):
    """A piece of a message's content."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class FunctionCall(BaseModel):
    """A call that an assistant made; `arguments` are JSON."""

    model_config = ConfigDict(strict=True)

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A function call with the id by which its answer refers to it."""

    model_config = ConfigDict(strict=True)

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(BaseModel):
    """A function that the model may call; `parameters` are JSON Schema."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None


class Tool(BaseModel):
    """Something that the model may use."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: FunctionDefinition


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: JsonValue = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None

    def check_supported(self) -> None:
        """Raises ApiError for a field that asks for what is not carried."""
        super().check_supported()
        if self.tool_choice not in (None, "auto", "none"):
            raise ApiError(
                400, "tool_choice is auto or none: no call can be forced", param="tool_choice"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs")

    @property
    def wants_tools(self) -> bool:
        """Whether the model is told of tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def most_tokens(self) -> int | None:
        """The bound on an answer, by either name."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Log-probabilities asked for each token, besides the token's own; None for none at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


class ModeRequest(BaseModel):
    """The body of /v1/forebay/mode."""

    model_config = ConfigDict(strict=True, extra="forbid")

    mode: Annotated[Mode, Field(strict=False, json_schema_extra={"enum": _available()})]


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value
