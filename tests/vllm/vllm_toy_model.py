"""The toy's model, which is arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

VOCAB = 251
_MODULUS = (1 << 31) - 1


def answers(prompt: list[int], count: int, first: int = 1) -> list[int]:
    """What the model says to `prompt`, computed without any cache. It begins in the state `first`,
    which is another one for each LoRA.
    """
    tokens = list(prompt)
    state, total = first, 0
    for token in tokens:
        state = mix(state, token)
        total += state
    given: list[int] = []
    for _ in range(count):
        given.append(total % VOCAB)
        state = mix(state, given[-1])
        total += state
    return given


def states_of(tokens: Iterable[int], first: int = 1) -> list[int]:
    """The KV of each of `tokens`, the first ones of a request, behind the state `first`."""
    return list(itertools.accumulate(tokens, mix, initial=first))[1:]


def mix(state: int, token: int) -> int:
    """The KV of a token behind one with this KV."""
    return (state * 48271 + token + 1) % _MODULUS


def groups_kv_of(tokens: Iterable[int], windows: tuple[int, ...]) -> list[list[int]]:
    """The KV of each of `tokens` in each group of layers, of which each has one of `windows`."""
    states = states_of(tokens)
    groups: list[list[int]] = []
    for group, window in enumerate(windows):
        if group == path_of(windows):
            groups.append(states)
            continue
        kv: list[int] = []
        for place, state in enumerate(states):
            kv.append(group_kv(state, group, kv[far(place, window)] if place else 0))
        groups.append(kv)
    return groups


def groups_answers(prompt: list[int], count: int, windows: tuple[int, ...]) -> list[int]:
    """What a model of such groups says to `prompt`, computed without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        groups = zip(groups_kv_of(tokens, windows), windows, strict=True)
        tokens.append(sum(sum(kv[-window:]) for kv, window in groups) % VOCAB)
    return tokens[len(prompt) :]


def path_of(windows: tuple[int, ...]) -> int:
    """The first group of full attention, whose KV is that of a model of one group."""
    return windows.index(0)


def far(place: int, window: int) -> int:
    """The position of which the KV at `place` is made too: at the far end of the window, or just
    before.
    """
    return max(0, place - window + 1) if window else place - 1


def group_kv(state: int, group: int, before: int) -> int:
    """The KV of a position, in a group that is not the first of full attention."""
    return (state * (group + 2) + before) % _MODULUS
