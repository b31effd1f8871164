"""What grows with the number of ranks, in one process: stand-ins for ranks say what real ones say,
and the code that runs beside them, journal, service and page take it in.

    python -m benchmarks scale --ranks 100 1000 10000

Prints the seconds and bytes of each part, and the exponent with which the seconds grow from the
second largest number to the largest. No Ray, no torch that trains.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import grown
from everstep.spec.sections import RecoverySpec
from everstep.wire import ErrorKind
from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.logs.journal_writer import JournalWriter
from storage.run_dir import RunDir
from tests.support.api_service import ApiService, Journal
from tests.support.web_browser import Browser
from train_fn.recovery.decision import decide
from train_fn.recovery.evidence import Evidence, RankError, RankReport
from train_fn.recovery.hang import find_stuck
from train_fn.recovery.links import nodes_to_exclude
from train_fn.recovery.outcome import failure_of
from train_fn.recovery.sizing import NodeView, choose_nodes
from train_fn.recovery.verdict import judge
from train_fn.snapshots.election import Candidate, elect
from train_fn.snapshots.store import Label
from train_fn.step.timing import WINDOW_STEPS, StragglerWatch

PER_NODE = 8
NUM_ATTEMPTS, NUM_PAGES = 10, 3
LEAST_S = 0.02
"""Of a part that is quicker no exponent is told: what it does once counts more."""
Row = dict[str, float]


def node_of(rank: int) -> str:
    return f"{rank // PER_NODE:056x}"


def timed(call: Callable[[], object], repeats: int = 3) -> float:
    """Return the least seconds of a call."""
    gc.collect()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
        if seconds[-1] > 2.0:
            break
    return min(seconds)


# ---------------------------------------------------------------- what ranks say


def reports(num_ranks: int) -> tuple[RankReport, ...]:
    """Return what is known of each rank after the first one died."""
    text = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    dead = RankReport(0, node_of(0), 1000, died=True, death="Worker unexpectedly exits")
    return (
        dead,
        *(
            RankReport(
                rank,
                node_of(rank),
                1000 + rank,
                state_bytes=1 << 20,
                error=RankError(
                    rank=rank,
                    kind=ErrorKind.COLLECTIVE,
                    type="RuntimeError",
                    message=text,
                    traceback=text,
                    at=float(rank),
                    phase="step",
                    step=7,
                    snapshot_step=7,
                ),
            )
            for rank in range(1, num_ranks)
        ),
    )


def candidates(num_ranks: int, *, torn: bool) -> list[Candidate]:
    """Return what ranks offer: the two states of their node, as each of its ranks sees them.

    Args:
        torn: whether the newest state of one node differs, so that an older one is elected.
    """
    found = []
    for rank in range(num_ranks):
        first = rank - rank % PER_NODE
        for step in (6, 7):
            digest = "other" if torn and first == 0 and step == 7 else f"{step}"
            found.append(Candidate(rank, Label(1, 1, step, first, digest, None)))
    return found


def places(num_ranks: int) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "node_id": node_of(rank), "node_ip": "10.100.100.100", "pid": 1000 + rank}
        for rank in range(num_ranks)
    ]


def apart(num_ranks: int) -> dict[str, list[str]]:
    """Return which nodes each one does not reach, if a sixteenth of them is cut off."""
    nodes = sorted({node_of(rank) for rank in range(num_ranks)})
    out = nodes[: max(1, len(nodes) // 16)]
    return {node: nodes[len(out) :] for node in out}


# ---------------------------------------------------------------- beside the ranks


def beside_ranks(num_ranks: int) -> Row:
    """Return the seconds of what controller and ranks decide."""
    ranks = reports(num_ranks)
    evidence = Evidence(1, 0.0, ranks, last_step=7)
    judgement = judge(evidence)
    views = [
        NodeView(node_of(rank), "10.0.0.1", 1, {"GPU": PER_NODE}, {"GPU": 0.0}, reachable=rank > 0)
        for rank in range(0, num_ranks + PER_NODE, PER_NODE)
    ]
    held = {view.node_id: PER_NODE for view in views[:-1]}
    whole, torn, unreached = (
        candidates(num_ranks, torn=False),
        candidates(num_ranks, torn=True),
        apart(num_ranks),
    )
    stacks = dict.fromkeys(range(num_ranks), 'File "/x/torch/distributed/c10d.py", line 1, in f\n')
    gpus = num_ranks - PER_NODE
    return {
        "judge": timed(lambda: judge(evidence)),
        "decide": timed(lambda: decide(judgement, (), RecoverySpec(), backoff_max_s=60)),
        "who hangs": timed(lambda: find_stuck(stacks)),
        "choose nodes": timed(
            lambda: choose_nodes(views, held, {"GPU": 1}, num_workers=gpus, strategy="PACK")
        ),
        "exclude nodes": timed(lambda: nodes_to_exclude(unreached)),
        "elect": timed(lambda: elect(whole, 1)),
        "elect an older one": timed(lambda: elect(torn, 1)),
        "stragglers": timed(lambda: watch(num_ranks)),
    }


def watch(num_ranks: int) -> list[dict[str, Any]]:
    """Return the events of rank 0's watch over the own times of all ranks, of a window of steps."""
    now, told = [0.0], list[dict[str, Any]]()
    found = StragglerWatch(
        lambda kind, data: told.append(data),
        [node_of(rank) for rank in range(num_ranks)],
        [4] * num_ranks,
        lambda: now[0],
    )
    own_s = [0.1 + 0.0001 * (rank % 97) for rank in range(num_ranks)]
    for step in range(WINDOW_STEPS + 1):
        now[0] += 60.0
        found.note(step, own_s, 0.12)
    return told


