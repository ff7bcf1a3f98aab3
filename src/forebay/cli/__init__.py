"""The command line. Each command is a module of its own, imported when it is called: PyTorch takes
seconds to import, and `forebay --help` should not.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.benches import bench
from forebay.cli.garbage import few_collections, imports_kept_out
from forebay.cli.told import told
from forebay.demo.settings import DemoSettings
from forebay.engine.settings import EngineSettings

_DEMO, _ENGINE = DemoSettings(), EngineSettings()

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")

_Model = Annotated[
    str,
    typer.Option(help="smollm2, or a decoder-only Hugging Face model, by folder or hub id."),
]
_Mode = Annotated[
    str,
    typer.Option(
        help="How KV in host memory comes back: b0 not at all, it is recomputed; b1 loaded while "
        "its step waits; b3 loaded from a request's turn on; b4 looked ahead over the queue."
    ),
]
_DeviceTokens = Annotated[int, typer.Option(help="Size of the device pool, in tokens of KV.")]
_Device = Annotated[
    str,
    typer.Option(help="cpu, cuda or cuda:N; auto takes a GPU where PyTorch sees one."),
]
_DType = Annotated[
    str,
    typer.Option(
        help="bfloat16, float16 or float32; auto: 32 bit on the CPU, on a GPU the model's own type "
        "of 16 bit."
    ),
]


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        typer.echo(f"forebay {version('forebay')}")
    except PackageNotFoundError:
        typer.echo("forebay, from a source tree that is not installed")
    raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Look-ahead KV-cache prefetching for LLM serving.

    Inside vLLM it is a KV connector, ForebayConnector, and needs no command of these.
    """


@app.command()
def demo(
    model: _Model = "smollm2",
    out: Annotated[Path, typer.Option(help="Folder for timelines; made if missing.")] = Path("out"),
    modes: Annotated[
        str, typer.Option(help="Modes (see `chat --help`), the reference for answers first.")
    ] = "b0,b1,b4",
    device: _Device = _ENGINE.device,
    dtype: _DType = "float32",
    device_tokens: _DeviceTokens = _DEMO.device_tokens,
    answer_tokens: Annotated[
        int, typer.Option(help="Mean length of an answer.")
    ] = _DEMO.answer_tokens,
    load_advantage: Annotated[
        float,
        typer.Option(
            help="How much faster a load is than computing the same tokens; of no use on a GPU, "
            "whose link is as fast as it is."
        ),
    ] = 8.0,
) -> None:
    """Six users hold four-turn conversations, in several modes, over a pool too small for all.

    Exit status 1 if modes give different answers, or look-ahead hides nothing.
    """
    with told(), few_collections():
        with imports_kept_out():
            from forebay.cli.demo import run_demo  # noqa: PLC0415

        status = run_demo(
            model,
            out,
            modes,
            device=device,
            dtype=dtype,
            device_tokens=device_tokens,
            answer_tokens=answer_tokens,
            load_advantage=load_advantage,
        )
    raise typer.Exit(status)


@app.command()
def chat(
    model: _Model = "smollm2",
    mode: _Mode = "b4",
    device: _Device = _ENGINE.device,
    dtype: _DType = _ENGINE.dtype.value,
    device_tokens: _DeviceTokens = _ENGINE.device_tokens,
    host_bytes: Annotated[
        str, typer.Option(help="Size of the host pool: 1GiB, 512MiB, 2GB or bytes.")
    ] = "1GiB",
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of the sampling; drawn if left out.")] = None,
) -> None:
    """Chat in the terminal, or with one message per line of standard input.

    /reset forgets the conversation, /stats says what the cache did, /exit ends.
    """
    with told(), few_collections():
        with imports_kept_out():
            from forebay.cli.chat import run_chat  # noqa: PLC0415

        run_chat(
            model,
            mode,
            system,
            device=device,
            dtype=dtype,
            device_tokens=device_tokens,
            host_bytes=host_bytes,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
        )


