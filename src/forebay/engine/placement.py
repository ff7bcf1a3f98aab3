"""Where a model goes and in which numbers: what was wished, held against what there is."""

from __future__ import annotations

import warnings

import torch

from forebay.engine.settings import DEVICE, DType, EngineSettings
from forebay.errors import SettingsError
from forebay.transfer.pinned import CudaDevice, cuda_devices

_BFLOAT16_CAPABILITY = (8, 0)


def choose_device(wanted: str = "auto") -> torch.device:
    """The device of "cpu", "cuda" (the first), "cuda:N", or "auto": a GPU that can be used, or cpu.

    Warns where auto passes a GPU by. Raises SettingsError, saying what to do, for a GPU that is not
    there or that this PyTorch cannot use.
    """
    if DEVICE("device", wanted) == "auto":
        return _best()
    device = torch.device(wanted)
    if device.type == "cpu":
        return device
    index = device.index or 0
    devices = cuda_devices()
    if index >= len(devices):
        seen = ", ".join(f"cuda:{at} ({each.name})" for at, each in enumerate(devices))
        raise SettingsError(
            f"there is no cuda:{index}: this process sees {seen or 'no GPU'}; name one of these, "
            "or look at CUDA_VISIBLE_DEVICES, which hides others and counts anew from 0"
        )
    if why := _unusable():
        raise SettingsError(f"cuda:{index} ({devices[index].name}) cannot be used: {why}")
    return torch.device("cuda", index)


def choose_dtype(
    wanted: DType, device: torch.device, stored: torch.dtype | None = None
) -> torch.dtype:
    """The numbers to compute with; `stored` is the type of the model's files, None: not known.

    Raises SettingsError for a type that the device does not have.
    """
    if wanted is DType.AUTO:
        if device.type == "cpu":
            return torch.float32
        if _has_bfloat16(device):
            return torch.float16 if stored is torch.float16 else torch.bfloat16
        return torch.float16
    if wanted is DType.BFLOAT16 and device.type == "cuda" and not _has_bfloat16(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise SettingsError(
            f"{describe_device(device)} has capability {major}.{minor}, and bfloat16 needs 8.0: "
            "use float16, or auto, which takes it there"
        )
    return getattr(torch, wanted.value)


def describe_device(device: torch.device) -> str:
    """Like "cuda:0 (NVIDIA H200)"; "cpu"."""
    if device.type != "cuda":
        return str(device)
    index = device.index or 0
    return f"cuda:{index} ({torch.cuda.get_device_name(index)})"


def dtype_name(dtype: torch.dtype) -> str:
    """Like "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def check_placement(device: torch.device, dtype: torch.dtype, settings: EngineSettings) -> None:
    """Raises SettingsError where a model that is loaded already lies elsewhere than was wished."""
    if settings.device != "auto":
        wished = torch.device(settings.device)
        if (wished.type, wished.index or 0) != (device.type, device.index or 0):
            raise SettingsError(
                f"the model lies on {device}, and device is {settings.device}: load it there, "
                f"load_model(..., device={settings.device!r}), or leave device at auto"
            )
    if settings.dtype is not DType.AUTO and dtype_name(dtype) != settings.dtype.value:
        raise SettingsError(
            f"the model's K and V are {dtype_name(dtype)}, and dtype is {settings.dtype.value}: "
            f"load it so, load_model(..., dtype={settings.dtype.value!r}), or leave dtype at auto"
        )


def _best() -> torch.device:
    devices = _devices()
    if not devices:
        return torch.device("cpu")
    if why := _unusable():
        warnings.warn(f"{devices[0].name} is not used: {why}", stacklevel=3)
        return torch.device("cpu")
    return torch.device("cuda", 0)


def _devices() -> list[CudaDevice]:
    try:
        return cuda_devices()
    except SettingsError:
        return []


def _unusable() -> str:
    """Why this PyTorch cannot use a GPU that the driver sees; "" if it can."""
    version = torch.__version__
    if torch.version.cuda is None:
        return (
            f"PyTorch {version} is built for the CPU; pip install torch from the default index, "
            "or use device cpu"
        )
    if not torch.cuda.is_available():
        return (
            f"PyTorch {version}, built with CUDA {torch.version.cuda}, does not start on this "
            "driver; install a newer driver or a build for an older CUDA, or use device cpu "
            "(forebay doctor compares the two)"
        )
    return ""


def _has_bfloat16(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _BFLOAT16_CAPABILITY
