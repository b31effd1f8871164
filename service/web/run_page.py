"""Pages of one run: overview, curves, checkpoints, history and actions, with a lane for each
rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse, StreamingResponse
from pydantic import ValidationError

from everstep.spec.plain_text import is_sayable
from everstep.text import failure as failure_words
from everstep.wire import MOST_NOTES_CHARS, Failure, Run, RunChange, RunStatus, Verdict
from everstep.wire.events import EventKind, validation_name
from service.annex import Annexes
from service.api import streams
from service.api.blocking import db_read, folded, of_history
from service.api.callers import Principal
from service.api.dependencies import Events, Feed, Gate, Series, Streams, TheStorage
from service.api.problems import invalid_request
from service.model.rows import EventRow
from service.model.run_rows import RunRow
from service.model.states import is_legal
from service.parts import ServiceParts, parts_of
from service.projections.checkpoints import choose
from service.runs import checkpoints, history
from service.runs.history import thinned
from service.runs.routes import Control, RunActions
from service.runs.views import RunViews, Views
from service.web import rendering
from service.web.assets import wandb_place
from service.web.rendering import PageRoute, bucket_shares, page, progress_share
from service.web.session import CheckedForm, ControlledWebRun, WebCaller, WebRun
from storage.filesystem import Storage

router: Final = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute, include_in_schema=False)

_POINTS: Final = 1500
_CHARTS: Final = 6
_MOST_FAILURES: Final = 50
_MOST_CHECKPOINTS: Final = 500
_MOST_EVENTS: Final = 10_000


@dataclass(frozen=True)
class RunPages:
    """Renders the pages of a run for whoever is logged in."""

    request: Request
    caller: Principal
    views: RunViews
    storage: Storage

    async def page(self, template: str, row: RunRow, /, **values: Any) -> Response:
        """Render a page with the head that all pages of a run have: name, status, actions."""
        [run] = await self.views.of([row])
        return page(
            self.request,
            template,
            self.caller,
            run=run,
            actions=_actions(run, self.caller),
            ray_job_id=row.ray_job_id,
            has_code=row.stored_spec.code is not None,
            progress_share=progress_share,
            most_notes_chars=MOST_NOTES_CHARS,
            wandb=await wandb_place(self.storage, row),
            **values,
        )


async def run_pages(
    request: Request, caller: WebCaller, views: Views, storage: TheStorage
) -> RunPages:
    return RunPages(request, caller, views, storage)


Pages = Annotated[RunPages, Depends(run_pages)]


def _actions(run: Run, caller: Principal) -> list[str]:
    """Return the actions that this caller may take on the run now."""
    if not caller.may("submitter"):
        return []
    possible = {
        "pause": run.status != RunStatus.STOPPING and is_legal(run.status, RunStatus.PAUSED),
        "resume": is_legal(run.status, RunStatus.QUEUED),
        "cancel": is_legal(run.status, RunStatus.CANCELLED),
        "delete": run.status.terminal,
    }
    return [name for name, is_possible in possible.items() if is_possible]


@router.get("")
async def get_run(run: WebRun, pages: Pages, events: Events) -> Response:
    failures, num_failures = await history.failures(
        events, pages.storage, run.id, slice(-_MOST_FAILURES, None)
    )
    goodput = await history.get_goodput(run, pages.views.runs)
    times = await history.get_stragglers(run, events)
    newest = await db_read(events.page_before, run.id, None, _MOST_EVENTS, KINDS)
    drawn = await folded(partial(lanes, now=events.clock()), reversed(newest.rows))
    return await pages.page(
        "run.html",
        run,
        failures=[_failure_view(failure) for failure in reversed(failures)],
        num_older_failures=num_failures - len(failures),
        goodput=goodput,
        buckets=bucket_shares(goodput.buckets, goodput.wall_s),
        lanes=drawn,
        activity_words=ACTIVITY_WORDS,
        workers={worker["rank"]: worker for worker in run.workers},
        times=times,
        gpus={gpu.rank: gpu for gpu in times.gpus} if run.workers else {},
        rehearsal=await history.get_rehearsal(run),
        is_own_code=run.stored_spec.code is not None,
        judged=validation_name(run.best["metric"]) if run.best else "",
        most_ranks=MOST_RANKS,
        last_seq=run.last_seq,
        **await _from_annexes(parts_of(pages.request), run),
    )


async def _from_annexes(parts: ServiceParts, run: RunRow) -> dict[str, Any]:
    """Return what annexes show on the page of a run."""
    found: dict[str, Any] = {}
    for annex in parts[Annexes]:
        if annex.run_values is not None:
            found |= await annex.run_values(parts, run)
    return found


def _blocks(lines: list[str]) -> list[tuple[str, str]]:
    """Return lines as (tag, text): indented lines that follow each other are one ``pre``."""
    found: list[tuple[str, str]] = []
    for line in lines:
        if not line.startswith("  "):
            found.append(("p", line))
        elif found and found[-1][0] == "pre":
            found[-1] = ("pre", f"{found[-1][1]}\n{line[2:]}")
        else:
            found.append(("pre", line[2:]))
    return found


def _failure_view(failure: Failure) -> dict[str, Any]:
    """Return a failure with its headline and the lines that follow."""
    headline = failure_words.headline(failure)
    return {
        "fault": failure,
        "headline": headline[:1].upper() + headline[1:],
        "rest": _blocks(failure_words.story(failure)),
        "exception": failure_words.plain(failure.exception or ""),
        "sentence": failure_words.sentence(failure),
        "evidence": failure_words.evidence_items(failure),
    }


@router.get("/curves.json")
async def get_curves(
    run: WebRun,
    store: Series,
    events: Events,
    all: Annotated[bool, Query()] = False,
    system: Annotated[bool, Query()] = True,
    max_points: Annotated[int, Query(ge=4, le=5000)] = _POINTS,
) -> Response:
    """Return charts, their series, the restarts, and the event after which the stream continues.
    Only with ``system`` there are charts of the hosts."""
    grouped = rendering.charts(run.metrics, run.best["metric"] if run.best else "")
    shown = grouped if all else grouped[:_CHARTS]
    if system:
        names = await db_read(store.names, run.id)
        shown = [*shown, *rendering.system_charts(names)]
    series = await thinned(
        store, run.id, [name for chart in shown for name in chart["names"]], max_points
    )
    marks = await of_history(events, run.id, rendering.MARK_KINDS, rendering.marks)
    return JSONResponse(
        {
            "run": {"id": run.id, "name": run.name},
            "charts": shown,
            "num_charts": len(grouped),
            "series": series,
            "marks": marks,
            "seq": run.last_seq,
        }
    )


@router.get("/stream")
async def get_stream(
    run: WebRun,
    feed: Feed,
    streamed: Streams,
    caller: WebCaller,
    after: Annotated[int, Query(ge=0, le=2**53)] = 0,
    last_event_id: streams.LastEventId = None,
) -> StreamingResponse:
    frames = feed.follow(run.id, streams.resume_after(last_event_id, after))
    return streams.response(streamed, caller, frames)


@router.get("/checkpoints")
async def get_checkpoints(run: WebRun, pages: Pages, events: Events) -> Response:
    """Show the checkpoints that there are, the best one marked; those that retention deleted are
    folded away."""
    found = await checkpoints.all_checkpoints(events, run.id)
    deleted = [each for each in found if each.state == "deleted"]
    kept = [each for each in found if each.state != "deleted"]
    best, _ = choose(kept, run.id, run.stored_spec, "best")
    return await pages.page(
        "checkpoints.html",
        run,
        checkpoints=tuple(reversed(kept[-_MOST_CHECKPOINTS:])),
        deleted=tuple(reversed(deleted[-_MOST_CHECKPOINTS:])),
        best=best,
        best_metric=(run.stored_spec.best_by or ("",))[0],
        num_older=sum(max(0, len(each) - _MOST_CHECKPOINTS) for each in (kept, deleted)),
        may_verify=pages.caller.may("submitter"),
    )


@router.get("/checkpoints/{step}/archive")
async def get_archive(
    run: WebRun,
    events: Events,
    storage: TheStorage,
    streamed: Streams,
    caller: WebCaller,
    step: checkpoints.Which,
) -> StreamingResponse:
    return await checkpoints.get_archive(run, events, storage, streamed, caller, step)


@router.post("/checkpoints/{step}/verify")
async def post_verify(
    run: ControlledWebRun,
    events: Events,
    storage: TheStorage,
    gate: Gate,
    step: checkpoints.Which,
    _form: CheckedForm,
) -> Response:
    checkpoint = await checkpoints.verify_checkpoint(run, events, storage, gate, step)
    return RedirectResponse(f"/runs/{run.id}/checkpoints#step-{checkpoint.step}", 303)


@router.post("/notes")
async def post_notes(run: ControlledWebRun, control: Control, form: CheckedForm) -> Response:
    text = form.get("notes", "").replace("\r\n", "\n")
    if not is_sayable(text):
        raise invalid_request("notes", msg="contain a character that cannot be stored; remove it")
    try:
        change = RunChange(notes=text)
    except ValidationError as exc:
        raise invalid_request(
            "notes", msg=f"are too long; write at most {MOST_NOTES_CHARS} characters"
        ) from exc
    await control.change(run, change)
    return RedirectResponse(f"/runs/{run.id}", 303)


@router.post("/delete")
async def post_delete(run: ControlledWebRun, control: Control, _form: CheckedForm) -> Response:
    await control.delete(run)
    return RedirectResponse("/runs", 303)


_ACTIONS: Final = {
    "pause": RunActions.pause,
    "resume": RunActions.resume,
    "cancel": RunActions.cancel,
}


@router.post("/{action}")
async def post_action(
    run: ControlledWebRun,
    control: Control,
    action: Literal["pause", "resume", "cancel"],
    _form: CheckedForm,
) -> Response:
    await _ACTIONS[action](control, run)
    return RedirectResponse(f"/runs/{run.id}", 303)


# ---------------------------------------------------------------- lanes

# What every rank did over time, from a run's history: one lane per rank.

KINDS: Final = frozenset(
    {
        EventKind.STATUS,
        EventKind.SUBMISSION_STARTED,
        EventKind.ATTEMPT_STARTED,
        EventKind.TRAINING_STARTED,
        EventKind.FAILURE,
        EventKind.ATTEMPT_ENDED,
        EventKind.FINISHED,
    }
)
MOST_RANKS: Final = 64
MOST_SEGMENTS: Final = 4000

Activity = Literal["starting", "training", "waiting"]
ACTIVITY_WORDS: Final[dict[Activity, str]] = {
    "starting": "starting",
    "training": "training",
    "waiting": "stopped by a failure, not yet detected",
}


@dataclass(frozen=True)
class Segment:
    """What a rank did from ``start`` to ``end`` (unix seconds)."""

    activity: Activity
    start: float
    end: float
    attempt: int
    node_id: str


@dataclass(frozen=True)
class Fault:
    """A failure of which this rank was the first."""

    at: float
    verdict: Verdict


@dataclass
class Lane:
    """The time of one rank."""

    rank: int
    segments: list[Segment] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


@dataclass(frozen=True)
class Lanes:
    """Lanes over a span of time (unix seconds)."""

    start: float
    end: float
    lanes: tuple[Lane, ...]
    num_ranks_left_out: int
    num_attempts_left_out: int

    def position(self, at: float) -> float:
        """Return a time as percent of the way from ``start`` to ``end``."""
        return (
            0.0
            if self.end <= self.start
            else max(0.0, min(100.0, 100 * (at - self.start) / (self.end - self.start)))
        )

    def width(self, segment: Segment) -> float:
        """Return the width in percent, at least enough to be visible."""
        return max(0.15, self.position(segment.end) - self.position(segment.start))


@dataclass
class _Attempt:
    """A worker group."""

    number: int
    started_at: float
    workers: Sequence[dict[str, Any]]
    trained_at: float | None = None
    stopped_at: float | None = None
    ended_at: float | None = None


def lanes(events: Iterable[EventRow], now: float) -> Lanes | None:
    """Return a lane for each rank that ever ran; None before the first attempt.

    Args:
        events: the newest history with the kinds in KINDS, oldest first.
        now: unix seconds; end of a group that is still running.
    """
    groups: list[_Attempt] = []
    faults: dict[int, list[Fault]] = {}
    for event in events:
        current = groups[-1] if groups and groups[-1].ended_at is None else None
        if event.kind == EventKind.ATTEMPT_STARTED:
            if current is not None:
                current.ended_at = event.at
            groups.append(_Attempt(event.attempt, event.at, event.data.get("workers") or ()))
        elif current is not None:
            _note(faults, current, event)
            if _ends(event):
                current.ended_at = event.at
    if not groups:
        return None
    if groups[-1].ended_at is None:
        groups[-1].ended_at = now
    return _framed(groups, faults, groups[-1].ended_at)


def _note(faults: dict[int, list[Fault]], current: _Attempt, event: EventRow) -> None:
    """Apply an event to the current worker group."""
    if event.kind == EventKind.TRAINING_STARTED:
        current.trained_at = event.at
    elif event.kind == EventKind.FAILURE:
        current.stopped_at = max(current.started_at, event.at - (event.data.get("detect_s") or 0.0))
        rank = event.data.get("first_rank")
        if rank is not None:
            fault = Fault(current.stopped_at, Failure.of(event).verdict)
            faults.setdefault(int(rank), []).append(fault)


def _ends(event: EventRow) -> bool:
    if event.kind == EventKind.STATUS:
        return event.data["to"] == RunStatus.PAUSED or RunStatus(event.data["to"]).terminal
    return event.kind in (EventKind.ATTEMPT_ENDED, EventKind.SUBMISSION_STARTED, EventKind.FINISHED)


def _parts(group: _Attempt) -> list[tuple[Activity, float, float]]:
    """Return what the ranks of a group did, from when until when."""
    end = max(group.ended_at or 0.0, group.started_at)
    stopped = min(group.stopped_at or end, end)
    trained = min(group.trained_at or stopped, stopped)
    parts: list[tuple[Activity, float, float]] = [
        ("starting", group.started_at, trained),
        ("training", trained, stopped),
        ("waiting", stopped, end),
    ]
    return [part for part in parts if part[2] > part[1]]


def _framed(groups: Sequence[_Attempt], faults: dict[int, list[Fault]], end: float) -> Lanes:
    """Return the lanes of the lowest ranks and of those that failed first, with as many of the
    newest attempts as fit: of thousands of ranks few are drawn."""
    ranks = sorted({int(each["rank"]) for group in groups for each in group.workers} | {*faults})
    lanes = {
        rank: Lane(rank, faults=faults.get(rank, []))
        for index, rank in enumerate(ranks)
        if index < MOST_RANKS or rank in faults
    }
    for group in groups:
        parts = _parts(group)
        for worker in group.workers:
            if (lane := lanes.get(int(worker["rank"]))) is not None:
                node = str(worker["node_id"])
                lane.segments += [Segment(*part, group.number, node) for part in parts]
    drawn = tuple(lanes.values())
    sizes = Counter(segment.attempt for lane in drawn for segment in lane.segments)
    shown: set[int] = set()
    room = MOST_SEGMENTS
    for number in reversed([group.number for group in groups]):
        room -= sizes[number]
        if room < 0 and shown:
            break
        shown.add(number)
    for lane in drawn:
        lane.segments = [segment for segment in lane.segments if segment.attempt in shown]
    start = min((segment.start for lane in drawn for segment in lane.segments), default=end)
    for lane in drawn:
        lane.faults = [fault for fault in lane.faults if fault.at >= start]
    return Lanes(start, max(end, start), drawn, len(ranks) - len(drawn), min(shown) - 1)
