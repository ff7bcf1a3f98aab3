"""What the kernel's files say of a machine, on machines of several kinds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import machines
import pytest
from machines import GIB, tree_of

from forebay.errors import SettingsError
from forebay.machine import cpus, driver
from forebay.machine.cgroups import cpu_quota, memory_limits, swap_is_barred
from forebay.machine.memory import read_huge_pages, read_memory
from forebay.machine.sizes import parse_size, show_size
from forebay.machine.tree import Tree, as_numbers


def test_bare_metal_has_its_own_memory_and_no_quota(tmp_path: Path):
    tree = tree_of(tmp_path, machines.bare_metal())
    memory = read_memory(tree)
    assert memory.limits == []
    assert memory.room_bytes == 480 * GIB
    assert cpu_quota(tree) is None
    assert not swap_is_barred(tree)
    assert [(node.number, len(node.cpus)) for node in cpus.read_nodes(tree)] == [(0, 16), (1, 16)]


def test_a_containers_limit_counts_without_the_page_cache(tmp_path: Path):
    tree = tree_of(tmp_path, machines.container_v2())
    (limit,) = memory_limits(tree)
    assert (limit.limit_bytes, limit.room_bytes) == (8 * GIB, 7 * GIB)
    assert read_memory(tree).room_bytes == 7 * GIB
    assert swap_is_barred(tree)
    assert cpu_quota(tree) == 1.5


def test_a_limit_above_the_own_group_binds(tmp_path: Path):
    tree = tree_of(tmp_path, machines.nested_v2())
    (limit,) = memory_limits(tree)
    assert limit.folder == "/sys/fs/cgroup/model.slice"
    assert limit.room_bytes == 10 * GIB
    assert cpu_quota(tree) == 4.0


def test_the_bound_above_which_a_group_is_slowed_down_counts(tmp_path: Path):
    files = machines.container_v2() | {"/sys/fs/cgroup/memory.high": str(5 * GIB)}
    (limit,) = memory_limits(tree_of(tmp_path, files))
    assert (limit.limit_bytes, limit.room_bytes) == (5 * GIB, 4 * GIB)


@pytest.mark.parametrize("group", ["/docker/abc", "/", "/../other", "/somewhere/not/shown"])
def test_version_1_is_found_whatever_path_the_kernel_names(tmp_path: Path, group: str):
    tree = tree_of(tmp_path, machines.container_v1(group))
    (limit,) = memory_limits(tree)
    assert (limit.limit_bytes, limit.room_bytes) == (4 * GIB, 3 * GIB)
    assert cpu_quota(tree) == 2.5


def test_version_1_says_no_limit_by_a_huge_one(tmp_path: Path):
    files = machines.container_v1()
    files["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = "9223372036854771712"
    files["/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us"] = "-1"
    tree = tree_of(tmp_path, files)
    assert memory_limits(tree) == []
    assert cpu_quota(tree) is None


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("50000 100000", 1), ("250000 100000", 3), ("?", 8)]
)
def test_cores_follow_affinity_and_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    tree = tree_of(tmp_path, machines.container_v2(quota=quota))
    assert cpus.usable_cores(tree) == cores


def test_a_kernel_that_refuses_what_it_does_not_have(tmp_path: Path):
    files = machines.bare_metal() | {
        "/proc/sys/vm/overcommit_memory": "2",
        "/proc/meminfo": machines.meminfo(MemAvailable=400, CommitLimit=100, Committed_AS=40),
    }
    memory = read_memory(tree_of(tmp_path, files))
    assert memory.room_bytes == memory.commit_room_bytes == 60 * GIB


def test_huge_pages(tmp_path: Path):
    pool = "/sys/kernel/mm/hugepages/hugepages-2048kB"
    files = machines.bare_metal() | {f"{pool}/nr_hugepages": "10", f"{pool}/free_hugepages": "4"}
    pages = read_huge_pages(tree_of(tmp_path, files))
    assert (pages.enabled, pages.defrag, pages.shared) == ("madvise", "madvise", "advise")
    assert pages.pools == {2 << 20: (10, 4)}
    assert read_huge_pages(Tree(tmp_path / "none")).enabled == ""


def test_an_empty_tree_says_nothing_and_raises_nothing(tmp_path: Path):
    tree = Tree(tmp_path)
    assert read_memory(tree).room_bytes is None
    assert cpus.read_nodes(tree) == []
    assert cpus.usable_cores(tree) >= 1
    assert tree.unread == []


def test_what_cannot_be_read_is_kept_as_unread(tmp_path: Path):
    (tmp_path / "proc" / "meminfo").mkdir(parents=True)
    tree = Tree(tmp_path)
    assert read_memory(tree).total_bytes is None
    assert len(tree.unread) == 1
    assert "/proc/meminfo" in tree.unread[0]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-3,8", {0, 1, 2, 3, 8}), ("", set()), ("a-b", set()), ("0-99999999", set()), (None, set())],
)
def test_lists_of_the_kernel(text: str | None, numbers: set[int]):
    assert as_numbers(text) == numbers


@pytest.mark.parametrize("size", ["64 GiB", "1.5 MiB", "12 bytes", "1,023.5 GiB", "2 TiB"])
def test_sizes_are_shown_as_they_are_written(size: str):
    plain = size.replace(",", "").replace(" bytes", "")
    assert show_size(parse_size(plain)) == size
    with pytest.raises(SettingsError):
        parse_size("much")


def test_the_drivers_answer_becomes_a_value():
    said = {
        "version": 13010,
        "devices": [
            {
                "name": "H200",
                "total_bytes": 1,
                "capability": [9, 0],
                "copy_engines": 3,
                "bus": "0000:1b:00.0",
            }
        ],
    }
    found = driver.driver_from(said)
    assert found.version == (13, 1)
    assert found.devices[0].capability == (9, 0)
    assert not found.missing


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import time; time.sleep(60)", "did not answer"),
        ("import os; os.abort()", "ended the process"),
        ("print('[]')", "ended the process"),
    ],
)
def test_a_driver_that_hangs_or_crashes_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str
):
    script = tmp_path / "ask.py"
    script.write_text(program)
    monkeypatch.setattr(driver, "__file__", str(script))
    found = driver.read_driver(timeout_s=2.0 if "sleep" in program else 60.0)
    assert found.version is None
    assert said in found.error


def test_the_driver_is_asked_by_a_script_that_needs_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [])
    found = driver.read_driver()
    assert found.version or found.error
