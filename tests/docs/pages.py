"""The pages of the documentation, and the blocks of commands in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(file.name for file in DOCS.glob("*.md"))

_BLOCK = re.compile(
    r"(?:^<!-- not run here: (?P<reason>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; `reason` says why it is not run here, "" where it is."""

    language: str
    text: str
    reason: str

    @property
    def starts_server(self) -> bool:
        return self.language == "sh" and self.text.startswith("forebay serve ")


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(name: str) -> list[Block]:
    return [
        Block(found["language"], found["text"], found["reason"] or "")
        for found in _BLOCK.finditer(page(name))
    ]


def rows(text: str) -> list[list[str]]:
    """The cells of all rows of all tables, their heads too."""
    lines = re.findall(r"^\| (.*?) ?\|$", text, flags=re.MULTILINE)
    return [
        [cell.strip() for cell in re.split(r" ?\| ?", line)]
        for line in lines
        if set(line) - set("-| ")
    ]
