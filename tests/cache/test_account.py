"""The books say why copies fail, and do not fill a log with it."""

from __future__ import annotations

import logging

import pytest

from forebay.cache.account import Account
from forebay.transfer.messages import Completion, Outcome


def ended(outcome: Outcome, error: str = "") -> Completion:
    return Completion(1, outcome, 0, 0, 0, 0.0, 0.0, error)


def test_each_reason_of_failed_copies_is_told_once(caplog: pytest.LogCaptureFixture):
    account = Account()
    with caplog.at_level(logging.WARNING, "forebay.cache"):
        for _ in range(3):
            account.saved(ended(Outcome.FAILED, "copying rows: CUDA_ERROR_INVALID_VALUE"))
        account.saved(ended(Outcome.CANCELLED))
        account.loaded(ended(Outcome.DONE))
        account.loaded(ended(Outcome.FAILED, "copying rows: CUDA_ERROR_INVALID_VALUE"))
    told = [record.getMessage() for record in caplog.records]
    assert [line.split(",")[0] for line in told] == ["a save failed", "a load failed"]
    assert all("CUDA_ERROR_INVALID_VALUE" in line for line in told)
    assert (account.failed_saves, account.failed_loads) == (3, 1)


def test_reasons_that_are_all_different_do_not_fill_the_log(caplog: pytest.LogCaptureFixture):
    account = Account()
    with caplog.at_level(logging.WARNING, "forebay.cache"):
        for block in range(100):
            account.loaded(ended(Outcome.FAILED, f"block {block} was lost"))
    assert 0 < len(caplog.records) < 10
    assert account.failed_loads == 100
