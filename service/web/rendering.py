"""Render pages: escaping templates, headers that forbid inline scripts, and error pages."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

import structlog
from fastapi import Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from everstep.text import failure
from everstep.text import words as cli_words
from everstep.wire import Failure, GoodputBuckets, ReasonCode, Run, RunStatus
from everstep.wire.events import PREFIX, EventKind, system_figure, system_name
from service.annex import Annexes, PageLink
from service.api.callers import Principal
from service.api.problems import ApiProblem, as_problem
from service.db.runs import RunStore
from service.model.rows import EventRow
from service.parts import parts_of
from service.web.assets import asset_url
from service.web.session import CSRF_FIELD, cookie_of, csrf_token

# ---------------------------------------------------------------- formatting

# Formatting for templates: times, shares, statuses, buckets.

STATUS_GROUPS: Final[Mapping[str, tuple[RunStatus, ...]]] = MappingProxyType(
    {
        "active": (
            RunStatus.QUEUED,
            RunStatus.STARTING,
            RunStatus.RUNNING,
            RunStatus.RECOVERING,
            RunStatus.STOPPING,
        ),
        "paused": (RunStatus.PAUSED,),
        "succeeded": (RunStatus.SUCCEEDED,),
        "failed": (RunStatus.FAILED,),
        "cancelled": (RunStatus.CANCELLED,),
    }
)
"""Statuses of each filter of the list of runs."""

BUCKET_WORDS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "productive": ("Productive", "training that counts"),
        "rework": ("Rework", "steps repeated after a failure"),
        "checkpoint_stall": ("Saving", "training waited for a checkpoint"),
        "detecting": ("Detecting", "from a failure to its detection"),
        "unreported": (
            "Unreported",
            "from the last report to a failure; a script may have kept it",
        ),
        "restarting": ("Restarting", "from detection until training goes on"),
        "starting": ("Starting", "from the submission until training begins"),
        "queued": ("Queued", "waiting for room on the cluster"),
        "paused": ("Paused", "as requested"),
        "idle": ("Idle", "no ranks: waiting for nodes"),
    }
)
"""Title and meaning of each bucket of the goodput ledger, in display order."""

GOODPUT_AFTER_S: Final = 60.0
_UNKNOWN: Final = "\N{EN DASH}"


def percent(share: float | None) -> str:
    """Return text such as ``97.3 %``; a dash if unknown."""
    return _UNKNOWN if share is None else f"{100 * share:.1f} %"


def early_goodput(run: Run) -> str:
    """Return the goodput of a run in a list; a dash in its first minute, whose start would look
    like waste."""
    is_young = run.progress is not None and run.progress.elapsed_s < GOODPUT_AFTER_S
    return percent(None if is_young else run.goodput)


def clock(at: datetime | None) -> str:
    """Return a time such as ``2026-01-02 03:04:05`` in UTC; a dash if unknown."""
    return _UNKNOWN if at is None else f"{at:%Y-%m-%d %H:%M:%S}"


def span(seconds: float) -> str:
    """Return a short duration for lists: ``12 s``, ``4 min``, ``3 h 12 min``, ``2 d 5 h``."""
    if seconds < 60:
        return f"{max(0, int(seconds))} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min"
    return cli_words.duration(seconds)


def headline(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the two most informative metrics of a run: its loss, and a validation metric other
    than the loss."""
    names = [name for name in metrics if name == "loss"][:1]
    validation = sorted(
        (name for name in metrics if name.startswith("val_")),
        key=lambda name: (name == "val_loss", name),
    )
    return [(name, metrics[name]) for name in (names + validation[:1] or sorted(metrics)[:2])]


def progress_share(step: int, total_steps: int | None) -> float:
    """Return the progress from 0 to 1."""
    return min(1.0, step / total_steps) if total_steps else 0.0


def bucket_shares(buckets: GoodputBuckets, wall_s: float) -> list[dict[str, Any]]:
    """Return each non-empty bucket: start and width of its part of the bar (0 to 1), and its
    seconds."""
    found, start = [], 0.0
    for name, (title, meaning) in BUCKET_WORDS.items():
        seconds = getattr(buckets, name)
        share = seconds / wall_s if wall_s else 0.0
        if seconds > 0:
            found.append(
                {
                    "name": name,
                    "title": title,
                    "meaning": meaning,
                    "seconds": seconds,
                    "start": start,
                    "share": share,
                }
            )
        start += share
    return found


