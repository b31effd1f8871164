"""Ray's dashboard under this service's log-in: ``/ray/``.

Its files come from this service, its data from the cluster. The cluster's token is added here and
never reaches a browser. Only requests of one table are passed on, and none that starts, stops or
changes a job (``relay``).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import anyio.to_thread
import httpx
import structlog
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from service.annexes.ray_dashboard.relay import (
    PROFILE_TIMEOUT_S,
    READ_TIMEOUT_S,
    RayAccess,
    RayDashboard,
    access_to,
    limited,
)
from service.api.auth import visible_run
from service.api.blocking import db_write
from service.api.callers import Principal
from service.api.dependencies import AuditLog, Ray, Runs, Streams
from service.api.problems import ApiProblem, not_found, unavailable
from service.api.streams import Followers
from service.cluster.ray_jobs import JobNotFound, RayError, RayUnavailable
from service.db.audit import AuditedCall, AuditStore
from service.parts import part
from service.web.assets import Asset, asset_response, asset_url, read_asset
from service.web.rendering import PageRoute
from service.web.session import WebCaller, host_of

router: Final = APIRouter(route_class=PageRoute, include_in_schema=False)
logger = structlog.get_logger(__name__)

_PAGE_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self'; frame-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
"""Ray's own styles are inline. Frames are Grafana's, if it shares this service's name."""

_POLICIES: Final[Mapping[RayAccess, str]] = {
    RayAccess.READ: "sandbox; default-src 'none'",
    # A flame graph has scripts of its own. They run in an origin of their own, without the log-in.
    RayAccess.PROFILE: "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:",
}
"""What a browser may do with an answer of the cluster if it is opened as a page."""

_ASKED: Final = ("accept", "accept-encoding")

_ANSWERED: Final = ("content-type", "content-length", "content-encoding", "content-disposition")


async def ray_caller(caller: WebCaller) -> Principal:
    """Return who is logged in, if the person may see the runs of all projects. Raises 403."""
    if caller.project is not None:
        raise ApiProblem(
            403,
            "forbidden",
            "Ray's dashboard shows the runs of all projects, and your token is for "
            f"{caller.project!r} only. The pages of a run show its ranks, logs and profiles; for "
            "Ray's dashboard ask an administrator for a token that reads all projects "
            "(`everstep token create NAME --role viewer --all-projects`).",
        )
    return caller


RayCaller = Annotated[Principal, Depends(ray_caller)]


Dashboard = Annotated[RayDashboard, part(RayDashboard)]


def _ray_unavailable(exc: RayError) -> ApiProblem:
    return unavailable(
        "ray_unavailable",
        f"{exc}. Runs continue if their nodes are alive; reload this page in a moment.",
    )


@router.get("/ray")
async def get_ray() -> Response:
    return RedirectResponse("/ray/", 303)


@router.get("/ray/")
async def get_index(dashboard: Dashboard, _caller: RayCaller) -> Response:
    """Show Ray's dashboard, if Ray responds."""
    try:
        await dashboard.check()
    except RayUnavailable as exc:
        raise _ray_unavailable(exc) from exc
    return Response(
        index(),
        media_type="text/html; charset=utf-8",
        headers={"Content-Security-Policy": _PAGE_POLICY},
    )


@router.get("/ray/favicon.ico")
async def get_icon(request: Request) -> Response:
    return await _file(request, "favicon.ico", is_final=False)


@router.get("/ray/static/{name:path}")
async def get_static(name: str, request: Request) -> Response:
    """Return a file, whose name changes with its content. Everyone may read it: it is Ray's."""
    return await _file(request, f"static/{name}", is_final=True)


async def _file(request: Request, name: str, *, is_final: bool) -> Response:
    found = await anyio.to_thread.run_sync(ray_file, name)
    return asset_response(found, request, is_final=is_final)


@router.get("/ray/api/authentication_mode")
async def get_authentication_mode(_caller: RayCaller) -> Response:
    """Tell Ray's page that no token is needed: the token is added here."""
    return JSONResponse({"authentication_mode": "disabled"})


@router.get("/ray-jobs/{job_id}")
async def get_run_of_job(job_id: str, ray: Ray, runs: Runs, caller: RayCaller) -> Response:
    """Redirect to the run of a Ray job, which its metadata names."""
    try:
        job = await ray.job(job_id)
    except JobNotFound as exc:
        raise not_found(f"Ray knows no job {job_id[:80]!r}") from exc
    except RayError as exc:
        raise _ray_unavailable(exc) from exc
    if "run_id" not in job.metadata:
        raise not_found(f"Ray job {job_id[:80]!r} does not belong to a run of this service")
    run = await visible_run(job.metadata["run_id"], runs, caller)
    return RedirectResponse(f"/runs/{run.id}", 303)


