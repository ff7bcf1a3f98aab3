"""What models that see are asked: in pairs of prompts that differ in an image alone."""

from __future__ import annotations

import random
from typing import Any

from tiny_sights import Sight, image_of
from vllm_programs import asked

_TEXT = 300
"""Tokens below that are text."""
_ANSWER = 24


def prompts(sight: Sight) -> list[dict[str, Any]]:
    """Four pairs of requests, with one image or two, which begin and end anywhere in blocks, and
    one request of text alone.
    """
    dice = random.Random(6)

    def text(count: int) -> list[int]:
        return [dice.randrange(3, _TEXT) for _ in range(count)]

    wanted: list[dict[str, Any]] = []
    for place, (before, between, after) in enumerate(
        ((40, None, 90), (0, 3, 60), (64, 0, 31), (5, 100, 0))
    ):
        prompt = [*text(before), *sight.shown]
        if between is not None:
            prompt += [*text(between), *sight.shown]
        prompt += text(after)
        for letter, first in (("a", 1), ("b", 3)):
            images = [first] if between is None else [first, 2]
            wanted.append(asked(f"{place}-{letter}", prompt, _ANSWER, images=images))
    return [*wanted, asked("text", text(200), _ANSWER)]


def whole_blocks(sight: Sight, wanted: list[dict[str, Any]], block_tokens: int) -> int:
    """Blocks of these prompts that can be found."""
    lengths = [
        len(each["prompt"])
        + sum(sight.tokens(image_of(seed)) - len(sight.shown) for seed in each["images"])
        for each in wanted
    ]
    return sum((length - 1) // block_tokens for length in lengths)