# ---------------------------------------------------------------- rendering

logger = structlog.get_logger(__name__)

THEME_COOKIE: Final = "everstep_theme"
_COMPRESS_BYTES: Final = 1000
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src "
    "'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_GLOBALS: Final = {
    "asset": asset_url,
    "csrf_field": CSRF_FIELD,
    "headline": cli_words.headline,
}
_FILTERS: Final = {
    "count": cli_words.count,
    "first_start": cli_words.first_start,
    "lost": failure.of_run,
    "unit": failure.unit,
    "has_no_steps": cli_words.has_no_steps,
    "duration": cli_words.duration,
    "span": span,
    "size": cli_words.size,
    "number": cli_words.number,
    "speed": cli_words.speed,
    "percent": percent,
    "early_goodput": early_goodput,
    "clock": clock,
    "headline": headline,
    "without_colours": cli_words.without_colours,
}
_NAVIGATION: Final = (
    PageLink("/runs", "Runs", 10),
    PageLink("/compare", "Compare", 30),
    PageLink("/queue", "Queue", 40),
    PageLink("/cluster", "Cluster", 50),
    PageLink("/new", "New run", 70, "submitter"),
    PageLink("/docs", "API", 80),
)


@cache
def _environment(annexes: Annexes) -> Environment:
    """Return the templates of the core and of these annexes."""
    packages = ["service.web", *(each.package for each in annexes if each.package is not None)]
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    links = (*_NAVIGATION, *(link for annex in annexes for link in annex.navigation))
    environment.globals |= {
        **_GLOBALS,
        "navigation": sorted(links, key=lambda link: link.place),
        "slot": lambda name: [each.slots[name] for each in annexes if name in each.slots],
    }
    environment.filters |= _FILTERS
    return environment


def page(
    request: Request, template: str, caller: Principal | None, /, status: int = 200, **values: Any
) -> HTMLResponse:
    """Render a page from its template.

    Args:
        request: the request.
        template: file below ``templates/``.
        caller: who is logged in; None for nobody.
        status: HTTP status.
        values: further variables of the template.
    """
    parts = parts_of(request)
    annexes = parts[Annexes]
    theme = request.cookies.get(THEME_COOKIE)
    for annex in annexes:
        if annex.page_values is not None:
            values = {**annex.page_values(parts), **values}
    text = (
        _environment(annexes)
        .get_template(template)
        .render(
            caller=caller,
            csrf=partial(csrf_token, cookie_of(request)),
            theme=theme if theme in ("light", "dark") else "auto",
            now=datetime.fromtimestamp(parts[RunStore].clock(), UTC),
            path=request.url.path,
            **values,
        )
    )
    return HTMLResponse(text.encode(errors="replace"), status)


