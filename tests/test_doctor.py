"""The doctor: what it finds on machines of several kinds, and that nothing makes it fail."""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import machines
import pytest
from machines import GIB, NO_DRIVER, machine_of

from forebay.doctor import software
from forebay.doctor.command import as_text
from forebay.doctor.examine import examine
from forebay.doctor.finding import Disk, Finding, Level, Machine, Wanted
from forebay.machine.driver import Device, Driver
from forebay.machine.tree import Tree

H200 = Device("NVIDIA H200", 140 * GIB, (9, 0), 3, "0000:1b:00.0")
GPU = Driver(version=(13, 0), devices=(H200,))


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


def found(machine: Machine, subject: str, **wanted: Any) -> Finding:
    diagnosis = examine(machine, Wanted(port=0, **wanted))
    (finding,) = [each for each in diagnosis.findings if each.subject == subject]
    return finding


def test_a_good_machine_has_nothing_to_complain_of(tmp_path: Path):
    diagnosis = examine(machine_of(tmp_path, machines.bare_metal()), Wanted(port=0))
    worse = [each for each in diagnosis.findings if each.level in (Level.WARN, Level.FAIL)]
    assert worse == []
    assert not diagnosis.fails
    assert diagnosis.summary == "host pool up to 479.6 GiB on this machine"


@pytest.mark.parametrize("files", [machines.container_v2(), machines.container_v1()])
def test_a_host_pool_above_the_containers_limit_fails(tmp_path: Path, files: dict[str, str]):
    machine = machine_of(tmp_path, files)
    finding = found(machine, "memory", host_bytes=64 * GIB)
    assert finding.level is Level.FAIL
    assert "control group /sys/fs/cgroup" in finding.read
    assert "64 GiB" in finding.limits
    assert "docker run --memory" in finding.help
    assert found(machine, "memory", host_bytes=GIB).level is Level.OK


def test_a_slices_limit_is_named(tmp_path: Path):
    machine = machine_of(tmp_path, machines.nested_v2())
    finding = found(machine, "memory", host_bytes=9.5 * GIB)
    assert finding.level is Level.WARN
    assert "/sys/fs/cgroup/model.slice: limit 16 GiB" in finding.read
    assert "up to 9.6 GiB" in examine(machine, Wanted(port=0)).summary


def test_a_kernel_that_never_overcommits(tmp_path: Path):
    files = machines.bare_metal() | {
        "/proc/sys/vm/overcommit_memory": "2",
        "/proc/meminfo": machines.meminfo(MemAvailable=400, CommitLimit=3, Committed_AS=2),
    }
    finding = found(machine_of(tmp_path, files), "memory", host_bytes=2 * GIB)
    assert finding.level is Level.FAIL
    assert "overcommit" in finding.read


def test_limits_of_address_space_fail_what_is_above(tmp_path: Path):
    machine = machine_of(tmp_path, machines.bare_metal(), limits={resource.RLIMIT_AS: GIB})
    finding = found(machine, "address space", host_bytes=2 * GIB)
    assert finding.level is Level.FAIL
    assert finding.help == "ulimit -v unlimited"


