"""Forebay inside vLLM, beside vLLM alone and vLLM's own connectors.

    python benchmarks/inside_vllm run FOLDER GROUP...    raw samples of all arms, one machine start
    python benchmarks/inside_vllm figures FOLDER         the figures that follow

A GROUP is arms with the rounds of each workload, joined by "+", which stay up together:
"none:no_hits=5+forebay:solo=4,backlog_64,no_hits=5".
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from arms import ARMS, FULL, REHEARSAL

from forebay.measure import report


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="inside_vllm",
        description=__doc__,
        epilog="arms: " + ", ".join(ARMS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run arms, write their raw samples")
    run.add_argument("folder", type=Path)
    run.add_argument("groups", nargs="+", metavar="GROUP")
    run.add_argument("--seconds", type=float, default=720.0, help="bound of the whole run")
    run.add_argument("--least", type=float, default=90.0, help="a group needs this many seconds")
    run.add_argument("--rehearse", action="store_true", help="a tiny model, on a CPU")
    pair = commands.add_parser("figures", help="pair the arms of one machine start")
    pair.add_argument("folder", type=Path)
    pair.add_argument("--ours", default="forebay", help="the arm that is judged")
    pair.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    pair.add_argument("--strict", action="store_true", help="exit with 1 where a goal is missed")
    options = parser.parse_args()
    if options.command == "run":
        from batch import Batch, Planned  # noqa: PLC0415 - needs vLLM, and figures do not

        sizes = REHEARSAL if options.rehearse else FULL
        groups = [[Planned.parse(text) for text in group.split("+")] for group in options.groups]
        Batch(sizes, options.folder, options.seconds).run(groups, options.least)
        return 0
    from figures import GOALS, Start, figures  # noqa: PLC0415

    made = figures(Start.read(options.folder), options.ours)
    return report.finish(made, GOALS, json=options.json, strict=options.strict)


if __name__ == "__main__":
    sys.exit(main())
