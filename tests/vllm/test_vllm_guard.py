"""How many blocks are kept free of leases for vLLM's next step. Needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from forebay.vllm.adapter import Step
from forebay.vllm.scheduler.guard import Guard

BLOCK_TOKENS, STEP_TOKENS, MOST_RUNNING = 16, 160, 2
ALL = STEP_TOKENS // BLOCK_TOKENS + MOST_RUNNING


def running(tokens: int, computed: int) -> Any:
    return SimpleNamespace(num_tokens=tokens, num_computed_tokens=computed)


def waiting(tokens: int, matched: int) -> Any:
    return SimpleNamespace(request=SimpleNamespace(tokens=tokens), length=matched)


@pytest.mark.parametrize(
    ("line", "runs", "step_tokens", "in_order", "guarded"),
    [
        pytest.param([], [], 0, True, ALL, id="whoever comes may start"),
        pytest.param([waiting(40, 2)], [], 0, True, ALL, id="there is room for who comes"),
        pytest.param([waiting(40, 2)] * 2, [], 0, True, 2 + 1 + 2, id="two hits"),
        pytest.param([waiting(40, 2)] * 3, [], 0, True, 2 + 1 + 2, id="the third cannot start"),
        pytest.param([waiting(40, 2)] * 2, [], 0, False, ALL, id="who comes may go first"),
        pytest.param([waiting(900, 2)] * 2, [], 0, True, ALL, id="no more than a step has"),
        pytest.param(
            [waiting(32, 2)] * 2, [running(100, 52)], 16, True, 2 + 2 + 2, id="who runs goes on"
        ),
        pytest.param(
            [waiting(32, 2)] * 2, [running(53, 52)] * 2, 2, True, 2 + 0 + 2, id="who runs decodes"
        ),
    ],
)
@pytest.mark.parametrize("groups", [1, 3])
def test_what_the_next_step_may_take(
    line: list[Any], runs: list[Any], step_tokens: int, in_order: bool, guarded: int, groups: int
) -> None:
    told: list[int] = []
    device = cast("Any", SimpleNamespace(guard=told.append, groups=groups))
    guard = Guard(device, BLOCK_TOKENS, STEP_TOKENS, MOST_RUNNING, draft_slots=0, in_order=in_order)
    head = cast("Any", SimpleNamespace(head=lambda count: line[:count]))
    guard.scheduled(Step((), frozenset(), step_tokens), runs, head)
    assert told == [groups * guarded]


@pytest.mark.parametrize(
    ("line", "guarded"),
    [
        pytest.param([], ALL + 2 * 2, id="behind all tokens of a step"),
        # Each has 32 drafts in the step that is under way, and all of them come to nothing.
        pytest.param([waiting(32, 2)] * 2, 2 + (2 - 66 + 2 * 16 + 2 * 64) // 16, id="who decodes"),
    ],
)
def test_what_it_may_take_for_drafts(line: list[Any], guarded: int) -> None:
    told: list[int] = []
    device = cast("Any", SimpleNamespace(guard=told.append, groups=1))
    guard = Guard(device, BLOCK_TOKENS, STEP_TOKENS, MOST_RUNNING, draft_slots=32, in_order=True)
    head = cast("Any", SimpleNamespace(head=lambda count: line[:count]))
    guard.scheduled(Step((), frozenset(), 66), [running(53, 52)] * 2, head)
    assert told == [guarded]