@pytest.mark.parametrize(
    ("limit", "driver", "level"),
    [
        (None, GPU, Level.OK),
        (8 << 20, NO_DRIVER, Level.OK),
        (8 << 20, GPU, Level.NOTE),
        (128 * GIB, GPU, Level.OK),
    ],
)
def test_locked_memory(
    tmp_path: Path,
    limit: int | None,
    driver: Driver,
    level: Level,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(software, "torch_cuda", lambda: (13, 0))
    limits = {resource.RLIMIT_MEMLOCK: limit}
    machine = machine_of(tmp_path, machines.bare_metal(), limits=limits, driver=driver)
    finding = found(machine, "locked memory", host_bytes=64 * GIB)
    assert finding.level is level
    if level is Level.NOTE:
        assert "64 GiB" in finding.limits
        assert "limit 8 MiB" in finding.read
        assert "memlock=-1" in finding.help


def test_swap_counts_unless_the_group_bars_it(tmp_path: Path):
    swap = {"/proc/meminfo": machines.meminfo(MemAvailable=4, MemTotal=8, SwapTotal=2)}
    open_to_swap = machine_of(tmp_path / "a", machines.bare_metal() | swap)
    barred = machine_of(tmp_path / "b", machines.container_v2() | swap)
    assert found(open_to_swap, "swap").level is Level.NOTE
    assert found(barred, "swap").level is Level.OK


def test_small_shared_memory_and_huge_pages(tmp_path: Path):
    pool = "/sys/kernel/mm/hugepages/hugepages-1048576kB"
    files = machines.bare_metal() | {
        "/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
        f"{pool}/nr_hugepages": "4",
        f"{pool}/free_hugepages": "3",
    }
    machine = machine_of(tmp_path, files, disk=Disk(64 << 20, 64 << 20))
    assert "--shm-size" in found(machine, "/dev/shm").help
    assert found(machine, "huge pages").help.startswith("echo madvise >")
    assert found(machine, "huge page pools").read.startswith("3 GiB")


def test_one_core_by_quota_warns_and_threads_above_it_are_told(tmp_path: Path):
    files = machines.container_v2(quota="100000 100000")
    machine = machine_of(tmp_path, files, environ={"OMP_NUM_THREADS": "16"})
    finding = found(machine, "processors")
    assert finding.level is Level.WARN
    assert "allows 1 of 16" in finding.read
    assert found(machine, "OMP_NUM_THREADS").help == "export OMP_NUM_THREADS=1"


@pytest.mark.parametrize(
    ("cpus", "level"), [(range(16), Level.WARN), (range(16, 32), Level.OK), (range(32), Level.NOTE)]
)
def test_a_process_at_the_wrong_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: range, level: Level
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus), raising=False)
    files = machines.bare_metal() | {"/sys/bus/pci/devices/0000:1b:00.0/numa_node": "1"}
    machine = machine_of(tmp_path, files, driver=GPU)
    finding = found(machine, "NUMA")
    assert finding.level is level
    assert "device 0000:1b:00.0 at 1" in finding.read
    if level is not Level.OK:
        assert "--cpunodebind=1" in finding.help
    assert found(machine, "NUMA memory", host_bytes=300 * GIB).level is Level.NOTE


def test_a_slow_clock(tmp_path: Path):
    base = "/sys/devices/system/clocksource/clocksource0"
    files = machines.bare_metal() | {
        f"{base}/current_clocksource": "hpet",
        f"{base}/available_clocksource": "hpet tsc",
    }
    assert found(machine_of(tmp_path, files), "clock").help.startswith("echo tsc >")


@pytest.mark.parametrize(
    ("driver", "seen", "level"),
    [
        (NO_DRIVER, False, Level.OK),
        (NO_DRIVER, True, Level.WARN),
        (Driver(version=(13, 0), error="cuInit: CUDA_ERROR_NO_DEVICE"), True, Level.WARN),
        (Driver(error="the driver did not answer in 60 s"), True, Level.WARN),
        (GPU, True, Level.OK),
    ],
)
def test_drivers(tmp_path: Path, driver: Driver, seen: bool, level: Level):
    files = machines.bare_metal() | ({"/dev/nvidia0": ""} if seen else {})
    machine = machine_of(tmp_path, files, driver=driver)
    assert found(machine, "CUDA driver").level is level
    if driver.devices:
        assert "capability 9.0, 3 copy engines" in found(machine, "GPU").read


def test_torch_newer_than_the_driver_and_none_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    old = Driver(version=(12, 8), devices=(H200,))
    machine = machine_of(tmp_path, machines.bare_metal(), driver=old)
    monkeypatch.setattr(software, "torch_cuda", lambda: (13, 0))
    assert found(machine, "PyTorch").level is Level.FAIL
    monkeypatch.setattr(software, "torch_cuda", lambda: None)
    assert found(machine, "PyTorch").level is Level.NOTE


