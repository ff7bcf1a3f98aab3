"""`python -m forebay`, and what the script `forebay` runs."""

from __future__ import annotations

import sys

from forebay.release import INSTALL_SERVER, installed_version


def main() -> int:
    """The command line; without its libraries, the doctor alone. Returns the exit status."""
    try:
        from forebay import cli  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("typer", "click", "rich"):
            raise
        return _doctor_alone(sys.argv[1:], error.name)
    cli.main()
    return 0


def _doctor_alone(arguments: list[str], missing: str) -> int:
    from forebay.doctor.command import main as doctor  # noqa: PLC0415

    if arguments[:1] == ["doctor"]:
        return doctor(arguments[1:])
    if arguments == ["--version"]:
        print(f"forebay {installed_version()}")
        return 0
    print(
        f"error: the command line needs {missing}: {INSTALL_SERVER}; `forebay doctor` works "
        "without",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
