"""A toy engine whose workers are stages: several steps are under way, each at another stage.

As in vLLM with pipeline parallelism: as many steps are scheduled as there are stages before one's
output is taken, a stage runs a step when the one before it has, and says what is new right then.
With asynchronous scheduling, which its second model runner has, one step more is scheduled, and a
request is in every second one of two stages: its token goes from the last stage to the first.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_toy import Pass, ToyEngine


@dataclass
class UnderWay:
    """A step, which the first `len(told)` stages have run."""

    output: Any
    passes: list[Pass]
    told: list[Any] = field(default_factory=list[Any])


class StagedEngine(ToyEngine):
    """`stages` workers, which get as far as `seed` says before they have to. With a `lag` it
    schedules asynchronously.
    """

    def __init__(self, model: Path, *, stages: int = 2, seed: int = 0, **options: Any) -> None:
        super().__init__(model, ranks=stages, stages=True, **options)
        self._dice = random.Random(seed)
        self.scheduler.use_v2_model_runner = self.lag > 0
        self._most = stages + (self.lag > 0)

    def step(self) -> None:
        """Schedule a step, if there is room for one more, or take in the output of the oldest."""
        if self.scheduler.has_requests():
            self.steps += 1
            output = self.scheduler.schedule()
            self.preempted += len(output.preempted_req_ids or ())
            self._scheduled.append(UnderWay(output, []))
            self._go_on()
            if len(self._scheduled) < self._most:
                return
        if self._scheduled:
            oldest = self._scheduled.popleft()
            while len(oldest.told) < len(self.workers):
                self._run_stage(oldest)
            self._take(oldest.output, oldest.told)

    def _go_on(self) -> None:
        """Steps under way get further, none before an older one."""
        stages = most = len(self.workers)
        for place, each in enumerate(self._scheduled):
            if place >= stages and len(self._scheduled[place - stages].told) < stages:
                return
            while len(each.told) < most and self._dice.random() < 0.6:
                self._run_stage(each)
            most = len(each.told)

    def _run_stage(self, step: UnderWay) -> None:
        rank, names = len(step.told), list(step.output.num_scheduled_tokens)
        worker, meta = self.workers[rank], step.output.kv_connector_metadata
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        if not rank:
            step.passes = self._passes(step.output) if names else []
        worker.start_load_kv(None)
        for each in step.passes:
            each.through(self._content, self.layers[rank])
        last = rank == len(self.workers) - 1
        sampled = [each.sampled() for each in step.passes] if last else []
        # What earlier stages answer is of no request.
        step.told.append(self._told(worker, names, sampled if last else [[]] * len(names)))
