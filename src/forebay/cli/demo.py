"""`forebay demo`: see `forebay.demo`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from forebay.cli.values import parse_device, parse_dtype, parse_modes
from forebay.demo.settings import DemoSettings
from forebay.demo.show import demonstrate
from forebay.demo.workload import everyday_workload
from forebay.engine.models import load_model
from forebay.errors import SettingsError


def run_demo(
    model: str,
    out: Path,
    modes: str,
    *,
    device: str,
    dtype: str,
    device_tokens: int,
    answer_tokens: int,
    load_advantage: float,
) -> int:
    """Run the demonstration and return its exit status. Raises what `told` tells."""
    wanted = parse_modes(modes)
    settings = DemoSettings(
        device_tokens=device_tokens, answer_tokens=answer_tokens, load_advantage=load_advantage
    )
    _make(out)
    console = Console()
    console.print(f"loading {model}", highlight=False)
    loaded = load_model(model, parse_dtype(dtype), parse_device(device))
    return demonstrate(loaded, everyday_workload(), wanted, out, settings, console)


def _make(folder: Path) -> None:
    """Now, not after minutes of work for nothing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"{folder} cannot be made: {error}; give another --out") from error
