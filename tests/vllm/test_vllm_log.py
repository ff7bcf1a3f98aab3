"""What the connector says in vLLM's log. Needs no vLLM."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from forebay.vllm.options import Options
from forebay.vllm.seen.log import join_log, tell_sizes, warnings_told


@pytest.fixture
def theirs() -> Iterator[io.StringIO]:
    """What vLLM's logger writes, which is set up as vLLM does; afterwards all is as before."""
    ours, vllm = logging.getLogger("forebay"), logging.getLogger("vllm")
    before = [(each, each.handlers[:], each.level, each.propagate) for each in (ours, vllm)]
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("VLLM %(levelname)s %(message)s"))
    vllm.handlers, vllm.propagate = [handler], False
    vllm.setLevel(logging.INFO)
    ours.handlers = []
    yield written
    for each, handlers, level, propagate in before:
        each.handlers, each.propagate = handlers, propagate
        each.setLevel(level)


def said() -> None:
    options = Options.parse({"host_bytes": "4GiB"})
    tell_sizes(options.settings(block_tokens=16, block_bytes=2 << 20, device_slots=100))


def test_the_sizes_are_said_once_in_vllms_form(theirs: io.StringIO):
    logging.getLogger("forebay").propagate = False
    join_log()
    join_log()
    said()
    (line,) = theirs.getvalue().splitlines()
    assert line.startswith("VLLM INFO Forebay ")
    assert "in mode b4: host memory for 32,768 tokens (4 GiB), vLLM's own for 1,600;" in line


def test_host_memory_that_is_too_small_is_warned_of_in_vllms_form(
    theirs: io.StringIO, recwarn: pytest.WarningsRecorder
):
    logging.getLogger("forebay").propagate = False
    join_log()
    with warnings_told():
        Options.parse({"host_bytes": "1MiB"}).settings(
            block_tokens=16, block_bytes=1 << 18, device_slots=100
        )
    (line,) = theirs.getvalue().splitlines()
    assert line.startswith(
        "VLLM WARNING Forebay: the host tier (4 blocks) is smaller than the device"
    )
    assert not recwarn.list


def test_logging_that_its_user_has_set_up_is_left_alone(
    theirs: io.StringIO, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO, "forebay"):
        join_log()
        said()
    assert "in mode b4" in caplog.text
    assert not theirs.getvalue()