# ---------------------------------------------------------------- journal, service, page


async def service(num_ranks: int, directory: Path) -> Row:
    """Return the seconds, and bytes, of journal, database, API and pages of a run that has had some
    attempts, each of which ended by a death."""
    row: Row = {}
    async with ApiService(directory) as api:
        nodes = tuple(api.cluster.node(node_of(rank)) for rank in range(0, num_ranks, PER_NODE))
        api.cluster.nodes = nodes  # type: ignore[assignment]
        browser = await Browser.logged_in(api, api.token("admin"))
        run_id = await api.create(scaling={"min_workers": 1, "max_workers": num_ranks})
        api.runs.claim_submission(run_id, 0)
        api.runs.record_job(run_id, 1, f"{run_id}-s001")
        journal, times = Journal(at=api.clock.now), watch(num_ranks)[0]
        evidence = Evidence(1, api.clock.now, reports(num_ranks), last_step=7)
        failure = failure_data(evidence)
        for attempt in range(1, NUM_ATTEMPTS + 1):
            journal.attempt = attempt
            begun = journal.start(world_size=num_ranks)
            begun[0].data["workers"] = places(num_ranks)
            begun.append(journal.steps(attempt))
            began = time.perf_counter()
            api.apply(run_id, begun)
            row["apply a start"] = time.perf_counter() - began
            if attempt < NUM_ATTEMPTS:
                ended = [
                    journal.event(EventKind.RANK_TIMES, **times),
                    journal.event(EventKind.FAILURE, **failure),
                ]
                began = time.perf_counter()
                api.apply(run_id, ended)
                row["apply a failure"] = time.perf_counter() - began
        row["write the journal"] = write_journal(directory, [*begun, *ended])
        row["bytes of a failure"] = len(json.dumps(failure))
        for name, path in {
            "run": f"/v1/runs/{run_id}",
            "attempts": f"/v1/runs/{run_id}/attempts",
            "failures": f"/v1/runs/{run_id}/failures",
            "stragglers": f"/v1/runs/{run_id}/stragglers",
            "events": f"/v1/runs/{run_id}/events",
            "list": "/v1/runs",
            "cluster": "/v1/cluster",
            "page": f"/runs/{run_id}",
            "page of the cluster": "/cluster",
            "page of runs": "/runs",
        }.items():
            http = browser.http if name.startswith("page") else api.http
            seconds = []
            for _ in range(NUM_PAGES):
                began = time.perf_counter()
                answer = await http.get(path, timeout=600)
                seconds.append(time.perf_counter() - began)
            assert answer.status_code == 200, answer.text[:500]
            row[f"GET {name}"] = min(seconds)
            row[f"bytes of {name}"] = len(answer.content)
    return row


def failure_data(evidence: Evidence) -> dict[str, Any]:
    judgement = judge(evidence)
    decision = decide(judgement, (), RecoverySpec(), backoff_max_s=60)
    failure = failure_of(
        evidence, judgement, decision, detect_s=0.1, world_size=len(evidence.ranks)
    )
    return dict(failure.event_data())


def write_journal(directory: Path, events: Sequence[Any]) -> float:
    run_dir = RunDir(open_storage(str(directory / "journal")), "run_aaaaaaaaaaaa")
    began = time.perf_counter()
    with JournalWriter(run_dir, 1) as journal:
        journal.append(list(events))
    return time.perf_counter() - began


# ---------------------------------------------------------------- all


def measure(counts: Sequence[int]) -> dict[str, Any]:
    """Print a row for each part: its seconds or bytes at each number of ranks, and how it grows."""
    rows = []
    for num_ranks in counts:
        with tempfile.TemporaryDirectory() as directory:
            row = beside_ranks(num_ranks) | asyncio.run(service(num_ranks, Path(directory)))
        row["peak MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        rows.append(row)
        print(num_ranks, "ranks done", flush=True)
    return grown(
        counts, rows, 5, lambda name, _, newest: name.startswith("bytes") or newest > LEAST_S
    )
