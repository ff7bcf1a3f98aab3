"""The news of several workers as the news of one.

Each worker moves its own part of every block, between the same slots, by the same orders: its heads
with tensor parallelism, its layers with pipeline parallelism. Which of them is how far is not asked
for: each says what is new with the output of a step, vLLM puts together what they say in one step,
and it is counted here. So a transfer is issued when all have issued it and ends when it has ended
everywhere, and no worker ever waits for another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from forebay.errors import ProtocolError
from forebay.transfer.messages import Completion, Outcome, Report
from forebay.vllm.messages import News

Ranked = tuple[int, News]
"""What the worker of this rank says."""


class Agreement:
    """Counts what `ranks` workers say.

    Memory is bounded by the transfers that are under way. Raises ProtocolError for what cannot be:
    a rank that is none, or that says something twice.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._issued: dict[int, set[int]] = {}
        self._ended: dict[int, dict[int, Completion]] = {}
        self._steps = [0] * ranks
        self._host_slots = [0] * ranks

    def hear(self, told: Iterable[Ranked]) -> News:
        """What follows for all, in the order in which the last one said it."""
        issued: list[int] = []
        completions: list[Completion] = []
        for rank, news in told:
            if not 0 <= rank < self._ranks:
                raise ProtocolError(f"a worker of rank {rank} speaks, and there are {self._ranks}")
            self._steps[rank] = max(self._steps[rank], news.report.completed_step)
            self._host_slots[rank] = news.host_slots
            issued += [id_ for id_ in news.report.issued if self._issued_by(rank, id_)]
            for completion in news.report.completions:
                completions += self._ended_at(rank, completion)
        report = Report(tuple(issued), tuple(completions), min(self._steps))
        return News(report, min(self._host_slots))

    def _issued_by(self, rank: int, transfer: int) -> bool:
        """Whether now all ranks have issued it."""
        by = self._issued.setdefault(transfer, set())
        if rank in by:
            raise ProtocolError(f"rank {rank} issued transfer {transfer} twice")
        by.add(rank)
        if len(by) < self._ranks:
            return False
        del self._issued[transfer]
        return True

    def _ended_at(self, rank: int, completion: Completion) -> Sequence[Completion]:
        """Its end, if it was the last one's."""
        at = self._ended.setdefault(completion.id, {})
        if rank in at:
            raise ProtocolError(f"transfer {completion.id} ended twice at rank {rank}")
        at[rank] = completion
        if len(at) < self._ranks:
            return ()
        del self._ended[completion.id]
        # One that failed somewhere was perhaps issued by some only.
        self._issued.pop(completion.id, None)
        return (_together(at),)


def _together(at: dict[int, Completion]) -> Completion:
    """How a transfer ended, from how it ended at each rank. Bytes are those of all, but none where
    one of them moved none: its link may stand still.
    """
    all_ = list(at.values())
    if len(all_) == 1:
        return all_[0]
    done = min(each.blocks_done for each in all_)
    moved = [each.bytes for each in all_]
    torn = [each.torn for each in all_ if each.torn]
    outcome = Outcome(max(each.outcome for each in all_))
    # On several machines clocks are not the same: times are by that of the first rank.
    started_s = at[min(at)].started_s
    took_s = max(each.finished_s - each.started_s for each in all_)
    errors = [f"rank {rank}: {each.error}" for rank, each in sorted(at.items()) if each.error]
    return replace(
        all_[0],
        outcome=outcome,
        blocks_done=done,
        blocks_touched=max([done, *(each.stop for each in torn)]),
        torn_from=min((each.start for each in torn), default=done),
        bytes=sum(moved) if all(moved) else 0,
        started_s=started_s,
        finished_s=started_s + took_s,
        error="; ".join(errors) if outcome is Outcome.FAILED else "",
    )
