"""Describe a failure for people. Nothing else turns a ``wire.Failure`` into text.

Used by the command line, the pages, a run's reason (shown by webhooks and notebooks), MLflow,
TensorBoard and the logs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from everstep.text.words import count, duration, without_colours
from everstep.wire import CausingDrill, ErrorKind, Failure, Run
from everstep.wire.drills import DrillReport
from everstep.wire.events import Rung

_CACHED = re.compile(r"/[^\s\"']*/(?:cache/code/[0-9a-f]{64}|runs/[^\"'/\s]+/workdir)/")
"""The directory on a node in which uploaded code lies, or a script's working directory."""
_ANY_CAUSE = re.compile(
    r" ?(?:Some common causes include:|There are some potential root causes\.)[^\n]*"
)
"""Ray's words since 2.60, and those before."""
_TYPE_AND_MESSAGE = re.compile(r"[^\W\d][\w.]*:( |$)")
"""``LookupError: no such sample``."""


def headline(fault: Failure) -> str:
    """Return what failed, where and when, in one line."""
    rank = "a worker" if fault.first_rank is None else f"rank {fault.first_rank}"
    node = fault.node_id[:8] if fault.node_id else ""
    place = f" on node {node}" if node else ""
    the_node = f"the node {node}".rstrip()
    when = f" at step {fault.step}" if fault.step is not None else ""
    what = {
        "user_error": f"the run's own code failed in {rank}{place}{when}",
        "worker_lost": f"{_lost(fault.kind, rank + place)}{when}",
        "node_lost": f"{the_node} with {rank} was lost{when}",
        "out_of_memory": f"{rank}{place} ran out of memory{when}",
        "preemption": f"{the_node} was taken away or drained{when}",
        "hardware": f"the GPU of {rank}{place}, its driver or a library failed{when}",
        "silent_corruption": f"{_apart(fault, rank + place)}{when}",
        "hang": f"{rank}{place} stopped making progress{when}",
        "storage": f"checkpoint {fault.evidence['checkpoint']} is damaged"
        if "checkpoint" in fault.evidence
        else f"storage failed for {rank}{place}{when}",
        "control_plane": f"the driver or the Ray head was lost{when}",
        "unknown": f"two nodes lost their connection{when}"
        if fault.evidence.get("pairs")
        else f"{rank}{place} failed{when}; the evidence does not show why",
    }[fault.verdict]
    cause = f", by {drill(fault.drill)}" if fault.drill else ""
    return f"{what}{cause} (attempt {fault.attempt}, verdict {fault.verdict})"


def _apart(fault: Failure, rank: str) -> str:
    """Return who holds wrong weights or gradients, if it is known."""
    if fault.first_rank is None:
        return "the ranks' weights or gradients went apart"
    return f"the weights or gradients of {rank} went wrong"


def drill(ordered: CausingDrill) -> str:
    """Return a drill and who ordered it: ``drill kill_worker by ada``."""
    by = f" by {ordered.by}" if ordered.by else ""
    return f"drill {ordered.kind}{by}"


def sentence(fault: Failure) -> str:
    """Return what failed and what it cost, in one sentence."""
    costs = _cost(fault) or [fault.action or "no action"]
    text = f"{headline(fault)}: {', '.join(costs)}."
    return text[:1].upper() + text[1:]


def _cost(fault: Failure) -> list[str]:
    """Return what a failure cost, as far as it is known: steps, and time without training."""
    lost = of_failure(fault)
    parts = [] if lost is None else [lost]
    if fault.recovery_s is not None:
        parts.append(f"training again after {duration(fault.recovery_s)}")
    return parts


def plain(text: str) -> str:
    """Return a text of an exception with the user's own paths, without colours, and without Ray's
    list of causes that are possible for any process."""
    return _ANY_CAUSE.sub("", _CACHED.sub("", without_colours(text)))


