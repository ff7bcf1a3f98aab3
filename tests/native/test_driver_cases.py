"""What is said and done where a driver is old, broken, or refuses: over one that is a fake."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "native" / "tests" / "fake_cuda.cpp"
NOTHING_LEFT = str(dict.fromkeys(("events", "streams", "registrations", "allocations"), 0))[:-1]

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler")


def built(folder: Path, *flags: str) -> Path:
    subprocess.run(
        ["c++", "-std=c++20", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *flags,
         str(SOURCE), "-o", str(folder / "libcuda.so.1")],
        check=True, timeout=120,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def driver(tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="session")
def ancient(tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("ancient"), "-DFAKE_CUDA_ANCIENT")


def run(folder: Path, case: str, **settings: int | str) -> str:
    done = subprocess.run(
        [sys.executable, str(HERE / "driver_cases.py"), case],
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(folder),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            **{f"FAKE_CUDA_{name}": str(value) for name, value in settings.items()},
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"WITHOUT": "cuStreamWaitValue32"}, "does not have cuStreamWaitValue32: install one of"),
        ({"INIT": 2}, "does not start: CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_a_driver_that_cannot_be_used_is_refused_with_what_to_do(driver, settings, says):
    assert says in run(driver, "a_driver_that_cannot_be_used", **settings)


def test_an_old_driver_is_refused_with_what_to_do(ancient):
    said = run(ancient, "a_driver_that_cannot_be_used")
    assert said == "the NVIDIA driver is older than CUDA 12.0: install a newer one\n"


def test_a_process_that_was_forked_under_a_driver_is_told_so(driver):
    assert "start it by spawn" in run(driver, "a_fork", FORKED=1)


def test_a_machine_whose_driver_sees_no_device_is_told_so(driver):
    assert "this process sees 0" in run(driver, "no_device", DEVICES=0)


# Before CUDA 12.8 there is no call for a whole window; 13 dropped one of its arguments.
@pytest.mark.parametrize("version", [12000, 12080, 13000])
def test_blocks_cross_by_every_driver_and_nothing_is_left_behind(driver, version):
    assert NOTHING_LEFT in run(driver, "copies_and_gives_everything_back", VERSION=version)


def test_memory_is_not_unpinned_under_a_mover(driver):
    assert "close it first" in run(driver, "memory_under_a_mover")


@pytest.mark.parametrize("version", [12000, 13000])
def test_layers_that_lie_evenly_apart_cross_as_rows(driver, version):
    rows, slices = map(int, run(driver, "layers_apart_cross_as_rows", VERSION=version).split())
    assert rows >= 2 * 32
    assert slices == 0


def test_layers_that_were_allocated_one_by_one_do_not_cross_as_rows(driver):
    """A driver refuses a copy that leaves an allocation, and layers are 2,048 bytes apart there."""
    assert run(driver, "layers_apart_cross_as_rows", ALLOCATION_BYTES=2048).split() == ["0", "0"]


def test_layers_further_apart_than_a_pitch_may_be_cross_as_slices(driver):
    _, slices = map(int, run(driver, "layers_apart_cross_as_rows", MAX_PITCH=1024).split())
    assert slices >= 2 * 32


def test_layers_for_which_there_is_no_pitch_cross_all_the_same(driver):
    assert run(driver, "layers_apart_cross_as_rows", MAX_PITCH=63).split() == ["0", "0"]


def test_a_fault_of_the_device_fails_what_is_in_flight_and_what_comes_later(driver):
    said = run(driver, "a_fault_ends_everything_as_failed", COPIES_UNTIL_FAULT=12)
    assert "recompute its blocks" in said
    assert said.endswith("True\n")
    assert NOTHING_LEFT in said


def test_a_step_that_is_captured_is_refused_since_it_would_never_end(driver):
    said = run(driver, "a_step_that_is_captured")
    assert "step 1 would never count as run" in said
    assert "CUDA_ERROR_CAPTURED_EVENT" in said
    assert "where it is launched" in said


def test_memory_that_may_not_be_registered_is_allocated_by_the_driver(driver):
    said = run(driver, "memory_that_may_not_be_registered", GOOD_REGISTRATIONS=0)
    assert said.startswith("allocated")
    assert NOTHING_LEFT in said


def test_memory_that_cannot_be_pinned_either_way_is_refused_with_both_reasons(driver):
    said = run(
        driver, "memory_that_cannot_be_pinned_at_all", GOOD_REGISTRATIONS=0, REFUSE_ALLOCATING=1
    )
    assert "CUDA_ERROR_NOT_SUPPORTED" in said
    assert "CUDA_ERROR_OUT_OF_MEMORY, as the test asked: use a smaller pool" in said
    assert NOTHING_LEFT in said


def test_pinning_that_stops_half_way_leaves_the_front_and_says_why(driver):
    said = run(driver, "registering_that_stops_half_way", GOOD_REGISTRATIONS=3)
    assert said.startswith("24 registered pinning host memory: CUDA_ERROR_NOT_SUPPORTED")


def test_memory_of_the_caller_is_pinned_and_left_as_it_was(driver):
    said = run(driver, "memory_of_the_caller")
    assert NOTHING_LEFT in said
    assert "must begin at a page" in said
    assert "one-dimensional" in said


def test_pinning_ends_when_its_arena_is_closed(driver):
    said = run(driver, "pinning_that_is_closed_before_its_end")
    assert said.startswith("True")
    assert said.endswith("True\n")
    assert NOTHING_LEFT in said


def test_pinning_leaves_the_driver_to_others_until_it_is_waited_for(driver):
    assert run(driver, "pinning_pauses_until_it_is_waited_for") == "True True\n"


def test_pinning_in_the_background_does_not_disturb_a_capture(driver):
    """Another thread of the process may be capturing a CUDA graph, as engines do at their start."""
    said = run(driver, "pinning_while_a_graph_is_captured")
    assert said.startswith("True no error\n")
    assert "CUDA_ERROR" in said


def test_a_pool_larger_than_memory_is_refused_before_it_takes_any(driver):
    said = run(driver, "a_pool_that_does_not_fit")
    assert "1,024 TiB of pinned memory do not fit" in said
    assert "use a smaller pool" in said
