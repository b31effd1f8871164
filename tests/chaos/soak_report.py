"""A soak's report, as Markdown."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.chaos.soak import Record

INVARIANTS = {
    "I1": "no acknowledged run is lost, one lineage",
    "I2": "checkpoints verify",
    "I3": "every sample once",
    "I4": "weights bit by bit",
    "I5": "status never lies",
    "I6": "every second in one bucket",
    "I7": "every failure with verdict, rank, evidence",
    "I8": "nothing for strangers",
}


def write_report(record: Record, path: Path | None) -> str:
    """The report; also written to ``path`` where one is given."""
    lines = [
        "# Soak",
        "",
        "For reviewers. After this page you know what an hour of random faults did to a queue of "
        "runs.",
        "",
        f'`make soak ARGS="--minutes {record.minutes:g} --seed {record.seed}"`, '
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, "
        f"{os.cpu_count()} cores, three nodes of one CPU: {len(record.runs)} runs, "
        f"{sum(record.struck.values())} faults, "
        f"{record.failures} failures told, {record.replayed} runs made again in peace.",
        "",
        "| sort of run | ended | runs |",
        "|---|---|---|",
        *(
            f"| {sort} | {status} | {count} |"
            for (sort, status), count in sorted(record.statuses.items())
        ),
        "",
        "| fault | struck | told as | steps lost |",
        "|---|---|---|---|",
    ]
    for fault, count in sorted(record.struck.items()):
        verdicts = ", ".join(
            f"{verdict} {times}"
            for (of, verdict), times in sorted(record.verdicts.items())
            if of == fault
        )
        lines.append(f"| {fault} | {count} | {verdicts or '-'} | {record.steps_lost[fault]} |")
    lines += ["", "| invariant | violations |", "|---|---|"]
    for name, words in INVARIANTS.items():
        lines.append(
            f"| {name} {words} | {sum(found.startswith(name) for found in record.violations)} |"
        )
    lines += [
        "",
        f"False verdicts: {len(record.false_verdicts)}.",
        *(f"- {found}" for found in (*record.violations, *record.false_verdicts)),
        "",
        (
            "A failure within 30 s of a fault on the same run is taken for that fault. A second "
            "fault "
            "meanwhile may be told in its"
        ),
        (
            "place; a verdict counts as false only where none was near. A killed node or service "
            "disturbs other runs, too."
        ),
    ]
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    if path is not None:
        path.write_text(text)
    return text