@pytest.mark.parametrize(
    ("wanted", "built", "driver", "level", "said"),
    [
        ("auto", (13, 0), GPU, Level.OK, "cuda:0, NVIDIA H200 (auto)"),
        ("auto", (13, 0), NO_DRIVER, Level.OK, "cpu (auto: no GPU is seen)"),
        ("auto", None, GPU, Level.OK, "cpu (auto: PyTorch is not there, or"),
        ("cpu", (13, 0), GPU, Level.OK, "cpu (--device cpu)"),
        ("cuda", (13, 0), GPU, Level.OK, "cuda:0, NVIDIA H200 (--device cuda)"),
        ("cuda", None, GPU, Level.FAIL, "a build for the CPU"),
        ("cuda:1", (13, 0), GPU, Level.FAIL, "the driver shows 1, counted from 0"),
        ("cuda", (14, 0), GPU, Level.FAIL, "needs a driver of CUDA 14, and this one has 13"),
        ("cuda", (13, 0), NO_DRIVER, Level.FAIL, "--device cuda: no GPU is seen"),
        ("tpu", (13, 0), GPU, Level.FAIL, "must be auto, cpu, cuda or cuda:N"),
    ],
)
def test_what_a_server_would_run_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    built: tuple[int, int] | None,
    driver: Driver,
    level: Level,
    said: str,
):
    monkeypatch.setattr(software, "torch_cuda", lambda: built)
    machine = machine_of(tmp_path, machines.bare_metal(), driver=driver)
    finding = found(machine, "device", device=wanted)
    assert finding.level is level
    assert said in finding.read


def test_a_gpu_takes_weights_in_16_bit_and_the_device_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(software, "torch_cuda", lambda: (13, 0))
    model = str(model_folder(tmp_path / "model"))
    machine = machine_of(tmp_path / "root", machines.bare_metal(), driver=GPU)
    assert (
        "512 KiB of weights in 16 bit, 512 bytes of KV" in found(machine, "model", model=model).read
    )
    assert found(machine, "GPU memory", model=model).level is Level.OK
    finding = found(machine, "GPU memory", model=model, device_tokens=1 << 30)
    assert finding.level is Level.FAIL
    assert "a device pool of 512 GiB" in finding.limits
    little, much = (
        examine(machine, Wanted(port=0, model=model, device_tokens=tokens)).host_pool_bytes
        for tokens in (1024, 1 << 20)
    )
    assert little == much


def test_the_cuda_of_torch_is_read_from_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = tmp_path / "torch"
    place.mkdir()
    (place / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for line, cuda in (
        ("cuda: Optional[str] = '12.8'", (12, 8)),
        ("cuda = '13.0'", (13, 0)),
        ("cuda: Optional[str] = None", None),
    ):
        (place / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip = None\n")
        assert software.torch_cuda() == cuda


def test_a_port_that_is_taken_and_a_host_that_is_not_here(tmp_path: Path):
    machine = machine_of(tmp_path, machines.bare_metal())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        findings = examine(machine, Wanted(port=port)).findings
    (finding,) = [each for each in findings if each.subject == "port"]
    assert finding.level is Level.FAIL
    assert f"127.0.0.1:{port}" in finding.read
    assert "another --port" in finding.help
    assert found(machine, "port", host="192.0.2.1").level is Level.FAIL
    assert found(machine, "port", host="0.0.0.0").level is Level.NOTE
    keys = {"FOREBAY_API_KEY": "a", "FOREBAY_OPERATOR_KEY": "b"}
    guarded = machine_of(tmp_path, machines.bare_metal(), environ=keys)
    assert found(guarded, "port", host="0.0.0.0").level is Level.OK


def test_open_files_and_the_listen_queue(tmp_path: Path):
    files = machines.bare_metal() | {"/proc/sys/net/core/somaxconn": "128"}
    machine = machine_of(tmp_path, files, limits={resource.RLIMIT_NOFILE: 1024})
    finding = found(machine, "open files")
    assert finding.level is Level.WARN
    assert "4096 connections" in finding.limits
    assert found(machine, "listen queue").level is Level.NOTE


def weights_file(file: Path, shape: list[int], cut: int = 0) -> None:
    size = 2 * shape[0] * shape[1]
    header = json.dumps({"w": {"dtype": "F16", "shape": shape, "data_offsets": [0, size]}}).encode()
    file.write_bytes((struct.pack("<Q", len(header)) + header + bytes(size))[: -cut or None])


def model_folder(folder: Path) -> Path:
    folder.mkdir()
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    weights_file(folder / "model.safetensors", [1024, 256])
    return folder


def test_a_models_weights_and_kv_count(tmp_path: Path):
    folder = model_folder(tmp_path / "model")
    machine = machine_of(tmp_path / "root", machines.container_v2())
    finding = found(machine, "model", model=str(folder))
    assert finding.level is Level.OK
    assert "1 MiB of weights in 32 bit, 1 KiB of KV a token" in finding.read
    with_model = examine(machine, Wanted(port=0, model=str(folder), device_tokens=1024))
    without = examine(machine, Wanted(port=0, device_tokens=1024))
    assert without.host_pool_bytes is not None
    assert with_model.host_pool_bytes == without.host_pool_bytes - (2 << 20)
    assert with_model.host_pool_tokens == with_model.host_pool_bytes // 1024
    assert without.host_pool_tokens is None


def test_a_hub_id_is_found_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    machine = machine_of(tmp_path / "root", machines.container_v2())
    missing = found(machine, "model", model="owner/name")
    assert missing.level is Level.NOTE
    assert "hub's cache" in missing.read
    repository = tmp_path / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    model_folder(repository / "snapshots" / ("0" * 40))
    for name in ("owner/name", f"owner/name@{'0' * 40}"):
        there = found(machine, "model", model=name)
        assert there.level is Level.OK
        assert "1 MiB of weights" in there.read
    assert found(machine, "model", model="owner/name@other").level is Level.NOTE
    assert found(machine, "model", model="/no/such").level is Level.FAIL


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "lacks config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is damaged"),
        (lambda folder: weights_file(folder / "model.safetensors", [8, 8], cut=1), "is cut off"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64),
            "no safetensors file",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(bytes(8)),
            "no safetensors file",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("[]"),
            "index.json is damaged",
        ),
    ],
)
def test_a_model_folder_that_is_not_whole_fails(tmp_path: Path, spoil: Any, said: str):
    folder = model_folder(tmp_path / "model")
    spoil(folder)
    finding = found(machine_of(tmp_path, machines.bare_metal()), "model", model=str(folder))
    assert finding.level is Level.FAIL
    assert said in finding.read
    assert "copy" in finding.help


