"""What a part of ``make gpu`` says once it has run, and the line that shows it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path


class Word(StrEnum):
    """The first word of a verdict line."""

    PASS = "PASS"
    """Holds on a GPU."""
    DRY_RUN = "DRY RUN"
    """The same code holds on the CPU, which says nothing of a GPU."""
    FAIL = "FAIL"
    NOT_RUN = "NOT RUN"


@dataclass(frozen=True)
class Shown:
    """What a part has shown. A part that finds a fault raises AssertionError instead."""

    facts: str
    not_run: str = ""
    """What this machine cannot show."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Shown:
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Verdict:
    """How a part ended."""

    name: str
    word: Word
    device: str
    seconds: float
    text: str

    @property
    def line(self) -> str:
        """Return the one line that an operator reads."""
        head = f"{self.word:<7} {self.name:<16} {self.device}"
        return f"{head}  {self.seconds:5.1f} s  {' '.join(self.text.split())}"


def verdict_of(name: str, device: str, seconds: float, shown: Shown) -> Verdict:
    """Return the verdict on a part that found no fault."""
    word = Word.PASS if device == "cuda" else Word.DRY_RUN
    text = f"{shown.facts}; not run: {shown.not_run}" if shown.not_run else shown.facts
    return Verdict(name, word, device, seconds, text)
