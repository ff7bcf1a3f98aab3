"""What vLLM takes of its pool next is nothing that is leased."""

from __future__ import annotations

from collections.abc import Iterable

from forebay.core.waiting import WaitingLine
from forebay.vllm.adapter import Step, VllmRequest
from forebay.vllm.scheduler.pool import VllmDevicePool


class Guard:
    """Keeps what is leased in `device` out of the way of vLLM's steps, which have `step_tokens`
    tokens and `most_running` requests at most, and room for `draft_slots` tokens more of each.
    `in_order`: who comes later waits longer.
    """

    def __init__(
        self,
        device: VllmDevicePool,
        block_tokens: int,
        step_tokens: int,
        most_running: int,
        *,
        draft_slots: int,
        in_order: bool,
    ) -> None:
        self._device = device
        self._block_tokens = block_tokens
        self._step_tokens = step_tokens
        self._most_running = most_running
        self._draft_slots = draft_slots
        self._in_order = in_order

    def scheduled(self, step: Step, running: Iterable[VllmRequest], line: WaitingLine) -> None:
        """`step` is complete: the next one goes on with those that are `running`, and may start
        the first in `line`, or, where nobody waits for it, whoever comes.
        """
        size, most = self._block_tokens, self._most_running
        first = line.head(most)
        drafts = most * self._draft_slots
        tokens = self._step_tokens + drafts
        if self._in_order and len(first) == most:
            left = sum(max(0, each.num_tokens - each.num_computed_tokens) for each in running)
            left += sum(each.request.tokens - each.length * size for each in first)
            # Each of both may begin a block more, and the drafts of `step` may come to nothing.
            tokens = min(tokens, left - step.tokens + most * size + 2 * drafts)
        self._device.guard(self._device.groups * (most - (-tokens // size)))
