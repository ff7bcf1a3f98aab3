"""The two halves of one engine where they are in one process: they need not wait for a step.

vLLM runs its only worker in the process of its scheduler, and both in one thread. There orders go
from hand to hand when they are decided, and news when there are any. Elsewhere each half is alone
in its pair: orders go out with a step, and news come back with its output.
"""

from __future__ import annotations

import weakref
from typing import Any

from forebay.vllm.scheduler.half import SchedulerHalf
from forebay.vllm.worker import WorkerHalf


class Pair:
    """The halves that are here, each None where it is not, or not yet."""

    def __init__(self, engine: object) -> None:
        self._engine = engine
        self.scheduler: SchedulerHalf | None = None
        self.worker: WorkerHalf | None = None

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


# A pair keeps its engine's object, so that no other has its id.
_pairs: weakref.WeakValueDictionary[int, Pair] = weakref.WeakValueDictionary()
