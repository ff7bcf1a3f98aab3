"""Devices and types of numbers: what is taken, and what is refused with what to do."""

from __future__ import annotations

import pytest
import torch

from forebay.engine import placement
from forebay.engine.engine import Engine
from forebay.engine.models import load_model, take_model
from forebay.engine.placement import choose_device, choose_dtype
from forebay.engine.settings import DType, EngineSettings
from forebay.errors import SettingsError
from forebay.transfer.pinned import CudaDevice

H200 = CudaDevice("NVIDIA H200", 140 << 30, 3, -1)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch):
    """A machine with so many GPUs, and a PyTorch that may use them or not."""

    def made(gpus=2, built="13.0", available=True, capability=(9, 0)):
        def devices():
            if not gpus:
                raise SettingsError("there is no NVIDIA driver here")
            return [H200] * gpus

        monkeypatch.setattr(placement, "cuda_devices", devices)
        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA T4")

    return made


def test_auto_takes_the_first_gpu_that_can_be_used(machine, recwarn):
    machine(gpus=2)
    assert choose_device("auto") == GPU
    machine(gpus=0)
    assert choose_device("auto") == CPU
    assert not recwarn


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"built": None}, "NVIDIA H200 is not used: PyTorch .* built for the CPU; pip install"),
        ({"available": False}, "does not start on this driver; install a newer driver"),
    ],
)
def test_auto_says_which_gpu_it_passes_by_and_cuda_is_refused(machine, wrong, said):
    machine(**wrong)
    with pytest.warns(UserWarning, match=said):
        assert choose_device("auto") == CPU
    with pytest.raises(SettingsError, match=said.removeprefix("NVIDIA H200 is not used: ")):
        choose_device("cuda:1")


def test_the_index_counts(machine):
    machine(gpus=2)
    assert [choose_device(each) for each in ("cpu", "cuda", "cuda:0", "cuda:1")] == [
        CPU,
        GPU,
        GPU,
        torch.device("cuda", 1),
    ]
    with pytest.raises(SettingsError, match=r"no cuda:2: .* cuda:1 \(NVIDIA H200\); .*_VISIBLE_"):
        choose_device("cuda:2")
    machine(gpus=0)
    with pytest.raises(SettingsError, match="no NVIDIA driver"):
        choose_device("cuda")


@pytest.mark.parametrize("wrong", ["", "gpu", "cuda:", "cuda:-1", "mps", None, 0])
def test_what_is_no_device(wrong):
    with pytest.raises(SettingsError, match="must be auto, cpu, cuda or cuda:N"):
        choose_device(wrong)


def test_types_of_numbers(machine):
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    machine()
    for device, stored, taken in (
        (CPU, bf16, f32),
        (CPU, None, f32),
        (GPU, bf16, bf16),
        (GPU, f16, f16),
        (GPU, f32, bf16),
        (GPU, None, bf16),
    ):
        assert choose_dtype(DType.AUTO, device, stored) is taken
    assert choose_dtype(DType.FLOAT32, GPU, bf16) is f32
    assert choose_dtype(DType.BFLOAT16, CPU, f32) is bf16
    machine(capability=(7, 5))
    assert choose_dtype(DType.AUTO, GPU, bf16) is f16
    with pytest.raises(SettingsError, match=r"NVIDIA T4\) has capability 7.5, .* use float16"):
        choose_dtype(DType.BFLOAT16, GPU, bf16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_engine_computes_in_the_numbers_that_were_asked_for(
    dtype, build_model, byte_tokenizer, tmp_path
):
    build_model("llama").save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    settings = EngineSettings(device="cpu", dtype=dtype, device_tokens=512, host_bytes=4 << 20)
    with Engine(tmp_path, settings) as engine:
        assert engine.pool.dtype is getattr(torch, dtype)
        assert engine.startup_line.startswith(f"cpu, {dtype}: device 512 tokens")
        assert engine.generate([[5, 6, 7]])[0].drawn


def test_a_model_that_lies_elsewhere_is_refused(tiny_model):
    loaded = tiny_model("llama")
    assert take_model(loaded, EngineSettings()) is loaded
    assert take_model(loaded, EngineSettings(device="cpu", dtype="float32")) is loaded
    with pytest.raises(SettingsError, match=r"lies on cpu, and device is cuda:1: load it there"):
        take_model(loaded, EngineSettings(device="cuda:1"))
    with pytest.raises(SettingsError, match=r"are float32, and dtype is float16: load it so"):
        take_model(loaded, EngineSettings(dtype="float16"))


def test_a_device_is_looked_for_before_the_model(machine, tmp_path):
    machine(gpus=1)
    with pytest.raises(SettingsError, match="no cuda:7"):
        load_model(tmp_path / "not there", device="cuda:7")
