"""What is installed: the extension, PyTorch, what the server needs, and the driver below it all."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import forebay
from forebay.doctor.finding import Finding, Level, Machine
from forebay.machine.sizes import show_size
from forebay.release import INSTALL_SERVER
from forebay.vllm.adapter import TRIED, TRIED_SPAN, version_of
from forebay.vllm.plugin import GROUP, NAME

_SERVING = "forebay serve, chat and demo cannot start; `Cache` under your own loop can"
_INSIDE_VLLM = ", and so can the connector inside vLLM"


def check_extension() -> Iterator[Finding]:
    """The native core: whether it loads, and which interpreter it was built for."""
    places = [Path(place) for place in forebay.__path__]
    built = sorted(file.name for place in places for file in place.glob("_native*.so"))
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    todo = "make native in a source tree, else pip install --force-reinstall --no-deps forebay"
    try:
        spec = importlib.util.find_spec("forebay._native")
        if spec is None:
            read = f"built for another interpreter: {', '.join(built)}" if built else "not built"
            limits = f"nothing can be moved: this interpreter loads _native{suffix}"
            yield Finding("extension", Level.FAIL, read, limits, todo)
            return
        importlib.import_module("forebay._native")
    except ImportError as error:
        yield Finding(
            "extension", Level.FAIL, f"does not load: {error}", "nothing can be moved", todo
        )
        return
    yield Finding("extension", Level.OK, Path(str(spec.origin)).name)


def check_packages() -> Iterator[Finding]:
    """What `forebay serve` needs beside PyTorch."""
    try:
        requirements = importlib.metadata.requires("forebay") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "packages",
            Level.NOTE,
            "forebay runs from a source tree that is not installed",
            "what is missing cannot be said",
            "pip install -e '.[server]' in it",
        )
        return
    missing = sorted(name for name in _needed_to_serve(requirements) if not _installed(name))
    if missing:
        read = f"not installed: {', '.join(missing)}"
        if vllm_version() is None:
            yield Finding("packages", Level.FAIL, read, _SERVING, INSTALL_SERVER)
        else:
            todo = f"in another environment, so that vLLM keeps its packages: {INSTALL_SERVER}"
            yield Finding("packages", Level.NOTE, read, _SERVING + _INSIDE_VLLM, todo)
    else:
        yield Finding("packages", Level.OK, "all that forebay serve needs")


def check_vllm() -> Iterator[Finding]:
    """vLLM, where there is one: whether this version was tried, and finds the connector."""
    version = vllm_version()
    if version is None:
        return
    if not any(point.name == "forebay" for point in importlib.metadata.entry_points(group=GROUP)):
        limits = f"vLLM does not find {NAME} by its name"
        todo = "pip install . in the source tree"
        yield Finding("vLLM", Level.WARN, f"{version}, without Forebay's plug-in", limits, todo)
    if version_of(version) in TRIED:
        yield Finding("vLLM", Level.OK, f"{version}, a release line that was tried")
    else:
        limits = "it was not tried with this version of Forebay"
        yield Finding("vLLM", Level.WARN, version, limits, f"{TRIED_SPAN} was")


def check_torch(machine: Machine) -> Iterator[Finding]:
    """PyTorch, and whether the driver is new enough for its build. It is not imported."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        todo = INSTALL_SERVER
        yield Finding("PyTorch", Level.FAIL, "not installed", _SERVING, todo)
        return
    cuda = torch_cuda()
    if cuda is None:
        level, limits, todo = Level.OK, "", ""
        if machine.driver.devices:
            level, limits = Level.NOTE, "a build for the CPU does not use the GPU that is here"
            todo = "pip install torch, from the default index"
        yield Finding("PyTorch", level, f"{version}, for the CPU", limits, todo)
        return
    read = f"{version}, built with CUDA {cuda[0]}.{cuda[1]}"
    driver = machine.driver.version
    if driver is not None and driver[0] < cuda[0]:
        yield Finding(
            "PyTorch",
            Level.FAIL,
            read,
            f"the driver carries CUDA {driver[0]}.{driver[1]}, and PyTorch will not use the GPU",
            f"a newer driver, or a build of PyTorch with CUDA {driver[0]}",
        )
    else:
        yield Finding("PyTorch", Level.OK, read)


def check_driver(machine: Machine) -> Iterator[Finding]:
    """The CUDA driver and its devices."""
    driver = machine.driver
    devices_seen = [name for name in machine.tree.names("/dev") if re.fullmatch(r"nvidia\d+", name)]
    if driver.missing:
        if devices_seen:
            yield Finding(
                "CUDA driver",
                Level.WARN,
                f"{', '.join(devices_seen)} without a usable libcuda.so.1",
                "the GPU cannot be used",
                "docker run --gpus all (with NVIDIA's container toolkit), or install the driver's "
                "libraries",
            )
        else:
            yield Finding("CUDA driver", Level.OK, "none: the CPU is the device")
    elif driver.version is None or driver.error:
        yield Finding(
            "CUDA driver",
            Level.WARN,
            driver.error or "no answer",
            "the GPU cannot be used",
            "nvidia-smi says more; CUDA_VISIBLE_DEVICES may hide every device",
        )
    else:
        yield Finding("CUDA driver", Level.OK, f"CUDA {driver.version[0]}.{driver.version[1]}")
    for device in driver.devices:
        read = f"{device.name} at {device.bus}: {show_size(device.total_bytes)}, "
        read += f"capability {device.capability[0]}.{device.capability[1]}, "
        yield Finding("GPU", Level.OK, f"{read}{device.copy_engines} copy engines")


def torch_cuda() -> tuple[int, int] | None:
    """The CUDA version in torch/version.py, read as text; None for a CPU build or none."""
    spec = importlib.util.find_spec("torch")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        try:
            text = Path(place, "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        found = re.search(r"^cuda\b[^=]*=\s*['\"](\d+)\.(\d+)", text, re.MULTILINE)
        if found:
            return int(found[1]), int(found[2])
    return None


def vllm_version() -> str | None:
    """The version of what is installed as the package `vllm`, under whatever name; or None."""
    spec = importlib.util.find_spec("vllm")
    # A folder of that name is found too, and has no origin.
    if spec is None or spec.origin is None:
        return None
    names = importlib.metadata.packages_distributions().get("vllm", [])
    return importlib.metadata.version(names[0]) if names else None


def _needed_to_serve(requirements: list[str]) -> set[str]:
    """Names of the packages that the extras `server` and `engine` list."""
    names: set[str] = set()
    for line in requirements:
        name = re.match(r"[A-Za-z0-9._-]+", line)
        extra = re.search(r"extra\s*==\s*['\"](\w+)['\"]", line)
        if name and (extra is None or extra[1] in ("server", "engine")):
            names.add(name[0])
    return names - {"forebay", "torch"}


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
