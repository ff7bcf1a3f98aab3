"""How far answers over KV from host memory are from answers over KV that never left the GPU.

Teacher-forced: after each prompt, and after each token of one and the same answer, the whole
distribution of the next token is asked for. Each is a request of one token, alone on the engine,
so that two kinds of hits run the same kernels over the same shapes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from client import Client
from numpy.typing import NDArray
from sizes import MOST_DIVERGENCE
from weights import ATTENTION_GAIN

_SCALINGS = (1.0, 2.0, 4.0)
"""Of the attention's weights, tried in this order until one wrong block is seen."""

Answers = Sequence[tuple[list[int], list[int]]]
"""Prompts, and the tokens that are forced after each."""


async def accuracy(client: Client, *, ours: bool) -> dict[str, Any]:
    """Divergences from hits on the GPU, in nats, by what the answers were computed over: `host`
    (hits in host memory), `swapped` (the same with one block of each load in another's place, only
    with our connector) and `recomputed`.
    """
    told: dict[str, Any] = {}
    scalings = _SCALINGS if ours and client.sizes.gpu else _SCALINGS[:1]
    for scaling in scalings:
        await client.fill_weights(ATTENTION_GAIN * scaling)
        await client.forget(host_too=True)
        told = {"attention_gain": ATTENTION_GAIN * scaling, **await _compared(client, ours=ours)}
        if not ours or statistics.mean(told["divergences"]["swapped"]) > MOST_DIVERGENCE:
            break
    await client.fill_weights(ATTENTION_GAIN)
    await client.forget(host_too=True)
    return told


async def _compared(client: Client, *, ours: bool) -> dict[str, Any]:
    sizes = client.sizes
    prompts = [
        client.prompt(length)
        for length in sizes.accuracy_lengths
        for _ in range(sizes.accuracy_prompts)
    ]
    answers = [(each, (await client.ask(each, sizes.accuracy_answer)).tokens) for each in prompts]
    reference, cached = await _distributions(client, answers)
    kinds: dict[str, list[NDArray[np.float32]]] = {}
    found = {"gpu": cached}
    await client.forget()
    kinds["host"], found["host"] = await _distributions(client, answers)
    if ours:
        await client.swap_loaded_blocks(True)
        await client.forget()
        kinds["swapped"], found["swapped"] = await _distributions(client, answers)
        await client.swap_loaded_blocks(False)
    kinds["recomputed"], found["recomputed"] = await _distributions(client, answers, fresh=True)
    return {
        "prompts": [len(prompt) for prompt in prompts],
        "answer": sizes.accuracy_answer,
        "cached_tokens": found,
        "divergences": {kind: divergences(reference, each) for kind, each in kinds.items()},
        "same_best": {kind: _same_best(reference, each) for kind, each in kinds.items()},
    }


async def _distributions(
    client: Client, answers: Answers, *, fresh: bool = False
) -> tuple[list[NDArray[np.float32]], int]:
    """Log probabilities of every next token, and how many tokens of all prompts were found."""
    made: list[NDArray[np.float32]] = []
    cached = 0
    for prompt, answer in answers:
        for place in range(len(answer)):
            told, found = await client.distribution(prompt + answer[:place], fresh=fresh)
            made.append(told)
            cached += found if place == 0 else 0
    return made, cached


def divergences(
    reference: Sequence[NDArray[np.float32]], others: Sequence[NDArray[np.float32]]
) -> list[float]:
    """Kullback-Leibler divergence of each of `others` from its reference, in nats."""
    found: list[float] = []
    for one, other in zip(reference, others, strict=True):
        log_p, log_q = one.astype(np.float64), other.astype(np.float64)
        found.append(max(0.0, float(np.sum(np.exp(log_p) * (log_p - log_q)))))
    return found


def _same_best(
    reference: Sequence[NDArray[np.float32]], others: Sequence[NDArray[np.float32]]
) -> float:
    same = [int(a.argmax()) == int(b.argmax()) for a, b in zip(reference, others, strict=True)]
    return sum(same) / len(same)
