"""The same prompts in all the ways in which vLLM may come to their KV: rounds for an engine
(`vllm_programs.served`), whose answers are to be those that each prompt has of vLLM by itself:
alone, or among all others apart from host memory.
"""

from __future__ import annotations

import random
from typing import Any

import tiny_models
from vllm_programs import asked

LENGTHS = (17, 33, 100, 256, 257, 500, 700, 900, 1100, 1500)
SHARED = 640
"""Tokens that some more prompts begin with alike."""
MOST_TOKENS = 2048
"""Of a request."""
ANSWER = 40
ABORTS = {1: 3, 5: 20, 9: 35}
"""Prompts whose client leaves, and behind which step."""
HINTED = (3, 6, 9, 11)
"""Prompts that are hinted first."""
WAYS = (
    "computed",
    "once more",
    "host",
    "near",
    "hinted",
    "leaving",
    "mixed",
    "mixed twice",
    "again",
)
"""In which answers are the same; in the way "swapped" they are not."""
ENGINE = {
    "max_num_seqs": 8,
    "max_model_len": MOST_TOKENS,
    "max_num_batched_tokens": 512,
}

Requests = list[dict[str, Any]]


def _prompts() -> list[list[int]]:
    dice = random.Random(11)

    def some(count: int) -> list[int]:
        return [dice.randrange(3, tiny_models.VOCAB) for _ in range(count)]

    front = some(SHARED)
    return [some(length) for length in LENGTHS] + [front + some(more) for more in (1, 60, 300)]


PROMPTS = _prompts()
EACH = range(len(PROMPTS))


def rounds() -> list[dict[str, Any]]:
    """Each prompt alone, all apart from host memory, then all ways."""
    return [
        *({"requests": [_request("alone", place)], "forget": True} for place in EACH),
        {"requests": [_request("apart", place, apart=True) for place in EACH], "forget": True},
        {"requests": _crowd("computed", {}), "forget": True},
        {"requests": _crowd("once more", {})},
        {"requests": _crowd("host", {}), "reset": True},
        *({"requests": [_request("near", place)], "reset": True} for place in EACH[::3]),
        *({"requests": _hinted("hinted", place, 0), "reset": True} for place in HINTED),
        {"requests": _crowd("leaving", ABORTS), "reset": True},
        {"requests": _mixed(), "reset": True},
        {"requests": _crowd("again", {}), "reset": True},
        {"requests": _crowd("swapped", {}), "reset": True, "swap": True},
    ]


def unlike(told: dict[str, Any], way: str) -> dict[str, int]:
    """Answers of one way that vLLM by itself did not give: how far each is one of those."""
    found: dict[str, int] = {}
    for name, answer in _answers(told, way).items():
        known = [_answers(told, own)[f"{own} {_place(name)}"] for own in ("alone", "apart")]
        same = max(_alike(answer, each) for each in known)
        if same < len(answer):
            found[name] = same
    return found


def of_two_minds(told: dict[str, Any]) -> list[int]:
    """Prompts, by their places, to which vLLM by itself gives two answers: in its batch-invariant
    mode too, tokens may depend on how a prompt is cut into steps.
    """
    alone, apart = _answers(told, "alone"), _answers(told, "apart")
    return [place for place in EACH if alone[f"alone {place}"] != apart[f"apart {place}"]]


def _alike(answer: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(answer, other, strict=False))
    return next((at for at, (one, two) in pairs if one != two), min(len(answer), len(other)))


def unanswered(told: dict[str, Any], way: str) -> set[int]:
    """Prompts that nobody left and that have no whole answer in one way, by their places."""
    answers = _answers(told, way)
    whole = {_place(name) for name, answer in answers.items() if len(answer) == ANSWER}
    return {_place(name) for name in answers} - ABORTS.keys() - whole


def not_gone(told: dict[str, Any]) -> list[str]:
    """What did not happen in any round, so that it was not tried."""
    happened = {
        "answers differ": len({tuple(each) for each in _answers(told, "alone").values()}) > 9,
        "preempted": told["preempted"] > 0,
        "near": told["near"] > 0,
        "claimed hint": told["hints"]["claimed"] > 0,
        "hit in host memory": told["sources"]["host"] > 100,
        "hit on the device": told["sources"]["device"] > 100,
        "all blocks given back": told["free"] == told["blocks"] - 1,
        "swapped blocks noticed": len(unlike(told, "swapped")) > len(PROMPTS) // 2,
    }
    return [what for what, done in happened.items() if not done]


def _request(way: str, place: int, answer: int = ANSWER, **more: Any) -> dict[str, Any]:
    return asked(f"{way} {place}", PROMPTS[place], answer, **more)


def _crowd(way: str, aborts: dict[int, int]) -> Requests:
    return [_request(way, place, abort=aborts.get(place)) for place in EACH]


def _hinted(way: str, place: int, after: int) -> Requests:
    """A hint, and its session some steps behind it."""
    hint = _request(f"{way} hint", place, 1, after=after, hint=True)
    return [hint, _request(way, place, after=after + 3)]


def _mixed() -> Requests:
    """Hints and their sessions, requests that leave and others between them, all of them twice."""
    found: Requests = [_request("mixed twice", place, after=3 * place) for place in EACH]
    for place in EACH:
        if place in HINTED:
            found += _hinted("mixed", place, 2 * place)
        else:
            found.append(_request("mixed", place, abort=ABORTS.get(place), after=2 * place))
    return found


def _answers(told: dict[str, Any], way: str) -> dict[str, list[int]]:
    """All answers of one way, by name."""
    every = {name: answer for served in told["rounds"] for name, answer in served.items()}
    return {name: every[name] for name in every if name.rpartition(" ")[0] in (way, f"{way} hint")}


def _place(name: str) -> int:
    return int(name.rpartition(" ")[2])