def _lost(kind: ErrorKind | None, rank: str) -> str:
    """Return which process died: the rank's own, unless its error names a loader process. Say so if
    the user's code ended it."""
    if kind is ErrorKind.EXITED:
        return f"the run's own code ended the process of {rank}"
    return f"a loader process of {rank} died" if kind is ErrorKind.LOADER_LOST else f"{rank} died"


def story(fault: Failure) -> list[str]:
    """Return the lines below the headline: cause, evidence, and what was done."""
    lines = [f"cause: {cause(fault)}"] if fault.exception else []
    if fault.evidence.get("place"):
        lines.append(f"your code: {fault.evidence['place']}")
    return [*lines, *_evidence(fault), f"then: {_outcome(fault)}"]


def who(fault: Failure) -> str:
    """Return the verdict and the first failing rank: ``worker_lost of rank 1``."""
    rank = "" if fault.first_rank is None else f" of rank {fault.first_rank}"
    return f"{fault.verdict}{rank}"


def line(fault: Failure) -> str:
    """Return the failure in one line: ``worker_lost of rank 1: KeyError: 'a'``."""
    return f"{who(fault)}: {cause(fault)[:300]}" if cause(fault) else who(fault)


def cause(fault: Failure) -> str:
    """Return the line of the exception that says what happened; empty if there is none."""
    return exception_line(plain(fault.exception or ""))


def exception_line(text: str) -> str:
    """Return the line of an exception's text with its type and message.

    That is the first line. If the text is a traceback or wraps one, it is the last line that is not
    indented.
    """
    lines = [line for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    if not _TYPE_AND_MESSAGE.match(lines[0]) or "\nOriginal Traceback (" in text:
        return [line for line in lines if not line[0].isspace()][-1].strip()
    is_type_alone = " " not in lines[0] and lines[0].endswith(":")
    return (
        f"{lines[0]} {lines[1].strip()}" if is_type_alone and len(lines) > 1 else lines[0].strip()
    )


def _evidence(fault: Failure) -> list[str]:
    """Return the evidence besides the exception, one line each."""
    evidence = fault.evidence
    lines = []
    if evidence.get("death"):
        lines.append(f"evidence: {_first_words(plain(str(evidence['death'])))}")
    if evidence.get("oom_line"):
        lines.append(f"kernel: {str(evidence['oom_line']).strip()}")
    elif evidence.get("oom_kills"):
        ended = _processes(evidence["oom_kills"])
        lines.append(f"kernel: the OOM killer ended {ended} on this node since the rank started")
    if evidence.get("node_alive") is not None:
        lines.append(f"node: {'still answers' if evidence['node_alive'] else 'does not answer'}")
    for one, other in (evidence.get("pairs") or ())[:8]:
        lines.append(
            f"network: nodes {str(one)[:8]} and {str(other)[:8]} do not hear each other; check the "
            "MTU, the firewall and the interface between them"
        )
    collateral = [
        str(rank.get("rank"))
        for rank in evidence.get("ranks") or ()
        if rank.get("state") == "collateral"
    ]
    more = (evidence.get("more_ranks") or {}).get("collateral")
    if collateral:
        lines.append(
            f"other ranks: {', '.join(collateral)}{f' and {more} more' if more else ''} "
            "failed only because their peer did"
        )
    if evidence.get("stack"):
        lines += [
            "stack:",
            *(f"  {line}" for line in plain(str(evidence["stack"])).strip().splitlines()[-8:]),
        ]
    if fault.last_lines:
        lines.append("last log lines:")
        for each in fault.last_lines:
            text = plain(each.message)[:300]
            lines.append(f"  {each.at.astimezone():%H:%M:%S} {each.level} {text}")
    return lines


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


def evidence_items(fault: Failure) -> list[tuple[str, str]]:
    """Return each piece of evidence as a name and a text; nested values get a line each."""
    return [
        (name.replace("_", " "), plain(_text(value)))
        for name, value in fault.evidence.items()
        if value not in (None, "", [], {})
    ]


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_text(item)}" for name, item in value.items())
    if isinstance(value, list):
        return "\n".join(_text(item) for item in value)
    return str(value)


