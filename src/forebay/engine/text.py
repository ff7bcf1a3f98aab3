"""Text in and out: chat prompts, tokens back to text as they come, and stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import ModelError, RequestError

_BROKEN = "\ufffd"
_MAX_HELD_TOKENS = 64


class Detokeniser:
    """Turns a growing run of tokens into text, a whole character at a time.

    Text is only ever added. Decoding starts a little before what is new, because a tokenizer may
    treat the first token of a text differently (the space in front of a word), and what ends in a
    character that could still be completed is held back.

    `after` are tokens that the text continues (a few of a prompt's last are enough): their text is
    not repeated, but a space that parts it from the new one is kept.
    """

    def __init__(
        self, tokenizer: Any, *, after: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = [int(token_id) for token_id in after]
        self._old_tokens = len(self._window)
        self._given = len(self._decode(self._window))

    def push(self, token_id: int) -> str:
        """The text that this token settles; often one token's, at times none or several tokens'."""
        self._window.append(token_id)
        text = self._decode(self._window)
        settled = text.rstrip(_BROKEN)
        if settled == text or len(self._window) - self._old_tokens > _MAX_HELD_TOKENS:
            return self._advance(text)
        new = settled[self._given :]
        self._given = max(self._given, len(settled))
        return new

    def finish(self) -> str:
        """What is still held back; characters that stayed incomplete become U+FFFD."""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        new = text[self._given :]
        if not new and len(self._window) - self._old_tokens <= _MAX_HELD_TOKENS:
            return new
        self._window = self._window[self._old_tokens :]
        self._old_tokens = len(self._window)
        self._given = len(self._decode(self._window))
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )


class StopStrings:
    """Watches text for stop strings, which may begin in one piece and end in another."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; the text ends before it."""

    def push(self, text: str, *, search: bool = True) -> str:
        """The text that is safe to show: it cannot be the start of a stop string.

        Once one is found, what stands before the earliest is returned, and nothing ever after. None
        is found that ends in text pushed without `search`.
        """
        if self.matched is not None:
            return ""
        old, text = len(self._held), self._held + text
        found = [
            (at, -len(stop), stop)
            for stop in self._stops
            if (at := text.find(stop, max(0, old - len(stop) + 1))) >= 0
        ]
        if found and search:
            at, _, self.matched = min(found)
            self._held = ""
            return text[:at]
        safe = len(text) - self._longest_start(text)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _longest_start(self, text: str) -> int:
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


def encode(tokenizer: Any, text: str) -> NDArray[np.int64]:
    """The tokens of a plain prompt, int64, with what the tokenizer puts in front of every text."""
    return np.asarray(tokenizer(text, verbose=False)["input_ids"], dtype=np.int64)


def chat_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> NDArray[np.int64]:
    """The tokens, int64, of a conversation by the tokenizer's own template, ready for the answer.

    Each message has `role` and `content`. `tools` are functions that the model may call, `options`
    more variables of the template. Raises ModelError if there is no template, RequestError if the
    template refuses the messages.
    """
    in_form = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not in_form or not all(isinstance(each, Mapping) for each in messages):
        raise RequestError(
            "a conversation is a list of messages, each with role and content, like "
            '[{"role": "user", "content": "Hi"}]'
        )
    for message in messages:
        if not {"role", "content"} <= message.keys():
            raise RequestError(f"a message needs role and content, not {sorted(message)}")
    if getattr(tokenizer, "chat_template", None) is None:
        raise ModelError(
            "this model's tokenizer has no chat template: give a plain prompt, or add "
            "chat_template.jinja to the model folder"
        )
    try:
        ids = tokenizer.apply_chat_template(
            [dict(m) for m in messages],
            **(options or {}),
            tools=[dict(tool) for tool in tools] if tools else None,
            add_generation_prompt=True,
            return_dict=False,
        )
    except Exception as error:
        raise RequestError(f"the model's chat template refuses the messages: {error}") from error
    return np.asarray(ids, dtype=np.int64)
