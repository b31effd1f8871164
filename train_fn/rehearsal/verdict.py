"""What rehearsals on this machine showed: in words, and kept for the runs submitted from it.

A verdict is of one ``RunSpec.trained_digest``. It travels as a tag that names the digest, so a
service shows it for no other code. Imports no torch: `everstep submit` reads it.
"""

from __future__ import annotations

import importlib.metadata
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from everstep.options.model import home_directory
from everstep.spec.run_spec import RunSpec
from everstep.wire.drills import Rehearsal, RehearsalRow

_MOST_CHARS = 256
"""Longest value of a tag."""
_MOST_FILES = 500
_DIGEST_CHARS = 32


_STYLES = {"equal": "green", "different": "red", "impossible": "red", "left out": "dim"}
_WIDTH = 48


def say(out: Any, row: RehearsalRow) -> None:
    """Print what one death showed. ``out`` is the command's terminal."""
    source = f"  (went on from {row.went_on_from})" if row.went_on_from else ""
    text = "" if row.difference else row.text
    line = f"{row.outcome:<10}  {row.name:<{_WIDTH}}  {text}{source}"
    out.line(line.rstrip(), style=_STYLES[row.outcome])


def explain(out: Any, report: Rehearsal) -> None:
    """Print what is first different, and what to write instead."""
    for row in report.rows:
        for line in (row.traceback or "").rstrip().splitlines():
            out.line(line, style="dim")
        if row.difference is not None:
            out.line()
            out.line(f"{row.name}:", style="bold")
            out.sentence(row.text)
            out.sentence(f"What to do: {row.difference.advice}.")
    for note in report.notes:
        out.note(note)
    out.line()
    out.sentence(report.text, style=_STYLES[report.outcome])


def keep(spec: RunSpec, report: Rehearsal, max_samples: int) -> str:
    """Keep what a rehearsal showed. Return in words whether it travels with a run.

    Beside it stays what rehearsals with other options showed: fewer steps that are equal say
    nothing against a difference. Under other versions all begins anew.
    """
    if spec.code is None or report.outcome == "impossible":
        return "nothing is kept of this rehearsal for `everstep submit`"
    versions = _versions()
    found = _read(_file(spec))
    made = found.get("made", {}) if found.get("versions") == versions else {}
    options = f"{report.ranks:06} {report.steps:06} {max_samples}"
    made = {**made, options: tag_of(spec, report, versions)}
    file = _file(spec)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        staged = file.with_suffix(".new")
        staged.write_text(json.dumps({"versions": versions, "made": made}))
        staged.replace(file)
    except OSError as exc:
        return f"not kept for `everstep submit`: {exc}"
    _drop_oldest(file.parent)
    return "`everstep submit` sends this with a run of the same code, arguments and spec"


def known(spec: RunSpec) -> str | None:
    """Return the tag of what is known of a spec: a difference if there is one, else the largest
    rehearsal; None if nothing is known."""
    found = _read(_file(spec))
    if found.get("versions") != _versions():
        return None
    tags = [tag for _, tag in sorted(found.get("made", {}).items())]
    different = [tag for tag in tags if tag.startswith("different ")]
    return next(reversed(different or tags), None)


def tag_of(spec: RunSpec, report: Rehearsal, versions: dict[str, str]) -> str:
    """Return the tag's value. It names variables, and none of their values."""
    ranks = "1 rank" if report.ranks == 1 else f"{report.ranks} ranks"
    used = ", ".join(f"{name} {version}" for name, version in versions.items())
    words = f"{ranks}, {report.steps} steps, {used}"
    unseen = [row.name for row in report.rows if row.outcome == "left out"]
    if report.outcome == "equal" and unseen:
        words += f"; not seen: {', '.join(unseen)}"
    for row in report.rows:
        if row.difference is None:
            continue
        one = row.difference
        place = f" ({one.where})" if one.where else ""
        held = f", with {one.held[0].partition(' (')[0]}" if one.held else ""
        words += f": {row.name}: {one.what} of step {one.step}{place}{held}"
        break
    plain = "".join(each if each.isprintable() else "?" for each in words)
    tag = f"{report.outcome} {spec.trained_digest[:_DIGEST_CHARS]} {plain}"
    return tag if len(tag) <= _MOST_CHARS else f"{tag[: _MOST_CHARS - 1]}…"


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("everstep", "torch")}


def _file(spec: RunSpec) -> Path:
    return home_directory() / "rehearsals" / f"{spec.trained_digest}.json"


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _drop_oldest(directory: Path) -> None:
    with suppress(OSError):
        files = sorted(directory.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for file in files[:-_MOST_FILES]:
            file.unlink()
