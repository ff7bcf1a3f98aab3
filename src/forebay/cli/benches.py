"""The options of `forebay bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.told import told

bench = typer.Typer(
    help="Measure the link and the mover on this machine, beside a floor and rivals.",
    no_args_is_help=True,
)

_Json = Annotated[
    Path | None, typer.Option("--json", help="File for the figures, with every sample.")
]
_Picture = Annotated[Path | None, typer.Option(help="File for a picture of them, a PNG.")]
_Strict = Annotated[bool, typer.Option("--strict", help="Exit status 1 when a goal is missed.")]
_Rounds = Annotated[int, typer.Option(help="Rounds of each ratio.")]


@bench.command()
def transfer(
    parts: Annotated[
        str, typer.Option(help="On a GPU, any of cache,rates,foreign,calls,rivals; all if empty.")
    ] = "",
    rounds: _Rounds = 7,
    samples: Annotated[int, typer.Option(help="Foreign copies a figure, about.")] = 2500,
    spin_us: Annotated[
        float, typer.Option(help="Microseconds that the mover's threads spin before they sleep.")
    ] = 20.0,
    json: _Json = None,
    picture: _Picture = None,
    strict: _Strict = False,
) -> None:
    """Rates, waits of others, costs of calls, and rivals; without a GPU what a CPU can show."""
    with told():
        from forebay.cli.bench import Output, run_transfer  # noqa: PLC0415

        status = run_transfer(parts, rounds, samples, spin_us, Output(json, picture, strict))
    raise typer.Exit(status)


@bench.command()
def overlap(
    parts: Annotated[
        str, typer.Option(help="Any of pin,serve,decode,launch,textbook; all if empty.")
    ] = "",
    rounds: _Rounds = 7,
    pin_bytes: Annotated[str, typer.Option(help="Memory that is pinned to time it.")] = "16GiB",
    host_bytes: Annotated[
        str, typer.Option(help="Host pool of the engine whose start is timed.")
    ] = "64GiB",
    json: _Json = None,
    picture: _Picture = None,
    strict: _Strict = False,
) -> None:
    """What copies cost decode and launches, and what a load ahead of time hides. Needs a GPU."""
    with told():
        from forebay.cli.bench import Output, run_overlap  # noqa: PLC0415

        status = run_overlap(parts, rounds, pin_bytes, host_bytes, Output(json, picture, strict))
    raise typer.Exit(status)
