"""Prompts to tokens, beside the event loop and the engine: a long one takes milliseconds.

One thread, with a tokenizer that is never changed: then others may read it too.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.engine.models import LoadedModel
from forebay.engine.prompt import Prompt, prompt_tokens
from forebay.engine.text import chat_prompt, encode
from forebay.errors import ModelError, RequestError
from forebay.server.errors import ApiError
from forebay.server.schemas import ChatRequest, Message
from forebay.server.token_names import TokenNames

# What the call itself sets, or what a client must not.
_RESERVED = {"tools", "documents", "tokenize", "return_dict", "return_tensors", "chat_template"}
_RESERVED |= {"add_generation_prompt", "continue_final_message", "padding", "truncation"}
_RESERVED |= {"max_length", "return_assistant_tokens_mask", "tokenizer_kwargs", "conversation"}


class Prompts:
    """Makes tokens of what clients send. Close it."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._tokenizer = _unchanging(loaded.tokenizer)
        self.names = TokenNames(self._tokenizer)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="forebay-prompts")
        self._most_characters = self._longest_prompt()
        template = getattr(self._tokenizer, "chat_template", None)
        self.tools = isinstance(template, str) and "tools" in template
        """Whether the model's template knows tools."""

    async def plain(self, prompt: str | list[int]) -> NDArray[np.int64]:
        """The tokens of a plain prompt. Raises RequestError."""
        if isinstance(prompt, str):
            self._check_characters(len(prompt))
        return await self._aside(partial(self._plain, prompt))

    async def chat(self, request: ChatRequest) -> NDArray[np.int64]:
        """The tokens of a conversation. Raises RequestError or ApiError."""
        options = request.chat_template_kwargs or {}
        reserved = sorted(_RESERVED & options.keys())
        if reserved:
            raise ApiError(400, f"{reserved[0]} cannot be set", param="chat_template_kwargs")
        if request.wants_tools and not self.tools:
            raise ApiError(400, "this model's chat template has no tools", param="tools")
        messages = [_plain_message(message) for message in request.messages]
        self._check_characters(sum(len(message["content"]) for message in messages))
        tools = None
        if request.wants_tools:
            tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
        return await self._aside(partial(self._chat, messages, tools, options))

    def close(self) -> None:
        """Take no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _aside(self, work: Any) -> NDArray[np.int64]:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _plain(self, prompt: Prompt) -> NDArray[np.int64]:
        if isinstance(prompt, str) and self._tokenizer is not None:
            try:
                prompt = encode(self._tokenizer, prompt)
            except (UnicodeError, TypeError) as error:
                raise RequestError("the prompt is no valid Unicode text") from error
        return prompt_tokens(self._loaded, prompt)

    def _chat(
        self, messages: list[dict[str, Any]], tools: Any, options: Mapping[str, Any]
    ) -> NDArray[np.int64]:
        if self._tokenizer is None:
            raise RequestError(f"{self._loaded.name} has no tokenizer, and so no chat")
        try:
            return chat_prompt(self._tokenizer, messages, tools=tools, options=options)
        except ModelError as error:
            raise RequestError(str(error)) from error

    def _longest_prompt(self) -> int:
        """Characters that fit the model's context if every token is the longest there is."""
        vocabulary = {} if self._tokenizer is None else self._tokenizer.get_vocab()
        longest = max(map(len, vocabulary), default=1)
        return self._loaded.context_tokens * max(longest, 1)

    def _check_characters(self, count: int) -> None:
        if count > self._most_characters:
            raise RequestError(
                f"a prompt of {count} characters cannot fit the model's context of "
                f"{self._loaded.context_tokens} tokens; shorten it"
            )


def _unchanging(tokenizer: Any) -> Any:
    """`tokenizer` if its calls only read, else a copy of it of which that is so."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and backend.truncation is None and backend.padding is None:
        return tokenizer
    mine = copy.deepcopy(tokenizer)
    if backend is not None:
        # Else each call would set them anew, which must not happen while another one reads.
        mine.backend_tokenizer.no_truncation()
        mine.backend_tokenizer.no_padding()
    return mine


def _plain_message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: content is text, and arguments are no JSON but values."""
    content = message.content or ""
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return plain


def _arguments(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise RequestError("the arguments of a tool call must be JSON, of a few levels") from error
