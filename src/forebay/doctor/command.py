"""`forebay doctor`: options, and how the findings are told.

The options are read by the standard library, since the doctor has to work where nothing but the
core is installed, and to say what is missing.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from forebay.doctor.examine import Diagnosis, examine
from forebay.doctor.finding import Level, Machine, Wanted
from forebay.errors import SettingsError
from forebay.machine.sizes import parse_size, show_size

_WIDTH = 100
_INDENT = " " * 6
_DEFAULT = "(default: %(default)s)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine this machine and print what was found. Returns 1 if something will fail, else 0."""
    wanted, for_programs = options_of(arguments)
    diagnosis = examine(Machine(), wanted)
    print(as_json(diagnosis) if for_programs else as_text(diagnosis))
    return int(diagnosis.fails)


def options_of(arguments: Sequence[str] | None) -> tuple[Wanted, bool]:
    """What is wanted, and whether programs read the answer. Ends the process on wrong ones."""
    options = vars(_parser().parse_args(arguments))
    for_programs = options.pop("json")
    return Wanted(**options), for_programs


def as_text(diagnosis: Diagnosis) -> str:
    """For people: what is wrong with its remedy, the summary last."""
    lines: list[str] = []
    for finding in diagnosis.findings:
        lines += _wrapped(f"{finding.level.value:<5} {finding.subject}: {finding.read}", "")
        if finding.level is not Level.OK:
            lines += _wrapped(finding.limits, _INDENT)
            lines += _wrapped(f"do: {finding.help}" if finding.help else "", _INDENT)
    return "\n".join([*lines, diagnosis.summary])


def as_json(diagnosis: Diagnosis) -> str:
    """For programs."""
    said = {
        "ok": not diagnosis.fails,
        "summary": diagnosis.summary,
        "host_pool_bytes": diagnosis.host_pool_bytes,
        "host_pool_tokens": diagnosis.host_pool_tokens,
        "findings": [asdict(finding) for finding in diagnosis.findings],
    }
    return json.dumps(said, indent=2)


def _parser() -> argparse.ArgumentParser:
    default = Wanted()
    parser = argparse.ArgumentParser(
        prog="forebay doctor",
        description="What will limit Forebay on this machine, and what to do about it. Exit status "
        "1 if something will fail.",
    )
    parser.add_argument(
        "--model",
        default="",
        help="smollm2, or a model by folder or hub id; left out, no model is looked at",
    )
    parser.add_argument(
        "--device",
        default=default.device,
        help=f"auto, cpu, cuda or cuda:N, as for forebay serve {_DEFAULT}",
    )
    parser.add_argument(
        "--host-bytes",
        type=_size,
        default=default.host_bytes,
        metavar="SIZE",
        help="size of the host pool: 1GiB, 512MiB, 2GB or bytes "
        f"(default: {show_size(default.host_bytes)})",
    )
    parser.add_argument(
        "--device-tokens",
        type=_count,
        default=default.device_tokens,
        metavar="TOKENS",
        help=f"size of the device pool, in tokens of KV {_DEFAULT}",
    )
    parser.add_argument("--host", default=default.host, help=f"address to listen on {_DEFAULT}")
    parser.add_argument(
        "--port", type=int, default=default.port, help=f"port to listen on {_DEFAULT}"
    )
    parser.add_argument(
        "--max-connections",
        type=_count,
        default=default.max_connections,
        metavar="COUNT",
        help=f"connections that the server shall hold {_DEFAULT}",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except SettingsError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
