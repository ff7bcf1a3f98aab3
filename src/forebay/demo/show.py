"""The whole demonstration: model, link, every mode from cold, table, verdict, files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from forebay.core.modes import Mode
from forebay.demo.report import NAMES, judge, table, write_timelines
from forebay.demo.run import ModeResult, run_mode, throttled_link
from forebay.demo.settings import DemoSettings
from forebay.demo.workload import Script, Turn, Workload
from forebay.engine.models import LoadedModel

_WHAT_COUNTS = (
    "Go by the rows of tokens, bytes and hidden share: the modes ran one after the other, and TTFT "
    "and wall time vary with what else the machine does.\n"
)
_PLAIN_EVERY = 6


def demonstrate(
    loaded: LoadedModel,
    workload: Workload,
    modes: Sequence[Mode],
    out: Path,
    settings: DemoSettings,
    console: Console,
) -> int:
    """Run `modes` over `workload` and say what came out. Returns the exit status.

    Writes timelines into `out`, which is made. Raises what an engine raises for settings or
    prompts that cannot work.
    """
    link_bytes_per_s, prefill = throttled_link(loaded, settings)
    if not link_bytes_per_s:
        settings = settings.on_gpu()
    console.print(_about_link(link_bytes_per_s, prefill, settings), soft_wrap=True)
    script = Script(workload)
    results = [
        _watched(loaded, mode, script, settings, link_bytes_per_s, console) for mode in modes
    ]
    console.print(table(results))
    console.print(_WHAT_COUNTS, soft_wrap=True)
    verdict = judge(results)
    for line in verdict.lines():
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    for line in write_timelines(results, out, settings.picture_s):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    return verdict.exit_status


def _about_link(link_bytes_per_s: float, prefill: float, settings: DemoSettings) -> str:
    clients = (
        "Every user is an HTTP client that streams /v1/chat/completions from a server on this "
        "machine, as `forebay serve` starts it; TTFT, the time to the first token, is what the "
        "client sees."
    )
    if not link_bytes_per_s:
        return (
            f"This GPU computes {prefill:,.0f} prompt tokens/s. The link to it is as fast as it "
            "is: nothing is throttled here, and --load-advantage does not count. Users come back "
            "as soon as they are answered.\n" + clients
        )
    return (
        f"This machine computes {prefill:,.0f} prompt tokens/s. The link between host and device "
        f"memory is throttled to {link_bytes_per_s / 1e6:,.0f} MB/s, so that a load is "
        f"{settings.load_advantage:g} times faster than computing the same tokens: it stands in "
        "for a GPU's ratio of compute to copy (6 to 10 for a model of 8 billion weights on an "
        "H200). No time below says what a GPU would need.\n" + clients
    )


def _watched(
    loaded: LoadedModel,
    mode: Mode,
    script: Script,
    settings: DemoSettings,
    link_bytes_per_s: float,
    console: Console,
) -> ModeResult:
    console.print(f"\n[bold]{mode.value} {NAMES[mode]}[/bold]")
    with _progress(console, script.workload.turns) as answered:
        return run_mode(
            loaded,
            mode,
            script,
            settings,
            link_bytes_per_s,
            started=lambda line: console.print(line, soft_wrap=True, highlight=False),
            answered=answered,
        )


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[Turn], None]]:
    """A bar on a terminal; elsewhere a line now and then. Yields what to tell of every answer."""
    if not console.is_terminal:
        yield _plainly(console, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, refresh_per_second=4) as bar:
        task = bar.add_task("answers", total=total)
        yield lambda _: bar.advance(task)


def _plainly(console: Console, total: int) -> Callable[[Turn], None]:
    began_s, done = time.monotonic(), 0

    def answered(_: Turn) -> None:
        nonlocal done
        done += 1
        if done % _PLAIN_EVERY == 0 or done == total:
            console.print(f"  {done} of {total} answers, {time.monotonic() - began_s:.0f} s")

    return answered
