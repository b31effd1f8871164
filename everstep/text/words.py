"""Runs, events and failures in words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from everstep.wire import Event, Failure, LogLine, Run, RunStatus, StragglerReport
from everstep.wire.events import EventKind

STATUS_STYLES: Mapping[RunStatus, str] = {
    RunStatus.QUEUED: "cyan",
    RunStatus.STARTING: "cyan",
    RunStatus.RUNNING: "bold green",
    RunStatus.RECOVERING: "bold yellow",
    RunStatus.STOPPING: "yellow",
    RunStatus.PAUSED: "magenta",
    RunStatus.SUCCEEDED: "green",
    RunStatus.FAILED: "bold red",
    RunStatus.CANCELLED: "red",
}

_TYPE_AND_MESSAGE = re.compile(r"[^\W\d][\w.]*:( |$)")
"""``LookupError: no such sample``."""


def size(num_bytes: float) -> str:
    """``3.4 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def duration(seconds: float) -> str:
    """``1.3 s``, ``4 min 5 s``, ``3 h 12 min``, ``2 d 5 h``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def ago(at: datetime | None, now: datetime | None = None) -> str | None:
    """``5.0 s ago``."""
    return (
        None
        if at is None
        else f"{duration(max(0.0, ((now or datetime.now(UTC)) - at).total_seconds()))} ago"
    )


def number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def numbers(values: Mapping[str, Any]) -> str:
    """``loss 0.1234, val_accuracy 0.98``."""
    return ", ".join(f"{name} {number(value)}" for name, value in values.items())


def count(amount: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{amount} {noun}{'' if amount == 1 else 's'}"


def progress(run: Run) -> str:
    return f"{run.step}/{run.total_steps}" if run.total_steps is not None else str(run.step)


def summary(run: Run) -> str:
    """How a run ended, in one line."""
    parts = [f"{run.status} at step {progress(run)}"]
    if run.finished_at is not None:
        parts.append(f"after {duration((run.finished_at - run.created_at).total_seconds())}")
    text = " ".join(parts)
    validation = {name: value for name, value in run.metrics.items() if name.startswith("val_")}
    if validation:
        text += f": {numbers(validation)}"
    text += f"; {count(run.restarts, 'restart')}, {count(run.steps_lost, 'step')} lost"
    if run.reason is not None:
        text += f"\n{run.reason.code}: {run.reason.message}"
    return text


def failure(fault: Failure) -> str:
    """One failure as a person would tell it."""
    who = "a worker" if fault.first_rank is None else f"rank {fault.first_rank}"
    place = f" on node {fault.node_id[:8]}" if fault.node_id else ""
    when = f" at step {fault.step}" if fault.step is not None else ""
    what = {
        "user_error": f"the run's own code failed in {who}{place}{when}",
        "worker_lost": f"{who}{place} died{when}",
        "node_lost": f"the node{place.removeprefix(' on node')} with {who} was lost{when}",
        "out_of_memory": f"{who}{place} ran out of memory{when}",
        "preemption": f"the node{place.removeprefix(' on node')} was told to leave{when}",
        "hang": f"{who}{place} stopped making progress{when}",
        "storage": f"checkpoint {fault.evidence['checkpoint']} is damaged"
        if "checkpoint" in fault.evidence
        else f"storage failed for {who}{place}{when}",
        "control_plane": f"the driver or the Ray head was lost{when}",
    }.get(fault.verdict, f"{who}{place} failed{when}, for a reason that the evidence does not tell")
    lines = [f"{what} (attempt {fault.attempt}, verdict {fault.verdict})"]
    if fault.exception:
        lines.append(f"  cause: {exception_line(fault.exception)}")
    if fault.evidence.get("place"):
        lines.append(f"  your code: {fault.evidence['place']}")
    lines += [f"  {line}" for line in _evidence(fault)]
    lines.append(f"  then: {_outcome(fault)}")
    return "\n".join(lines)


def exception_line(text: str) -> str:
    """Return the line of an exception's text that says its type and what it says first.

    That is the first line, unless the text is a whole traceback, or wraps one: then the last line
    that is not indented.
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
    """What the verdict rests on, apart from the exception, in lines."""
    evidence = fault.evidence
    lines = []
    if evidence.get("death"):
        lines.append(f"evidence: {_first_words(str(evidence['death']))}")
    if evidence.get("oom_line"):
        lines.append(f"kernel: {str(evidence['oom_line']).strip()}")
    elif evidence.get("oom_kills"):
        lines.append(
            f"kernel: killed {count(evidence['oom_kills'], 'process')} there for want of memory "
            "since the rank began"
        )
    if evidence.get("node_alive") is not None:
        lines.append(f"node: {'still answers' if evidence['node_alive'] else 'does not answer'}")
    collateral = [
        str(rank.get("rank"))
        for rank in evidence.get("ranks") or ()
        if rank.get("state") == "collateral"
    ]
    if collateral:
        lines.append(f"other ranks: {', '.join(collateral)} only lost their peer")
    if evidence.get("stack"):
        lines += [
            "it stood at:",
            *(f"  {line}" for line in str(evidence["stack"]).strip().splitlines()[-8:]),
        ]
    if fault.last_lines:
        lines += ["its last lines:", *(f"  {_log_line(line)}" for line in fault.last_lines)]
    return lines


