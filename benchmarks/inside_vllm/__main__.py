"""Forebay inside vLLM, beside vLLM alone and vLLM's own connectors.

    python benchmarks/inside_vllm run FOLDER GROUP...    raw samples of all arms, one machine start
    python benchmarks/inside_vllm plan GROUP...          how long that takes, and what does not fit
    python benchmarks/inside_vllm figures FOLDER         the figures that follow

A GROUP is arms with the rounds of each workload, joined by "+", which stay up together:
"none:no_hits=5+forebay:solo=4,backlog_64,no_hits=5".
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from arms import ARMS
from estimates import ROUND_S, parse, table
from sizes import FULL, REHEARSAL

from forebay.errors import SettingsError
from forebay.measure import report


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="inside_vllm",
        description=__doc__,
        epilog=f"arms: {', '.join(ARMS)}\nworkloads: {', '.join(ROUND_S)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run arms, write their raw samples")
    run.add_argument("folder", type=Path)
    for each in (run, commands.add_parser("plan", help="what a run would take")):
        each.add_argument("groups", nargs="+", metavar="GROUP")
        each.add_argument("--seconds", type=float, default=720.0, help="bound of the whole run")
        each.add_argument("--rehearse", action="store_true", help="a tiny model, on a CPU")
    pair = commands.add_parser("figures", help="pair the arms of one machine start")
    pair.add_argument("folder", type=Path)
    pair.add_argument("--ours", default="forebay", help="the arm that is judged")
    pair.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    pair.add_argument("--strict", action="store_true", help="exit with 1 where a goal is missed")
    options = parser.parse_args()
    if options.command == "figures":
        return _figures(options)
    sizes = REHEARSAL if options.rehearse else FULL
    try:
        groups = parse(options.groups)
    except SettingsError as error:
        parser.error(str(error))
    if options.command == "plan":
        print(table(groups, sizes, options.seconds))
        return 0
    from batch import Batch  # noqa: PLC0415 - needs vLLM, and nothing else here does

    Batch(sizes, options.folder, options.seconds).run(groups)
    return 0


def _figures(options: argparse.Namespace) -> int:
    from figures import GOALS, faults, figures  # noqa: PLC0415
    from start import Start  # noqa: PLC0415

    start = Start.read(options.folder)
    made = figures(start, options.ours)
    status = report.finish(
        made, GOALS, json=options.json, strict=options.strict, origin=start.origin
    )
    missing = sorted(set(GOALS) - {figure.id for figure in made})
    wrong = faults(start)
    for line in [
        *(f"{id}: not measured, goal {GOALS[id]}" for id in missing),
        *(f"FAULT: {each}" for each in wrong),
    ]:
        print(line)
    return 1 if wrong and options.strict else status


if __name__ == "__main__":
    sys.exit(main())