def _first_words(text: str) -> str:
    """Return the line of Ray's description of a death that says how the process ended, else its
    first line."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    telling = [
        line
        for line in lines
        if "exit" in line.lower() or "memory" in line.lower() or "killed" in line.lower()
    ]
    return (telling or lines or [""])[0][:500]


_ON_RUNG = {
    Rung.IN_PROCESS.value: " in the survivors' processes",
    Rung.SNAPSHOT.value: " in fresh processes",
    Rung.CHECKPOINT.value: " from a checkpoint",
}
"""Where training goes on, by where the recovery finds the state."""


def _outcome(fault: Failure) -> str:
    parts = [fault.action or "no action"]
    if fault.world_size_before is not None and fault.world_size_after is not None:
        parts.append(f"{fault.world_size_before} -> {count(fault.world_size_after, 'rank')}")
    lost = of_failure(fault)
    parts += [] if lost is None else [lost]
    if fault.detect_s is not None:
        parts.append(f"detected after {duration(fault.detect_s)}")
    if fault.recovery_s is not None:
        phases = fault.evidence.get("recovery_phases") or {}
        slowest = max(phases, key=lambda name: phases[name], default=None)
        most = (
            f" (most of it: {slowest.replace('_', ' ')}, {duration(phases[slowest])})"
            if slowest
            else ""
        )
        where = _ON_RUNG.get(fault.rung or "", "")
        parts.append(f"training again{where} after {duration(fault.recovery_s)}{most}")
    if fault.budget:
        parts.append(f"counts against recovery.max_{fault.budget}")
    return ", ".join(parts)


# ---------------------------------------------------------------- losses

# Say what failures cost: steps, or reports and the work between them.
#
# A step of a task or a protected loop is an optimizer step. A step of a Ray Train function is one
# of its reports: what it did since the last one is done again and counts as no step. So its cost is
# a number of reports and a time. Commands, pages, drills, notebooks and TensorBoard use these
# words.


def unit(of: Run | DrillReport) -> str:
    """Return what the steps of a run are: ``step`` or ``report``."""
    return "step" if of.redone_s is None else "report"


def of_run(run: Run) -> str:
    """Return what all failures of a run cost: ``2 steps lost``.

    A run that was restarted before any step was reported has lost a number that nobody knows: a
    user's script may report none.
    """
    if run.restarts and not run.step and not run.steps_lost and not run.redone_s:
        return "no steps reported"
    words = f"{count(run.steps_lost, unit(run))} lost"
    return f"{words} and {_redone(run.redone_s, ' between reports')}" if run.redone_s else words


def of_failure(fault: Failure) -> str | None:
    """Return what a failure cost; None if that is not known."""
    evidence = fault.evidence
    if evidence.get("worked_s") is not None:
        return _redone(float(evidence["worked_s"]))
    return _lost_words(fault.steps_lost, evidence.get("lost_unit"), evidence.get("since_report_s"))


def of_recovery(data: Mapping[str, Any]) -> str | None:
    """Return what the failure before a ``recovered`` event cost; None if the run reports no
    steps."""
    return _lost_words(data.get("steps_lost"), data.get("unit"), data.get("since_report_s"))


def of_drill(report: DrillReport) -> str | None:
    """Return what the fault of a drill cost; None if that is not known."""
    reports = None if report.redone_s is None else "reports"
    return _lost_words(report.steps_lost, reports, report.redone_s)


def _lost_words(num: int | None, unit: str | None, since_report_s: float | None) -> str | None:
    """Return steps or reports lost, and how long a loop had worked since its last report."""
    if num is None:
        return None
    words = f"{count(num, 'step' if unit is None else 'report')} lost"
    if unit is None or since_report_s is None:
        return words
    return f"{words} and {_redone(since_report_s, ' since the last one')}"


def _redone(seconds: float, since: str = "") -> str:
    return f"at most {duration(seconds)} of work{since} done again"
