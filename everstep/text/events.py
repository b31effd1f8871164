"""Describe events of a run, one line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from everstep.text import failure
from everstep.text.words import count, duration, has_no_steps, numbers, size, usage_parts, where
from everstep.wire import Attempt, Event, Failure, Node, Run, RunStatus, StragglerReport
from everstep.wire.drills import StackReport
from everstep.wire.events import OWN_FILES, UNFIT, EventKind
from everstep.wire.run import RANKS_SHOWN

_QUIET_S = 5.0
"""Seconds without progress that are worth a word."""


def event(item: Event) -> str | None:
    """Return an event in one line; None for kinds that are too frequent or too small to show."""
    try:
        return _line(item)
    except UNFIT:
        return f"{item.kind}, with data that does not fit it"


def _line(item: Event) -> str | None:
    data = item.data
    match item.kind:
        case EventKind.STATUS:
            reason = data.get("reason") or {}
            return f"{data.get('to')}{': ' + str(reason.get('message')) if reason else ''}"
        case EventKind.WAITING:
            return f"waiting: {data.get('message') or data.get('code')}"
        case EventKind.ATTEMPT_STARTED:
            places = [
                f"rank {worker.get('rank')} on {str(worker.get('node_id'))[:8]}"
                for worker in data.get("workers") or ()
            ]
            more = f" and {len(places) - RANKS_SHOWN} more" if len(places) > RANKS_SHOWN else ""
            ranks = count(data.get("world_size") or 0, "rank")
            apart = "".join(f"; {each}" for each in built_apart(data.get("built_apart") or {}))
            shown = ", ".join(places[:RANKS_SHOWN])
            return f"attempt {item.attempt} with {ranks}: {shown}{more}{apart}"
        case EventKind.RESTORED if data.get("source") == OWN_FILES:
            return "the script starts again, at the checkpoints that it wrote itself"
        case EventKind.RESTORED if data.get("source") != "fresh":
            rejected = "".join(
                f"; rejected {bad.get('name')}: {bad.get('problem')}"
                for bad in data.get("rejected") or ()
            )
            return (
                f"continues from step {data.get('step')} "
                f"({data.get('checkpoint') or data.get('source')}){rejected}"
            )
        case EventKind.TRAINING_STARTED:
            warnings = "".join(f"; warning: {text}" for text in data.get("warnings") or ())
            total = data.get("total_steps")
            steps = "its own loop" if total is None else count(total, "step")
            return f"training on {data.get('device')} over {data.get('backend')}: {steps}{warnings}"
        case EventKind.SNAPSHOTS if data.get("problem"):
            return f"nodes keep no snapshots: {data.get('problem')}; checkpoints are still saved"
        case EventKind.SNAPSHOTS:
            return f"nodes keep snapshots again, from step {data.get('step')} on"
        case EventKind.NUMERICS_CHANGED:
            ranks = "; ".join(
                f"rank {each.get('rank')} on node {str(each.get('node_id'))[:8]}, in "
                f"{' and '.join(each.get('differs') or ())} "
                f"({', '.join(each.get('kernels') or ()) or 'no known cause'})"
                for each in data.get("ranks") or ()
            )
            return f"other bits are computed than by {data.get('reference')}: {ranks}"
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
                "continues"
            )
        case EventKind.CHECKPOINT_CORRUPT:
            return f"checkpoint {data.get('name')} is corrupt: {data.get('problem')}"
        case EventKind.CHECKPOINT_CADENCE:
            return (
                f"a checkpoint every {duration(data.get('interval_s') or 0)} from now on: "
                f"{data.get('reason')}"
            )
        case EventKind.FAILURE:
            return f"failure: {failure.line(Failure.of(item))}"
        case EventKind.RECOVERED:
            lost = failure.of_recovery(data)
            return (
                f"recovered in {duration(data.get('recovery_s') or 0)}: "
                f"{data.get('world_size_before')} -> "
                f"{count(data.get('world_size_after') or 0, 'rank')}{f', {lost}' if lost else ''}"
            )
        case EventKind.FELL_BACK:
            return f"goes on in fresh processes: {data.get('reason')}"
        case EventKind.SHARES_PLANNED:
            counts, seconds = data["micro_batches"], data["micro_batch_s"]
            slowest_first = sorted(range(len(counts)), key=seconds.__getitem__, reverse=True)
            takes = (f"rank {rank} takes {counts[rank]}" for rank in slowest_first[:RANKS_SHOWN])
            return f"shares by speed: of {sum(counts)} micro-batches {', '.join(takes)}"
        case EventKind.STRAGGLER if data.get("slow"):
            return (
                f"rank {data.get('rank')} on node {str(data.get('node_id'))[:8]} slows the others "
                f"down: {_slowness(data)}"
            )
        case EventKind.STRAGGLER:
            return (
                f"rank {data.get('rank')} on node {str(data.get('node_id'))[:8]} is as fast as "
                "the others again"
            )
        case EventKind.STRAGGLER_MOVED:
            node, stays = f"node {str(data.get('node_id'))[:8]}", data.get("stays")
            if stays is None:
                return f"the ranks on {node} move: rank {data.get('rank')} is slow there"
            return f"{'no' if stays else 'another'} rank is slow since the ranks have left {node}"
        case EventKind.EVIDENCE:
            found = data.get("oom_line") or "its node counted out-of-memory kills"
            return f"the OOM killer ended rank {data.get('rank')}: {found}"
        case EventKind.STOP_REQUESTED:
            return f"{data.get('stop')} requested"
        case EventKind.WORKERS_LIMITED if data.get("by"):
            return (
                f"makes room for run {data.get('by')} of higher priority: continues with "
                f"{count(data.get('limit') or 0, 'rank')}"
            )
        case EventKind.WORKERS_LIMITED:
            return "may grow again"
        case EventKind.DRILL_STARTED:
            return f"drill: {data.get('kind')} of rank {data.get('rank')}"
        case EventKind.DRILL_FAILED:
            return f"drill: {data.get('kind')} failed: {data.get('problem')}"
        case EventKind.PROFILE_STARTED:
            return (
                f"profile {data.get('id')}: recording rank {data.get('rank')} from step "
                f"{data.get('step')} on"
            )
        case EventKind.PROFILE_DONE:
            return (
                f"profile {data.get('id')}: {count(data.get('steps') or 0, 'step')} of rank "
                f"{data.get('rank')} recorded"
            )
        case EventKind.PROFILE_FAILED:
            return f"profile {data.get('id')} failed: {data.get('problem')}"
        case EventKind.STACKS if data.get("id") is None:
            return (
                f"nothing has moved for {duration(data.get('quiet_s') or 0)}: {data.get('summary')}"
            )
        case EventKind.STACKS:
            return f"stacks: {data.get('summary')}"
        case EventKind.REPLAY_COMPARED:
            return f"replay: {data.get('message')}"
        case _:
            return None


def _slowness(data: Mapping[str, Any]) -> str:
    own_ms, peers_ms = (float(data.get(name) or 0) * 1000 for name in ("own_s", "peers_s"))
    return f"it works {own_ms:.0f} ms in a step, a peer {peers_ms:.0f} ms"


def standing_still(report: StackReport) -> str:
    """Return what the ranks do, and for how long nothing has moved if that is long."""
    quiet_s = report.quiet_s or 0.0
    still = f"nothing has moved for {duration(quiet_s)}: " if quiet_s >= _QUIET_S else ""
    return f"{still}{report.summary}"


def stragglers(report: StragglerReport) -> list[str]:
    """Return the ranks that slow the others down now, one line each."""
    return [
        f"rank {each.rank} on node {each.node_id[:8]} slows the others down since "
        f"{each.at.astimezone():%H:%M:%S}: {_slowness(each.model_dump())}"
        for each in report.stragglers
        if each.ended_at is None
    ]


# ---------------------------------------------------------------- beginning

# Say what a run does that does not train yet.

_MOST_NODES = 8
"""Nodes whose free resources are shown."""


def built_apart(why: Mapping[str, str]) -> list[str]:
    """Return a line for each reason why ranks build for themselves, as ``Attempt`` has them."""
    return [
        f"each rank on {', '.join(node[:8] for node in why if why[node] == reason)} builds for "
        f"itself, in every attempt: {reason}"
        for reason in dict.fromkeys(why.values())
    ]


def doing(run: Run, attempts: Sequence[Attempt], now: datetime) -> str | None:
    """Return what a run does before a step of its newest attempt; None for one that trains, or has
    ended."""
    since = run.transitions[-1].at if run.transitions else run.created_at
    has_ranks = run.world_size is not None and bool(attempts)
    match run.status:
        case RunStatus.QUEUED:
            what = "waits" if run.reason else "waits for the service's next scheduling pass"
        case RunStatus.STARTING | RunStatus.RECOVERING if has_ranks:
            since = attempts[-1].started_at
            what = (
                f"{count(run.world_size or 0, 'rank')} of attempt {attempts[-1].attempt} start: "
                "they import the code, build the model and the data, and take over a state"
            )
        case RunStatus.STARTING | RunStatus.RECOVERING:
            what = "its driver starts, and forms a group of ranks"
        case RunStatus.RUNNING if has_no_steps(run):
            what = "its ranks run code that has reported no step"
        case RunStatus.RUNNING if run.started_at is None:
            what = "its ranks make their first step"
        case RunStatus.STOPPING:
            what = "its ranks save their state and leave"
        case _:
            return None
    seconds = max(0.0, (now - since).total_seconds())
    return f"{what}, for {duration(seconds)}; `everstep logs {run.id}` shows what they say"


def room(nodes: Sequence[Node]) -> str:
    """Return what is free on the nodes: ``free now: 1 CPU + 0 GPU on 53e5fe4c; …``."""
    alive = [node for node in nodes if node.resources_used is not None]
    parts = [f"{_free(node)} on {node.id[:8]}" for node in alive[:_MOST_NODES]]
    if len(alive) > _MOST_NODES:
        parts.append(f"and {len(alive) - _MOST_NODES} more nodes (`everstep cluster`)")
    return f"free now: {'; '.join(parts) or 'nothing, as no node is alive'}"


def _free(node: Node) -> str:
    used = node.resources_used or {}
    shown = [
        f"{max(0.0, total - used.get(name, 0.0)):g} {name}"
        for name, total in sorted(node.resources_total.items())
        if ":" not in name and "memory" not in name
    ]
    return " + ".join(shown) + ("" if node.state == "ALIVE" else f" ({node.state.lower()})")


# ---------------------------------------------------------------- ending

# Say how a run ended.


def summary(run: Run) -> str:
    """Return how a run ended: a line, and a second one for its reason."""
    parts = [where(run)]
    if run.finished_at is not None:
        parts.append(f"after {duration((run.finished_at - run.created_at).total_seconds())}")
    text = " ".join(parts)
    validation = {name: value for name, value in run.metrics.items() if name.startswith("val_")}
    if validation:
        text += f": {numbers(validation)}"
    text += f"; {count(run.restarts, 'restart')}, {failure.of_run(run)}"
    if used := usage_parts(run.usage):
        text += f"; {', '.join(used)}"
    if run.reason is not None:
        text += f"\n{run.reason.code}: {run.reason.message}"
    return text
