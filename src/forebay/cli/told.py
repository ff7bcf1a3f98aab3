"""What goes wrong, told to a user: one readable line instead of a traceback."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import typer

from forebay.errors import LinkTimeoutError, ModelError, RequestError, SettingsError
from forebay.release import INSTALL_SERVER

USAGE_STATUS = 2
"""Exit status for what the user can put right."""


@contextmanager
def told() -> Iterator[None]:
    """Warnings become lines of standard error; errors that a user can put right end the command.

    So does a package that is not installed. Other errors are bugs and keep their traceback.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = _once()
        try:
            yield
        except (LinkTimeoutError, ModelError, RequestError, SettingsError) as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(USAGE_STATUS) from error
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] == "forebay":
                raise
            print(
                f"error: {error.name} is not installed: {INSTALL_SERVER}; `forebay doctor` says "
                "what else is missing",
                file=sys.stderr,
            )
            raise typer.Exit(USAGE_STATUS) from error


def _once() -> Callable[..., None]:
    seen: set[str] = set()

    def show(
        message: Warning | str,
        _category: type[Warning],
        _filename: str,
        _lineno: int,
        _file: TextIO | None = None,
        _line: str | None = None,
    ) -> None:
        text = str(message)
        if text not in seen:
            seen.add(text)
            print(f"warning: {text}", file=sys.stderr)

    return show


def tell_loading(model: str) -> None:
    """Say to somebody who watches that the wait has a reason."""
    if sys.stderr.isatty():
        print(f"loading {model}", file=sys.stderr, flush=True)
