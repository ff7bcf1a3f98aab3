"""Files of the kernel, read so that nothing is ever raised: what cannot be read is None."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Tree:
    """The files below `root`. `unread` collects those that are there and could not be read."""

    root: Path = Path("/")
    unread: list[str] = field(default_factory=list[str])

    def text(self, path: str | Path) -> str | None:
        """The content of `path`, without white space at its ends; None if it cannot be had."""
        try:
            return self.at(path).read_text(encoding="utf-8", errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            self.unread.append(f"{path} ({getattr(error, 'strerror', None) or error})")
            return None

    def number(self, path: str | Path) -> int | None:
        """The whole number that `path` holds; None if it holds another thing, such as "max"."""
        return as_number(self.text(path))

    def names(self, path: str | Path) -> list[str]:
        """What is in the folder `path`, sorted; nothing if it cannot be listed."""
        try:
            return sorted(os.listdir(self.at(path)))
        except OSError:
            return []

    def fields(self, path: str | Path) -> dict[str, int]:
        """Numbers by name, of lines such as "MemTotal: 123 kB" (in bytes then) or "cache 123"."""
        found: dict[str, int] = {}
        for line in (self.text(path) or "").splitlines():
            words = line.replace(":", " ", 1).split()
            if len(words) < 2 or (number := as_number(words[1])) is None:
                continue
            found[words[0]] = number * 1024 if words[2:] == ["kB"] else number
        return found

    def is_folder(self, path: str | Path) -> bool:
        """Whether `path` is a folder."""
        return self.at(path).is_dir()

    def at(self, path: str | Path) -> Path:
        """Where `path`, which counts from the root, lies."""
        return self.root / str(path).lstrip("/")


def as_number(text: str | None) -> int | None:
    """A whole number, or None for everything else."""
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def as_numbers(text: str | None) -> frozenset[int]:
    """The numbers of a kernel list such as "0-3,8"; none if it is malformed."""
    found: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.strip().partition("-")
        low, high = as_number(first), as_number(last or first)
        if low is None or high is None or high - low > 1 << 16:
            return frozenset()
        found.update(range(low, high + 1))
    return frozenset(found)