@app.command()
def serve(
    model: _Model = "smollm2",
    mode: _Mode = _ENGINE.mode.value,
    device: _Device = _ENGINE.device,
    dtype: _DType = _ENGINE.dtype.value,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str, typer.Option(help="What clients call the model; its own name if left out.")
    ] = "",
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="FOREBAY_API_KEY", help="A key that clients must send; repeatable."),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="Keys, one a line, each followed by its tenant's salt.")
    ] = None,
    operator_key: Annotated[
        str | None,
        typer.Option(
            envvar="FOREBAY_OPERATOR_KEY",
            help="Key for metrics and the mode; not needed on loopback.",
        ),
    ] = None,
    device_tokens: _DeviceTokens = _ENGINE.device_tokens,
    host_bytes: Annotated[
        str, typer.Option(help="Size of the host pool: 1GiB, 512MiB, 2GB or bytes.")
    ] = "1GiB",
    block_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a block; 16 or 32 by the model if left out.")
    ] = None,
    window_bytes: Annotated[
        str,
        typer.Option(
            help="What the link takes in one call, like 4MiB; left out, as the calibration says, "
            "or two blocks."
        ),
    ] = "",
    calibration: Annotated[
        str,
        typer.Option(
            help="A file that `forebay tune` wrote; auto takes this machine's own, where there is "
            "one; none measures a little at every start."
        ),
    ] = "auto",
    min_load_tokens: Annotated[
        int, typer.Option(help="Shorter prefixes are computed and not loaded.")
    ] = _ENGINE.min_load_tokens,
    min_save_tokens: Annotated[
        int, typer.Option(help="Shorter prompts with their answers are not offloaded.")
    ] = _ENGINE.min_save_tokens,
    max_running: Annotated[
        int, typer.Option(help="Answers in a step.")
    ] = _ENGINE.batch.max_running,
    max_waiting: Annotated[
        int, typer.Option(help="Answers that may wait; more are refused with 429.")
    ] = _ENGINE.batch.max_waiting,
    step_tokens: Annotated[
        int, typer.Option(help="Tokens that a step may compute.")
    ] = _ENGINE.batch.step_tokens,
    drain_s: Annotated[
        float, typer.Option(help="After SIGTERM, answers have so many seconds to end.")
    ] = 30.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a model over HTTP, with OpenAI's interface, until SIGTERM."""
    with told(), few_collections():
        with imports_kept_out():
            from forebay.cli.serve import run_serve  # noqa: PLC0415

        run_serve(
            model,
            mode,
            device=device,
            dtype=dtype,
            host=host,
            port=port,
            served_model_name=served_model_name,
            api_keys=api_key or [],
            api_key_file=api_key_file,
            operator_key=operator_key,
            device_tokens=device_tokens,
            host_bytes=host_bytes,
            block_tokens=block_tokens,
            window_bytes=window_bytes,
            calibration=calibration,
            min_load_tokens=min_load_tokens,
            min_save_tokens=min_save_tokens,
            max_running=max_running,
            max_waiting=max_waiting,
            step_tokens=step_tokens,
            drain_s=drain_s,
            log_level=log_level,
        )


@app.command()
def tune(
    model: _Model = "smollm2",
    device: _Device = _ENGINE.device,
    dtype: _DType = _ENGINE.dtype.value,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the calibration; left out, where `forebay serve` finds it."),
    ] = None,
) -> None:
    """Measure this machine with a device and a model, say what to set, and keep it for `serve`.

    Takes a minute or two, in which nothing else should run.
    """
    with told(), few_collections():
        with imports_kept_out():
            from forebay.cli.tune import run_tune  # noqa: PLC0415

        run_tune(model, device, dtype, out)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def doctor(context: typer.Context) -> None:
    """Say what will limit Forebay on this machine, and what to do about it."""
    from forebay.doctor.command import main as examine_and_tell  # noqa: PLC0415

    raise typer.Exit(examine_and_tell(context.args))


def main() -> None:
    """Every command."""
    app()