@router.api_route("/ray/{path:path}", methods=["GET", "HEAD"])
async def get_data(
    path: str,
    request: Request,
    dashboard: Dashboard,
    log: AuditLog,
    streamed: Streams,
    caller: RayCaller,
) -> Response:
    """Pass a request on to Ray, and its answer back as it comes."""
    access = access_to(path)
    if access is None:
        raise not_found(f"/{path[:80]} of Ray's dashboard is not passed on")
    _check_origin(request, access)
    if access is RayAccess.PROFILE:
        caller.require("submitter")
    headers = {name: request.headers.get(name, "") for name in _ASKED}
    timeout_s = PROFILE_TIMEOUT_S if access is RayAccess.PROFILE else READ_TIMEOUT_S
    try:
        upstream = await dashboard.open(request.method, path, request.url.query, headers, timeout_s)
    except RayUnavailable as exc:
        raise _ray_unavailable(exc) from exc
    if access is RayAccess.PROFILE:
        await _record(request, log, caller, upstream.status_code)
    return RelayedResponse(upstream, streamed, caller, _POLICIES[access])


def _check_origin(request: Request, access: RayAccess) -> None:
    """Raise 403 for a request that another site made. A link from elsewhere may open data, and may
    not start a profile."""
    headers, host = request.headers, request.headers.get("host", "")
    site = headers.get("sec-fetch-site")
    if site is None and access is RayAccess.PROFILE:
        own = host_of(headers.get("referer", "")) == host
    else:
        own = site in (None, "same-origin", "none") or (
            access is RayAccess.READ and headers.get("sec-fetch-mode") == "navigate"
        )
    if not own or host_of(headers.get("origin", f"//{host}")) != host:
        raise ApiProblem(
            403,
            "foreign_origin",
            "This request came from another site, or by a plain connection without its origin; "
            "nothing was done. Open Ray's dashboard here and try again.",
        )


async def _record(request: Request, log: AuditStore, caller: Principal, status: int) -> None:
    """Add a profile to the audit log. It is a GET request, which is not audited otherwise."""
    entry = AuditedCall(
        request.method,
        f"{request.url.path}?{request.url.query}",
        request.client.host if request.client else None,
        caller.token_id,
        caller.name,
        caller.role,
        status=status,
    )
    await db_write(log.complete, entry)


class RelayedResponse(StreamingResponse):
    """An answer of Ray, passed on as it comes until its caller's log-in ends."""

    def __init__(
        self, upstream: httpx.Response, streamed: Followers, caller: Principal, policy: str
    ) -> None:
        passed = {name: upstream.headers[name] for name in _ANSWERED if name in upstream.headers}
        super().__init__(
            streamed.confirmed(caller, limited(upstream)),
            upstream.status_code,
            {
                **passed,
                "Content-Security-Policy": policy,
                "Cross-Origin-Resource-Policy": "same-origin",
            },
        )
        self._upstream = upstream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except RayUnavailable as exc:  # the client sees that the answer is not complete
            logger.warning("ray_answer_broke_off", path=scope["path"], problem=str(exc))
        finally:
            await self._upstream.aclose()


# ---------------------------------------------------------------- ray files

# The files of Ray's dashboard, from the ``ray`` package of this service's own environment.
#
# They are not read from the cluster: code of a run can change what the cluster's head serves, and a
# script from there would act on this service's pages as the person who is logged in.

_FOLDER: Final = Path("dashboard/client/build")

_SERVED: Final = frozenset({".css", ".ico", ".js", ".svg", ".woff", ".woff2"})


@cache
def _folder() -> Path | None:
    """Return the folder with the dashboard's files; None if Ray is not installed here. Ray is not
    imported."""
    spec = find_spec("ray")
    found = [Path(place) / _FOLDER for place in (spec and spec.submodule_search_locations) or ()]
    return next((folder for folder in found if (folder / "index.html").is_file()), None)


@cache
def _names() -> frozenset[str]:
    """Return the names of all files that are served. Other paths are never opened."""
    folder = _folder()
    if folder is None:
        return frozenset()
    files = [folder / "favicon.ico", *(folder / "static").rglob("*")]
    return frozenset(
        path.relative_to(folder).as_posix() for path in files if path.suffix in _SERVED
    )


@cache
def ray_file(name: str) -> Asset:
    """Return a file of Ray's dashboard. Raises 404."""
    folder = _folder()
    if folder is None or name not in _names():
        raise not_found(f"file {name[:80]!r} does not exist")
    return read_asset(folder / name)


@cache
def index() -> bytes:
    """Return the page of Ray's dashboard, with a link back to Everstep's pages. Raises 503."""
    folder = _folder()
    if folder is None:
        raise unavailable(
            "ray_unavailable",
            "the files of Ray's dashboard are not installed on this machine; install "
            "'everstep[server]'",
        )
    text = (folder / "index.html").read_text()
    way_back = (
        f'<link rel="stylesheet" href="{asset_url("ray.css")}">'
        f'<script defer src="{asset_url("ray.js")}"></script>'
    )
    return text.replace("</head>", f"{way_back}</head>", 1).encode()
