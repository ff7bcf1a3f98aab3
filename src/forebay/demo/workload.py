"""What the users of the demonstration ask, and the prompts that follow from it.

A later prompt is the tokens of the one before, the tokens of the reference answer and those of the
next message, one after the other: never text that is tokenized anew, so that it continues exactly
what is cached. The reference answers are those of the first mode, in every mode; so each mode gets
the same prompts, and each answer can be compared on its own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.engine.text import chat_prompt
from forebay.errors import ModelError

_MARK = "<the answer>"


class Turn(NamedTuple):
    """One question of one user; both count from 0."""

    user: int
    number: int

    def __str__(self) -> str:
        return f"user {self.user + 1}, turn {self.number + 1}"


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one user says, turn by turn."""

    topic: str
    messages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """A system prompt that all users share, and one conversation for each."""

    system: str
    conversations: tuple[Conversation, ...]

    @property
    def turns(self) -> int:
        """Questions of all users together."""
        return sum(len(each.messages) for each in self.conversations)


def everyday_workload() -> Workload:
    """Six users, four turns each, about everyday things."""
    text = files("forebay.demo").joinpath("conversations.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    return Workload(
        data["system"].strip(),
        tuple(
            Conversation(each["topic"], tuple(message.strip() for message in each["messages"]))
            for each in data["conversation"]
        ),
    )


class Script:
    """The prompts of a workload as token ids. Reference answers are offered as they come."""

    def __init__(self, tokenizer: Any, workload: Workload) -> None:
        self.workload = workload
        self._tokenizer = tokenizer
        self._answers: dict[Turn, NDArray[np.int64]] = {}

    def offer(self, turn: Turn, answer: Sequence[int]) -> None:
        """The first answer to `turn` that is offered is the reference, for good."""
        self._answers.setdefault(turn, np.asarray(answer, np.int64))

    def prompt(self, turn: Turn) -> NDArray[np.int64]:
        """The tokens of `turn`, int64. Every turn of that user before it must have an answer.

        Raises ModelError for a tokenizer without a chat template, or one that hides answers.
        """
        messages = self.workload.conversations[turn.user].messages
        if turn.number == 0:
            opening = ({"role": "system", "content": self.workload.system}, _said(messages[0]))
            return chat_prompt(self._tokenizer, opening)
        before = Turn(turn.user, turn.number - 1)
        change = self._turn_change(messages[turn.number])
        return np.concatenate([self.prompt(before), self._answers[before], change])

    def _turn_change(self, message: str) -> NDArray[np.int64]:
        """What the chat template puts between an answer and the next one, `message` within."""
        said = (_said("-"), {"role": "assistant", "content": _MARK}, _said(message))
        text = self._tokenizer.apply_chat_template(
            list(said), add_generation_prompt=True, tokenize=False
        )
        _, mark, change = text.partition(_MARK)
        if not mark:
            raise ModelError("the model's chat template does not repeat earlier answers")
        ids = self._tokenizer(change, add_special_tokens=False)["input_ids"]
        return np.asarray(ids, np.int64)


def _said(message: str) -> dict[str, str]:
    return {"role": "user", "content": message}
