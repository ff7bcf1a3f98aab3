"""The two halves of one engine where they are in one process: they need not wait for a step.

vLLM runs its only worker in the process of its scheduler, and both in one thread. There orders go
from hand to hand when they are decided, and news when there are any. Elsewhere each half is alone
in its pair: orders go out with a step, and news come back with its output.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Collection
from typing import Any

from forebay.errors import SettingsError
from forebay.vllm.scheduler.half import SchedulerHalf
from forebay.vllm.worker import WorkerHalf


class Pair:
    """The halves that are here, each None where it is not, or not yet."""

    def __init__(self, engine: object) -> None:
        self._engine = engine
        self.scheduler: SchedulerHalf | None = None
        self.worker: WorkerHalf | None = None
        self.mark = ""
        """No other engine's scheduler has it, though its user may have called both the same."""

    def decided_by(self, scheduler: SchedulerHalf) -> None:
        """`scheduler` is the half that decides from now on."""
        self.scheduler, self.mark = scheduler, uuid.uuid4().hex

    @classmethod
    def of(cls, vllm_config: Any) -> Pair:
        """The pair of the engine with this configuration; one of its own for each of several
        workers.
        """
        if int(vllm_config.parallel_config.world_size) != 1:
            return cls(vllm_config)
        # Both halves are made with one and the same object, in the same process.
        engine = vllm_config.kv_transfer_config
        pair = _pairs.get(id(engine))
        if pair is None:
            pair = _pairs[id(engine)] = cls(engine)
        return pair

    @staticmethod
    def marked() -> dict[str, SchedulerHalf]:
        """The schedulers of all engines of this process that have one worker, up to now."""
        halves = ((pair.mark, pair.scheduler) for pair in _pairs.values())
        return {mark: half for mark, half in halves if half is not None}


# A pair keeps its engine's object, so that no other has its id.
_pairs: weakref.WeakValueDictionary[int, Pair] = weakref.WeakValueDictionary()


def check_served(mark: str, others: Collection[str], slots: tuple[int, int]) -> None:
    """Steps of the scheduler with this `mark` begin at a worker that `others` had before, and that
    has so many `slots`, device and host. Raises SettingsError where it is not that one's.
    """
    if not others:
        return
    if mark in others:
        raise SettingsError(f"this engine's worker has the KV cache of a later one: {_ONE_BY_ONE}")
    settings = Pair.marked()[mark].settings
    if (settings.device_slots, settings.host_slots) != slots:
        raise SettingsError(f"this engine's worker has the sizes of an earlier one: {_ONE_BY_ONE}")


_ONE_BY_ONE = (
    "vLLM has one connector for all workers of a process. Run each engine in one of its own "
    "(VLLM_ENABLE_V1_MULTIPROCESSING=1), or shut one down before the next begins"
)
