"""Open prefetched blocks, and when their time is over."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from forebay.core.arrays import Ids
from forebay.core.ledger import PrefetchLedger, PrefetchOutcome

BYTES = 10


def blocks(*ids: int) -> Ids:
    return np.array(ids, np.int32)


def of(*ids: int):
    """`wanted` of a line that wants these blocks."""

    def wanted(some: Ids) -> NDArray[np.bool_]:
        return np.isin(some, ids)

    return wanted


@pytest.fixture
def ledger() -> PrefetchLedger:
    return PrefetchLedger(8, BYTES)


@pytest.mark.timeout(20)
def test_what_is_wanted_still_goes_on_also_without_slack(ledger: PrefetchLedger):
    ledger.planned(1, blocks(0, 1, 2), 5.0)
    ledger.expire(5.0, of(1), slack_s=0.0)
    assert ledger.open_bytes == BYTES
    ledger.expire(5.0, of(1), slack_s=3.0)
    ledger.expire(7.9, of(), slack_s=3.0)
    assert ledger.open_bytes == BYTES
    ledger.expire(8.0, of(), slack_s=3.0)
    assert ledger.outcomes[PrefetchOutcome.WASTED] == 3 * BYTES
    assert ledger.open_bytes == 0


def test_what_was_planned_for_later_keeps_nobody_open(ledger: PrefetchLedger):
    ledger.planned(1, blocks(0, 1), 3600.0)
    ledger.planned(2, blocks(2), 5.0)
    ledger.expire(5.0, of(), slack_s=1.0)
    assert ledger.outcomes[PrefetchOutcome.WASTED] == BYTES
    assert ledger.open_bytes == 2 * BYTES


def test_nothing_is_kept_of_what_has_its_outcome(ledger: PrefetchLedger):
    """But until its time is over: however many are planned, memory is bounded."""
    for transfer in range(1, 100):
        ledger.planned(transfer, blocks(0, 1), float(transfer))
        ledger.issued(transfer, 0.0)
        assert ledger.read(blocks(0, 1), turn_s=1.0) == 2
        ledger.expire(float(transfer), of(0, 1), slack_s=5.0)
        assert not ledger._left
        assert not ledger._issued_s
        assert not ledger._expiries
    assert ledger.outcomes[PrefetchOutcome.USED] == ledger.planned_bytes == 99 * 2 * BYTES


@pytest.mark.parametrize(("issued_s", "outcome"), [(3.0, "used"), (3.1, "late"), (None, "late")])
def test_what_was_issued_after_the_turn_of_who_reads_it_is_late(
    ledger: PrefetchLedger, issued_s: float | None, outcome: str
):
    ledger.planned(1, blocks(0, 1), 9.0)
    if issued_s is not None:
        ledger.issued(1, issued_s)
    assert ledger.read(blocks(1, 7), turn_s=3.0) == 1
    assert ledger.outcomes[PrefetchOutcome(outcome)] == BYTES
    ledger.lost(blocks(0, 1))
    assert ledger.outcomes[PrefetchOutcome.WASTED] == BYTES
