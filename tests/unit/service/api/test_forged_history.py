"""A run whose code writes what it likes into its own journal: every page and answer about it works,
among them the page with the button that cancels it, and the rest of its history is there."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from everstep.wire.alerts import AlertRequest
from everstep.wire.events import EventKind
from service.annexes.alerts.store import AlertStore, DeliveryStore
from service.annexes.nodes.store import NodeMarkStore
from service.figures import RunFigures
from service.model.rows import EventRow
from service.projections import checkpoints, handlers
from service.projections.handlers import folded
from service.submission_rules.allowed import NotifyRule
from tests.support.api_service import NOON, ApiService, Journal
from tests.support.page_text import fail
from tests.support.projected_events import committed, event, run_row
from tests.support.web_browser import Browser

SUBJECTS = ("failures", "attempts", "goodput", "stragglers", "samples", "metrics", "checkpoints")
LISTS = ("drills", "profiles", "stacks", "rehearsal", "replays", "events?limit=500")
PAGES = ("", "/events", "/checkpoints", "/curves.json", "/spec")
FORGED: dict[str, tuple[EventKind, dict[str, Any]]] = {
    "a step that is a dict": (
        EventKind.EVALUATED,
        {"step": {"a": 1}, "epoch": 0, "metrics": {"loss": 0.3}},
    ),
    "a number of ranks for the ranks": (EventKind.RANK_TIMES, {"step_s": 0.1, "ranks": 1e18}),
    "workers that are a number": (EventKind.ATTEMPT_STARTED, {"world_size": 2, "workers": 2**31}),
    "a cause that is a dict": (EventKind.ATTEMPT_ENDED, {"cause": {"0": 0}}),
    "a best value without a metric": (
        EventKind.RESTORED,
        {"step": 0, "epoch": 0, "source": "process", "checkpoint": None, "rejected": []}
        | {"best": {"metric": None, "value": 0.1, "step": 3}},
    ),
    "kernels that are a number": (
        EventKind.NUMERICS_CHANGED,
        {"ranks": [{"rank": 0, "differs": ["the loss"], "kernels": 10**30}]},
    ),
    "a drill without an id": (EventKind.DRILL_STARTED, {"rank": 1, "node_id": "n", "pid": 5}),
    "a drill of no kind": (EventKind.DRILL_REQUESTED, {"id": "x"}),
    "a reason that is a list": (EventKind.STATUS, {"from": 1e18, "to": "SUCCEEDED", "reason": [0]}),
    "ids that are dicts": (EventKind.STACKS, {"id": {"0": 0}, "ranks": 5}),
}


@pytest.mark.parametrize("what", [*FORGED, "evidence that is a text"])
async def test_every_page_works_and_the_rest_is_there(api: ApiService, what: str) -> None:
    browser = await Browser.logged_in(api, api.token("admin"))
    run_id, journal = await api.running()
    if what in FORGED:
        kind, data = FORGED[what]
        forged = journal.event(kind, **data)
    else:
        forged = fail(journal, exception="KeyError: 'a'", evidence={"pairs": "xxxx"})
    api.apply(run_id, [forged, journal.steps(2)])
    answers = [
        await api.http.get(path)
        for path in (
            f"/v1/runs/{run_id}",
            *(f"/v1/runs/{run_id}/{name}" for name in (*SUBJECTS, *LISTS)),
            *("/v1/runs", "/v1/goodput", "/v1/cluster"),
        )
    ]
    answers += [
        await browser.http.get(path)
        for path in (*(f"/runs/{run_id}{name}" for name in PAGES), "/runs", "/queue", "/cluster")
    ]
    assert {str(each.url): each.status_code for each in answers if each.status_code != 200} == {}
    found = (await api.get(f"/v1/runs/{run_id}/attempts"))["items"]
    assert [(each["world_size"], len(each["workers"])) for each in found][:1] == [(2, 2)]


async def test_no_history_is_folded_in_the_event_loop_or_while_the_database_is_locked(
    api: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A history may be so long, or so forged, that its folds take seconds."""
    places: set[str] = set()
    fits = handlers._fits

    def watched(*given: Any) -> bool:
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            places.add("event loop")
        if api.database._writer.locked():
            places.add("write transaction")
        places.add("folded")
        return fits(*given)

    monkeypatch.setattr(handlers, "_fits", watched)
    api.set(notify=NotifyRule(frozenset({"https://hooks.example.org"}), "s" * 32))
    browser = await Browser.logged_in(api, api.token("admin"))
    alert = {"name": "a", "format": "json", "url": "https://hooks.example.org/x"}
    for when in ("straggler", "finished"):
        AlertStore(api.database, api.clock).create(AlertRequest(**alert, when=when), "tok")
    run_id, journal = await api.running(notify={"url": "https://hooks.example.org"})
    forged = fail(journal, exception="KeyError: 'a'", evidence={"pairs": "xxxx"})
    api.apply(run_id, [forged, *(journal.event(kind, **data) for kind, data in FORGED.values())])
    for name in (*SUBJECTS, *LISTS):
        await api.http.get(f"/v1/runs/{run_id}/{name}")
    for name in PAGES:
        await browser.http.get(f"/runs/{run_id}{name}")
    assert places == {"folded"}
    places.clear()
    ended = journal.event(EventKind.FINISHED, outcome="failed", reason=None, step=2)
    api.apply(run_id, [ended])
    assert (await api.get(f"/v1/runs/{run_id}"))["status"] == "FAILED"
    due = DeliveryStore(api.database, api.clock).due()
    assert places == set() and [alert and alert.when for _, alert in due] == [None, "finished"]


async def test_one_run_does_not_end_the_care_for_all_nodes(api: ApiService) -> None:
    for changed in ({"first_rank": {"a": 1}}, {"evidence": {"kind": [1]}}, {"evidence": 5}, {}):
        run_id, journal = await api.running()
        api.apply(run_id, [fail(journal, **changed)])
    found = NodeMarkStore(api.database).failures_since(0.0)
    assert [(each.run_id, each.node_id) for each in found] == [(run_id, "node-2")]


def test_figures_count_what_fits() -> None:
    figures, run = RunFigures(lambda: NOON), run_row()
    journal = Journal()
    too_much = journal.event(EventKind.CHECKPOINT_COMMITTED, size_bytes=10**400)
    figures.applied(run, [too_much, journal.steps(1)])
    assert figures.steps.labels(run.project)._value.get() == 1


def test_only_what_does_not_fit_is_left_out() -> None:
    bad = [event(EventKind.EVALUATED, step={"a": 1}, metrics={}) for _ in range(50)]
    plain = committed(10)
    del plain.data["metrics"]
    late = event(EventKind.EVALUATED, step=10, metrics=5)  # fits as long as no checkpoint needs it
    rows = [plain, *bad, committed(20), late, committed(30)]

    read: list[int] = []

    def steps(found: list[EventRow]) -> list[int]:
        read.append(len(found))
        return [each.step for each in checkpoints.checkpoints(found, {})]

    assert folded(steps, rows) == [10, 20, 30]
    read.clear()
    many = [plain] * 3000
    assert folded(steps, [*many, *[late] * 50]) == [], "within bounded time"
    assert sum(read) < 12 * len(many)