def test_the_cache_folder_needs_room_before_the_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "not" / "yet"))
    full = machine_of(tmp_path, machines.bare_metal(), disk=Disk(GIB, 1 << 20))
    assert found(full, "cache folder", model="smollm2").level is Level.FAIL
    assert found(full, "cache folder").level is Level.NOTE
    roomy = machine_of(tmp_path, machines.bare_metal())
    assert found(roomy, "cache folder", model="smollm2").level is Level.OK
    assert found(roomy, "model", model="smollm2").level is Level.OK


def test_nothing_makes_it_fail(tmp_path: Path):
    def broken(*_: object) -> Any:
        raise ValueError("broken")

    (tmp_path / "proc" / "meminfo").mkdir(parents=True)
    machine = Machine(tree=Tree(tmp_path), limit=broken, disk=broken, driver=NO_DRIVER, environ={})
    diagnosis = examine(machine, Wanted(port=0, model=str(tmp_path)))
    subjects = {finding.subject for finding in diagnosis.findings if "broken" in finding.read}
    assert {"locked memory", "/dev/shm", "open files", "cache folder"} <= subjects
    assert any(finding.subject == "unread" for finding in diagnosis.findings)
    assert diagnosis.host_pool_bytes is None
    assert "host pool: unknown" in as_text(diagnosis)


def test_beside_vllm_what_only_the_server_needs_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    machine = machine_of(tmp_path, machines.bare_metal())
    monkeypatch.setattr(software, "_installed", lambda name: name != "fastapi-offline")
    monkeypatch.setattr(software, "vllm_version", lambda: None)
    assert found(machine, "packages").level is Level.FAIL
    assert not [each for each in examine(machine, Wanted()).findings if each.subject == "vLLM"]
    monkeypatch.setattr(software, "vllm_version", lambda: "0.32.0+cpu")
    assert found(machine, "packages").level is Level.NOTE
    assert "the connector inside vLLM" in found(machine, "packages").limits
    assert "another environment" in found(machine, "packages").help


def test_a_vllm_that_was_not_tried_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    machine = machine_of(tmp_path, machines.bare_metal())
    monkeypatch.setattr(software, "vllm_version", lambda: "0.32.1")
    assert found(machine, "vLLM").level is Level.OK
    monkeypatch.setattr(software, "vllm_version", lambda: "0.99.0")
    assert found(machine, "vLLM").level is Level.WARN
    monkeypatch.setattr(software.importlib.metadata, "entry_points", lambda group: ())
    plug_in, _ = (each for each in examine(machine, Wanted()).findings if each.subject == "vLLM")
    assert "does not find ForebayConnector" in plug_in.limits
