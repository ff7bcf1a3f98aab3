"""Which device `--device` comes to here, and whether model and device pool fit it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forebay.doctor import software
from forebay.doctor.finding import Finding, Level, Machine, Wanted
from forebay.doctor.model import Weights
from forebay.engine.settings import DEVICE
from forebay.errors import SettingsError
from forebay.machine.driver import Device
from forebay.machine.sizes import show_size

# What PyTorch and its libraries take of a GPU beside weights and pool, and what a step needs.
_BESIDE_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Choice:
    """The GPU that would be taken, None: the CPU; `why` it is that. `wrong`: it cannot start."""

    index: int = 0
    gpu: Device | None = None
    why: str = ""
    wrong: bool = False


def choose(machine: Machine, wanted: Wanted) -> Choice:
    """What `forebay serve --device` of `wanted` would take; PyTorch is not imported."""
    try:
        device = DEVICE("device", wanted.device)
    except SettingsError as error:
        return Choice(why=str(error), wrong=True)
    if device == "cpu":
        return Choice(why="--device cpu")
    index = int(device.partition(":")[2] or 0)
    why = _why_not(machine)
    if device == "auto":
        return Choice(why=f"auto: {why}") if why else Choice(0, machine.driver.devices[0], "auto")
    if why:
        return Choice(why=f"--device {device}: {why}", wrong=True)
    if index >= len(machine.driver.devices):
        seen = f"the driver shows {len(machine.driver.devices)}, counted from 0"
        return Choice(why=f"--device {device}: {seen}", wrong=True)
    return Choice(index, machine.driver.devices[index], f"--device {device}")


def check_device(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """What is taken, and why."""
    choice = choose(machine, wanted)
    if choice.wrong:
        yield Finding(
            "device",
            Level.FAIL,
            choice.why,
            "the server does not start",
            "--device cpu or auto; the lines on driver and PyTorch say what a GPU needs",
        )
    elif choice.gpu is None:
        yield Finding("device", Level.OK, f"cpu ({choice.why})")
    else:
        name = choice.gpu.name
        yield Finding("device", Level.OK, f"cuda:{choice.index}, {name} ({choice.why})")


def check_room(machine: Machine, wanted: Wanted, weights: Weights) -> Iterator[Finding]:
    """Weights and device pool against the memory of the GPU that is taken."""
    gpu = choose(machine, wanted).gpu
    if gpu is None:
        return
    token_bytes = weights.geometry.token_bytes if weights.geometry is not None else 0
    weights_bytes, kv_bytes = weights.memory_bytes, wanted.device_tokens * token_bytes
    needed = weights_bytes + kv_bytes + _BESIDE_BYTES
    read = f"{show_size(gpu.total_bytes)} in all"
    if needed <= gpu.total_bytes:
        yield Finding("GPU memory", Level.OK, read)
        return
    yield Finding(
        "GPU memory",
        Level.FAIL,
        read,
        f"weights of {show_size(weights_bytes)}, a device pool of {show_size(kv_bytes)} and what "
        f"PyTorch takes beside them, {show_size(needed)}, do not fit",
        "fewer --device-tokens, a smaller model, or a larger GPU",
    )


def _why_not(machine: Machine) -> str:
    """Why no GPU can be used; "" if one can."""
    driver, built = machine.driver, software.torch_cuda()
    if not driver.devices:
        return "no GPU is seen" if driver.missing or not driver.error else driver.error
    if built is None:
        return "PyTorch is not there, or is a build for the CPU"
    if driver.version is not None and driver.version[0] < built[0]:
        return f"PyTorch needs a driver of CUDA {built[0]}, and this one has {driver.version[0]}"
    return ""
