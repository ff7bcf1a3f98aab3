"""What the users of the demonstration ask, and the conversations that follow from it.

A client sends the whole conversation with every question. The answers in it are those of the first
mode, in every mode; so each mode gets the same prompts, and each answer can be compared on its own.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple


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
    """What is sent, turn by turn. Reference answers are offered as they come.

    Users' threads may share it: each touches the turns of one user only.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._answers: dict[Turn, str] = {}

    def offer(self, turn: Turn, answer: str) -> None:
        """The first answer to `turn` that is offered is the reference, for good."""
        self._answers.setdefault(turn, answer)

    def messages(self, turn: Turn) -> list[dict[str, str]]:
        """The conversation up to the question of `turn`; every turn before it has an answer."""
        said = [{"role": "system", "content": self.workload.system}]
        questions = self.workload.conversations[turn.user].messages
        for number, question in enumerate(questions[: turn.number + 1]):
            said.append({"role": "user", "content": question})
            if number < turn.number:
                answer = self._answers[Turn(turn.user, number)]
                said.append({"role": "assistant", "content": answer})
        return said
