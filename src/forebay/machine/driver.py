"""The CUDA driver and its devices, asked of libcuda itself: no toolkit and no framework is needed.

A broken driver can hang or crash whoever loads it, so the question is put by a process of its own:
this file, run as a script, which therefore imports nothing of the project.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

_TIMEOUT_S = 60.0
"""Creating a driver's state on a machine with many devices takes seconds."""

# Of CUdevice_attribute.
_COPY_ENGINES, _MAJOR, _MINOR = 40, 75, 76


@dataclass(frozen=True, slots=True)
class Device:
    """A device as the driver describes it; `bus` like "0000:1b:00.0"."""

    name: str
    total_bytes: int
    capability: tuple[int, int]
    copy_engines: int
    bus: str


@dataclass(frozen=True, slots=True)
class Driver:
    """`version` is the newest CUDA that the driver carries, such as (13, 0).

    Without a usable driver `version` is None and `error` says why; `missing` where there is none.
    """

    version: tuple[int, int] | None = None
    devices: tuple[Device, ...] = ()
    error: str = ""
    missing: bool = False


def read_driver(timeout_s: float = _TIMEOUT_S) -> Driver:
    """Ask the driver. Never raises; takes `timeout_s` at most."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", __file__],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return driver_from(json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        return Driver(error=f"the driver did not answer in {timeout_s:.0f} s")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Driver(error=f"the driver ended the process that asked it ({error})")


def driver_from(said: dict[str, Any]) -> Driver:
    """What the script said, as a value."""
    version = said.get("version")
    return Driver(
        version=None if version is None else (version // 1000, version % 1000 // 10),
        devices=tuple(_device_from(each) for each in said["devices"]),
        error=said.get("error", ""),
        missing=said.get("missing", False),
    )


def _device_from(said: dict[str, Any]) -> Device:
    major, minor = said["capability"]
    return Device(
        name=said["name"],
        total_bytes=said["total_bytes"],
        capability=(major, minor),
        copy_engines=said["copy_engines"],
        bus=said["bus"],
    )


def _ask() -> dict[str, Any]:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"devices": [], "error": str(error), "missing": True}
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    said: dict[str, Any] = {"version": version.value, "devices": []}
    status = cuda.cuInit(0)
    if status:
        return said | {"error": f"cuInit: {_error_name(cuda, status)}"}
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return said | {"devices": [_device(cuda, ordinal) for ordinal in range(count.value)]}


def _device(cuda: ctypes.CDLL, ordinal: int) -> dict[str, Any]:
    device = ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    name, bus = ctypes.create_string_buffer(128), ctypes.create_string_buffer(32)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceGetPCIBusId(bus, len(bus), device)
    total = ctypes.c_size_t()
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)

    def attribute(which: int) -> int:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), which, device)
        return value.value

    return {
        "name": name.value.decode(errors="replace"),
        "total_bytes": total.value,
        "capability": [attribute(_MAJOR), attribute(_MINOR)],
        "copy_engines": attribute(_COPY_ENGINES),
        "bus": bus.value.decode(errors="replace").lower(),
    }


def _error_name(cuda: ctypes.CDLL, status: int) -> str:
    name = ctypes.c_char_p()
    cuda.cuGetErrorName(status, ctypes.byref(name))
    return name.value.decode() if name.value else f"error {status}"


if __name__ == "__main__":
    print(json.dumps(_ask()))
