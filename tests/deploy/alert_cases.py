"""What a healthy server's series look like, and how each alert's trouble changes them.

A series is its value at the start and how much it grows by the minute.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Series = dict[str, tuple[float, float]]

MINUTES = 90
_LABELS = 'job="forebay",instance="a:8000",model_name="m"'


def named(name: str, **labels: str) -> str:
    """The series `name` of the server that is watched."""
    more = "".join(f',{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{_LABELS}{more}}}"


def _of_process(name: str) -> str:
    return f'{name}{{job="forebay",instance="a:8000"}}'


def _first_token(slow: float) -> Series:
    """Thirty answers a minute, so many of which had no token after two and a half seconds."""
    bounds = {"0.5": 28 - slow, "1": 30 - slow, "2.5": 30 - slow, "10": 30, "+Inf": 30}
    name = "vllm:time_to_first_token_seconds_bucket"
    return {named(name, le=bound): (0, grows) for bound, grows in bounds.items()}


def _prefetched(**mb: float) -> Series:
    outcomes = {"used": 95, "late": 2, "wasted": 1, "cancelled": 1, "refused": 1, "failed": 0} | mb
    name = "forebay:prefetch_bytes_total"
    return {named(name, outcome=word): (0, 1e6 * grows) for word, grows in outcomes.items()}


HEALTHY: Series = {
    _of_process("up"): (1, 0),
    _of_process("process_open_fds"): (50, 0),
    _of_process("process_max_fds"): (1000, 0),
    named("forebay:state", state="serving"): (1, 0),
    named("forebay:state", state="dead"): (0, 0),
    named("forebay:mode", mode="b4"): (1, 0),
    named("forebay:mode", mode="b0"): (0, 0),
    named("vllm:num_requests_running"): (2, 0),
    named("vllm:num_requests_waiting"): (1, 0),
    named("vllm:num_preemptions_total"): (0, 0),
    named("vllm:request_success_total", finished_reason="stop"): (0, 30),
    named("vllm:request_success_total", finished_reason="error"): (0, 0),
    named("forebay:requests_refused_total"): (0, 0),
    named("forebay:steps_total"): (0, 600),
    named("forebay:stall_seconds_total"): (0, 1),
    named("forebay:load_seconds_total"): (0, 12),
    named("forebay:failed_transfers_total", direction="load"): (0, 0),
    named("forebay:failed_transfers_total", direction="save"): (0, 0),
    named("forebay:quarantined_blocks"): (0, 0),
    named("forebay:link_stopped"): (0, 0),
    named("forebay:blocks_total", source="device"): (0, 600),
    named("forebay:blocks_total", source="host"): (0, 300),
    named("forebay:blocks_total", source="recomputed"): (0, 100),
    named("forebay:misses_total", reason="absent"): (0, 90),
    named("forebay:misses_total", reason="late"): (0, 10),
    named("forebay:evicted_blocks_total", tier="device"): (0, 100),
    named("forebay:evicted_blocks_total", tier="host"): (0, 10),
    named("forebay:dropped_dirty_blocks_total"): (0, 1),
    named("forebay:slots", tier="device", state="used"): (90, 0),
    named("forebay:slots", tier="device", state="free"): (10, 0),
    named("forebay:slots", tier="host", state="used"): (990, 0),
    named("forebay:slots", tier="host", state="free"): (10, 0),
    **_first_token(slow=0),
    **_prefetched(),
}


@dataclass(frozen=True)
class Case:
    """`trouble` makes the alert fire after `minutes`, and not after half of them (if they are more
    than one); `nearly` never does. Both are changes of `HEALTHY`.
    """

    alert: str
    minutes: int
    trouble: Series
    nearly: Series = field(default_factory=dict[str, tuple[float, float]])


_IDLE_LINK = {
    named("forebay:load_seconds_total"): (0.0, 0.6),
    named("forebay:stall_seconds_total"): (0.0, 0.5),
}

CASES = (
    Case("ForebayDown", 3, {_of_process("up"): (0, 0)}),
    Case("ForebayEngineDead", 0, {named("forebay:state", state="dead"): (1, 0)}),
    Case(
        "ForebayStuck",
        4,
        {named("forebay:steps_total"): (9, 0)},
        {
            named("forebay:steps_total"): (9, 0),
            named("vllm:num_requests_running"): (0, 0),
            named("vllm:num_requests_waiting"): (0, 0),
        },
    ),
    Case(
        "ForebayRefuses",
        8,
        {named("forebay:requests_refused_total"): (0, 2)},
        {named("forebay:requests_refused_total"): (0, 1)},
    ),
    Case(
        "ForebayAnswersFail",
        1,
        {named("vllm:request_success_total", finished_reason="error"): (0, 1)},
        {named("vllm:request_success_total", finished_reason="error"): (7, 0)},
    ),
    Case("ForebaySlowFirstToken", 14, _first_token(slow=3), _first_token(slow=1)),
    Case(
        "ForebayPreempts",
        20,
        {named("vllm:num_preemptions_total"): (0, 2)},
        {named("vllm:num_preemptions_total"): (0, 1)},
    ),
    Case(
        "ForebayFilesRunOut",
        6,
        {_of_process("process_open_fds"): (900, 0)},
        {_of_process("process_open_fds"): (790, 0)},
    ),
    Case(
        "ForebayCopiesFail",
        1,
        {named("forebay:failed_transfers_total", direction="load"): (0, 1)},
        {named("forebay:failed_transfers_total", direction="load"): (4, 0)},
    ),
    Case("ForebayLinkStopped", 3, {named("forebay:link_stopped"): (1, 0)}),
    Case("ForebaySlotsQuarantined", 0, {named("forebay:quarantined_blocks"): (3, 0)}),
    Case(
        "ForebayLittleHidden",
        20,
        {named("forebay:stall_seconds_total"): (0, 9)},
        _IDLE_LINK,
    ),
    Case("ForebayPrefetchWasted", 20, _prefetched(wasted=20), _prefetched(wasted=20) | _IDLE_LINK),
    Case("ForebayPrefetchLate", 20, _prefetched(late=60), _prefetched(late=30)),
    Case(
        "ForebayLoadsGivenUp",
        20,
        {named("forebay:misses_total", reason="late"): (0, 80)},
        {named("forebay:misses_total", reason="late"): (0, 40)},
    ),
    Case(
        "ForebayDropsUnsaved",
        20,
        {named("forebay:dropped_dirty_blocks_total"): (0, 10)},
        {named("forebay:dropped_dirty_blocks_total"): (0, 4)},
    ),
    Case(
        "ForebayCacheTooSmall",
        40,
        {named("forebay:misses_total", reason="absent"): (0, 500)},
        {
            named("forebay:misses_total", reason="absent"): (0, 500),
            named("forebay:slots", tier="host", state="free"): (100, 0),
        },
    ),
    Case(
        "ForebayHostSmallerThanDevice",
        6,
        {named("forebay:slots", tier="host", state="used"): (70, 0)},
        {named("forebay:slots", tier="host", state="used"): (90, 0)},
    ),
    Case(
        "ForebayCacheOff",
        70,
        {
            named("forebay:mode", mode="b0"): (1, 0),
            named("forebay:mode", mode="b4"): (0, 0),
            # In this mode everything that leaves the device is dropped: no reason to complain.
            named("forebay:dropped_dirty_blocks_total"): (0, 100),
        },
    ),
)


def _in_scheduler(slow: float) -> Series:
    """A thousand steps a minute, so many of which took the connector more than ten milliseconds."""
    bounds = {"0.001": 900, "0.01": 1000 - slow, "0.05": 1000, "+Inf": 1000}
    name = "forebay:scheduler_seconds_bucket"
    return {named(name, le=bound): (0, grows) for bound, grows in bounds.items()}


VLLM_HEALTHY: Series = HEALTHY | {
    named("forebay:saved_bytes_total"): (0, 1e9),
    named("forebay:prompt_tokens_total", source="device"): (0, 2000),
    named("forebay:prompt_tokens_total", source="host"): (0, 5000),
    named("forebay:prompt_tokens_total", source="recomputed"): (0, 3000),
    named("forebay:hints_total", outcome="claimed"): (0, 9),
    named("forebay:hints_total", outcome="expired"): (0, 1),
    named("forebay:wishes_ignored_total", reason="unknown"): (0, 0),
    named("forebay:settle_seconds_total"): (0, 0.1),
    **_in_scheduler(slow=0),
}
"""Of a vLLM with the connector."""

VLLM_CASES = (
    Case("ForebaySlowInScheduler", 15, _in_scheduler(slow=20), _in_scheduler(slow=5)),
    Case(
        "ForebayStepsWaitForSaves",
        20,
        {named("forebay:settle_seconds_total"): (0, 3)},
        {named("forebay:settle_seconds_total"): (0, 1)},
    ),
    Case(
        "ForebaySavesForNobody",
        65,
        {named("forebay:prompt_tokens_total", source="host"): (7, 0)},
        {
            named("forebay:prompt_tokens_total", source="host"): (7, 0),
            named("forebay:saved_bytes_total"): (0, 1e6),
        },
    ),
    Case(
        "ForebayHintsExpire",
        40,
        {named("forebay:hints_total", outcome="expired"): (0, 20)},
        {named("forebay:hints_total", outcome="expired"): (0, 8)},
    ),
    Case(
        "ForebayWishesIgnored",
        1,
        {named("forebay:wishes_ignored_total", reason="unknown"): (0, 1)},
        {named("forebay:wishes_ignored_total", reason="unknown"): (4, 0)},
    ),
)