def _first_words(text: str) -> str:
    """Ray's account of a death without its list of usual causes: the line that tells how the
    process ended, else the first."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    telling = [
        line
        for line in lines
        if "exit" in line.lower() or "memory" in line.lower() or "killed" in line.lower()
    ]
    return (telling or lines or [""])[0][:500]


def _log_line(line: LogLine) -> str:
    return f"{line.at.astimezone():%H:%M:%S} {line.level} {line.message[:300]}"


def _outcome(fault: Failure) -> str:
    parts = [fault.action or "nothing was done"]
    if fault.world_size_before is not None and fault.world_size_after is not None:
        parts.append(f"{fault.world_size_before} -> {count(fault.world_size_after, 'rank')}")
    if fault.steps_lost is not None:
        parts.append(f"{count(fault.steps_lost, 'step')} lost")
    if fault.detect_s is not None:
        parts.append(f"noticed after {duration(fault.detect_s)}")
    if fault.recovery_s is not None:
        phases = fault.evidence.get("recovery_phases") or {}
        slowest = max(phases, key=lambda name: phases[name], default=None)
        most = (
            f" (most of it: {slowest.replace('_', ' ')}, {duration(phases[slowest])})"
            if slowest
            else ""
        )
        parts.append(f"training again after {duration(fault.recovery_s)}{most}")
    if fault.budget:
        parts.append(f"counted on {fault.budget}")
    return ", ".join(parts)


def event(item: Event) -> str | None:
    """An event in one line; None for what is too frequent or too small to be told."""
    data = item.data
    match item.kind:
        case EventKind.STATUS:
            reason = data.get("reason") or {}
            return f"{data.get('to')}{': ' + str(reason.get('message')) if reason else ''}"
        case EventKind.WAITING:
            return f"waiting: {data.get('message') or data.get('code')}"
        case EventKind.ATTEMPT_STARTED:
            workers = ", ".join(
                f"rank {worker.get('rank')} on {str(worker.get('node_id'))[:8]}"
                for worker in data.get("workers") or ()
            )
            return (
                f"attempt {item.attempt} with {count(data.get('world_size') or 0, 'rank')}: "
                f"{workers}"
            )
        case EventKind.RESTORED if data.get("source") != "fresh":
            rejected = "".join(
                f"; rejected {bad.get('name')}: {bad.get('problem')}"
                for bad in data.get("rejected") or ()
            )
            return (
                f"goes on from step {data.get('step')} "
                f"({data.get('checkpoint') or data.get('source')}){rejected}"
            )
        case EventKind.TRAINING_STARTED:
            warnings = "".join(f"; warning: {text}" for text in data.get("warnings") or ())
            return (
                f"training on {data.get('device')} over {data.get('backend')}: "
                f"{data.get('total_steps')} steps{warnings}"
            )
        case EventKind.SNAPSHOTS if data.get("problem"):
            return f"no state is kept on the nodes: {data.get('problem')}; checkpoints remain"
        case EventKind.SNAPSHOTS:
            return f"from step {data.get('step')} on the state is kept on the nodes again"
        case EventKind.EVALUATED:
            return (
                f"step {data.get('step')}, epoch {data.get('epoch')}: "
                f"{numbers(data.get('metrics') or {})}"
            )
        case EventKind.CHECKPOINT_COMMITTED:
            return f"checkpoint of step {data.get('step')}, {size(data.get('size_bytes') or 0)}"
        case EventKind.CHECKPOINT_FAILED:
            return (
                f"the checkpoint of step {data.get('step')} failed: {data.get('error')}; training "
                "goes on"
            )
        case EventKind.CHECKPOINT_CORRUPT:
            return f"checkpoint {data.get('name')} is corrupt: {data.get('problem')}"
        case EventKind.CHECKPOINT_CADENCE:
            return (
                f"a checkpoint every {duration(data.get('interval_s') or 0)} from now on: "
                f"{data.get('reason')}"
            )
        case EventKind.FAILURE:
            return _failure_line(item)
        case EventKind.RECOVERED:
            return (
                f"recovered in {duration(data.get('recovery_s') or 0)}: "
                f"{data.get('world_size_before')} -> "
                f"{count(data.get('world_size_after') or 0, 'rank')}, "
                f"{count(data.get('steps_lost') or 0, 'step')} lost"
            )
        case EventKind.STRAGGLER if data.get("slow"):
            return (
                f"rank {data.get('rank')} on node {str(data.get('node_id'))[:8]} holds the others "
                f"up: {_slowness(data)}"
            )
        case EventKind.STRAGGLER:
            return (
                f"rank {data.get('rank')} on node {str(data.get('node_id'))[:8]} is as fast as "
                "the others again"
            )
        case EventKind.EVIDENCE:
            found = data.get("oom_line") or "out-of-memory kills were counted on its node"
            return f"rank {data.get('rank')} was killed for want of memory: {found}"
        case EventKind.STOP_REQUESTED:
            return f"asked to {data.get('stop')}"
        case EventKind.WORKERS_LIMITED if data.get("by"):
            return (
                f"makes room for run {data.get('by')} of a higher priority: goes on with "
                f"{count(data.get('limit') or 0, 'rank')}"
            )
        case EventKind.WORKERS_LIMITED:
            return "may grow again"
        case EventKind.DRILL_STARTED:
            return f"drill: {data.get('kind')} of rank {data.get('rank')}"
        case EventKind.DRILL_FAILED:
            return f"drill: {data.get('kind')} was not carried out: {data.get('problem')}"
        case EventKind.PROFILE_STARTED:
            return (
                f"profile {data.get('id')}: rank {data.get('rank')} is recorded from step "
                f"{data.get('step')} on"
            )
        case EventKind.PROFILE_DONE:
            return (
                f"profile {data.get('id')}: {count(data.get('steps') or 0, 'step')} of rank "
                f"{data.get('rank')} are kept"
            )
        case EventKind.PROFILE_FAILED:
            return f"profile {data.get('id')} failed: {data.get('problem')}"
        case _:
            return None


def _slowness(data: Mapping[str, Any]) -> str:
    own_ms, peers_ms = (float(data.get(name) or 0) * 1000 for name in ("own_s", "peers_s"))
    return f"{own_ms:.0f} ms of its own in a step, its peers {peers_ms:.0f} ms for the same share"


def stragglers(report: StragglerReport) -> list[str]:
    """Ranks that hold the others up now, one line each."""
    return [
        f"rank {each.rank} on node {each.node_id[:8]} holds the others up since "
        f"{each.at.astimezone():%H:%M:%S}: "
        f"{_slowness(each.model_dump())}"
        for each in report.stragglers
        if each.ended_at is None
    ]


def _failure_line(item: Event) -> str:
    rank = item.data.get("first_rank")
    cause = exception_line(str(item.data.get("exception") or ""))
    return (
        f"failure: {item.data.get('verdict')}{'' if rank is None else f' of rank {rank}'}"
        f"{': ' if cause else ''}{cause[:300]}"
    )
