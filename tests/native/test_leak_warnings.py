"""What is left when the process ends is told of, unless somebody else keeps it on purpose."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import gc
from forebay import _native

class Cycle:
    pass

kept = Cycle()
kept.itself, kept.counts = kept, _native.BlockCounts(4, "a lease")
gc.freeze()
del kept
_native.leak_warnings({})
"""


@pytest.mark.parametrize("on", [True, False])
def test_what_is_frozen_at_the_end_is_told_of_where_that_is_wanted(on: bool) -> None:
    path = os.pathsep.join(each for each in sys.path if each)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(on)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ("leaked 1 instances" in done.stderr) is on
    assert on or not done.stderr