class PageRoute(APIRoute):
    """A route for browsers: exceptions become error pages, and every response gets the headers of
    pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                response = await handle(request)
            except Exception as exc:
                response = _problem_page(request, as_problem(exc))
            return _finished(request, response)

        return answer


def problem_page(request: Request, problem: ApiProblem) -> Response:
    """Return the page for a request that no route serves."""
    return _finished(request, _problem_page(request, problem))


def _problem_page(request: Request, problem: ApiProblem) -> Response:
    if problem.status == 500:
        logger.exception("page_failed", path=request.url.path)
    if problem.status == 401:
        return _to_log_in(request)
    caller = getattr(request.state, "caller", None)
    response = page(
        request, "problem.html", caller, problem.status, problem=problem, title=_title(problem)
    )
    response.headers.update(problem.headers)
    return response


def _title(problem: ApiProblem) -> str:
    return {
        403: "Not allowed",
        404: "Not found",
        405: "Not possible",
        409: "Not possible now",
        422: "Invalid request",
        503: "Unavailable",
    }.get(problem.status, "The service failed" if problem.status >= 500 else "Not possible")


def _to_log_in(request: Request) -> Response:
    """Redirect to the log-in page and back. Scripts get the status, htmx its own header."""
    if (
        request.method == "GET"
        and "text/html" in request.headers.get("accept", "")
        and "hx-request" not in request.headers
    ):
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"/login?next={quote(target, safe='')}", 303)
    if request.method == "POST":
        return RedirectResponse("/login", 303)
    return Response(status_code=401, headers={"HX-Redirect": "/login"})


def _finished(request: Request, response: Response) -> Response:
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    body = getattr(response, "body", b"")
    may_compress = "gzip" in request.headers.get("accept-encoding", "")
    if len(body) >= _COMPRESS_BYTES and may_compress and "content-encoding" not in response.headers:
        response.body = gzip.compress(body, 5, mtime=0)
        response.headers["Content-Encoding"] = "gzip"
        response.headers["Content-Length"] = str(len(response.body))
        response.headers.add_vary_header("Accept-Encoding")
    return response


# ---------------------------------------------------------------- curves

# Curves of a run's metrics, grouped into charts, with marks for its restarts.

MARK_KINDS: Final = frozenset({EventKind.STATUS, EventKind.FAILURE, EventKind.RESTORED})

_FIRST: Final = ("loss", "accuracy", "perplexity")
_LAST: Final = "data_wait"

_MOST_MARKS: Final = 200
_PAUSE: Final = "resumed after a pause"


def charts(names: Iterable[str], judged: str = "") -> list[dict[str, Any]]:
    """Return charts for these metrics as ``[{title, names}]``: training and validation of a metric
    together, the one that the run is judged by first, then the loss."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: (name.startswith(PREFIX), name)):
        groups.setdefault(name.removeprefix(PREFIX) or name, []).append(name)

    first = (judged.removeprefix(PREFIX), *_FIRST)

    def order(title: str) -> tuple[int, str]:
        place = first.index(title) if title in first else len(first)
        return place + (title == _LAST), title

    return [{"title": title, "names": groups[title]} for title in sorted(groups, key=order)]


_SYSTEM_TITLES: Final = {
    "cpu_cores": "CPU",
    "rss_bytes": "Memory",
    "net_in_bytes_per_s": "Network in, of the host",
    "net_out_bytes_per_s": "Network out, of the host",
    "gpu_busy_percent": "GPU use",
    "gpu_used_bytes": "GPU memory",
    "gpu_power_w": "GPU power",
    "gpu_celsius": "GPU temperature",
}

_MOST_LINES: Final = 8


def system_charts(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return charts of what ranks took of their hosts, a line for each of the first ranks."""
    found: dict[str, list[int]] = {}
    for name in names:
        figure = system_figure(name)
        if figure is not None:
            found.setdefault(figure[0], []).append(figure[1])
    return [
        {
            "title": title,
            "names": [system_name(figure, rank) for rank in ranks],
            "labels": [f"rank {rank}" for rank in ranks],
            "figure": figure,
        }
        for figure, title in _SYSTEM_TITLES.items()
        if (ranks := sorted(found.get(figure, ()))[:_MOST_LINES])
    ]


def marks(events: Sequence[EventRow]) -> list[dict[str, Any]]:
    """Return restarts, newest last: where the run resumed (step, unix seconds) after which failure,
    after a preemption, or after a pause.

    Args:
        events: history with the kinds in MARK_KINDS.
    """
    found, why = [], ""
    attempts: set[int] = set()
    for event in events:
        if event.kind == EventKind.FAILURE:
            why = failure.who(Failure.of(event))
        elif event.kind == EventKind.STATUS:
            if event.data.get("to") == RunStatus.PAUSED:
                code = (event.data.get("reason") or {}).get("code")
                why = "preempted" if code == ReasonCode.PREEMPTED_BY_PRIORITY else _PAUSE
        elif event.attempt not in attempts:
            if (attempts or event.attempt > 1) and event.data.get("step") is not None:
                label = f"attempt {event.attempt}" + (f": {why}" if why else "")
                found.append(
                    {
                        "step": event.data["step"],
                        "at": event.at,
                        "attempt": event.attempt,
                        "label": label,
                        "sign": "▶ after a pause" if why == _PAUSE else f"↻ {event.attempt}",
                    }
                )
            attempts.add(event.attempt)
            why = ""
    return found[-_MOST_MARKS:]
