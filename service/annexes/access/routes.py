"""Routes of projects, tokens, the audit log and sessions; but for sessions, for administrators."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Path, Query, Response

from everstep.wire import Page
from everstep.wire.team import (
    AuditEntry,
    NewToken,
    Project,
    ProjectRequest,
    ProjectUsage,
    Session,
    Token,
    TokenRequest,
)
from service.api.answers import Cursor, Limit, answer_of, page_of, position
from service.api.auth import EMBEDDED_TRUST, Administrator, Caller
from service.api.blocking import db_read, db_write
from service.api.bodies import ApiRouter, Parsed, example
from service.api.callers import Principal
from service.api.dependencies import AuditLog, Projects, Sessions, TheSettings, Tokens
from service.api.openapi import CreateProject, followed_by, problem_answers
from service.api.problems import invalid_request, not_found
from service.db.audit import note_target
from service.db.projects import ProjectLoad, ProjectStore, quotas_of
from service.db.tokens import Holder
from service.model.rows import ProjectRow

ProjectBody = Annotated[
    ProjectRequest,
    Parsed(),
    example({"name": "vision", "quotas": {"max_workers": 8, "max_running": 4}}),
]
TokenBody = Annotated[
    TokenRequest, Parsed(), example({"name": "ci", "role": "submitter", "project": "vision"})
]

router: Final = ApiRouter("/v1", "administration")


ProjectPath = Annotated[str, Path(max_length=64, description="The project's name.")]
TokenPath = Annotated[str, Path(max_length=32, description="The token's id: `tok_…`.")]


# ---------------------------------------------------------------- projects


@router.post(
    "/projects",
    status_code=201,
    summary="Create a project, or set its quotas",
    responses={
        200: {"model": Project, "description": "It existed; these are its quotas now."},
        201: followed_by("project", "name", "get_project", "delete_project"),
        **problem_answers(400, 403, 413, 415, 422),
    },
)
async def put_project(
    _caller: Administrator, wanted: ProjectBody, response: Response, projects: Projects
) -> Project:
    """Replaces the project's quotas; they apply to runs that start or are submitted from now on."""
    row, is_new = await db_write(projects.put, wanted.name, wanted.quotas)
    response.status_code = 201 if is_new else 200
    return await _project(projects, row.name)


@router.get("/projects", summary="Projects", responses=problem_answers(403, 422))
async def list_projects(
    _caller: Administrator, projects: Projects, limit: Limit = 50, cursor: Cursor = None
) -> Page[Project]:
    """Every project by name, with its quotas and usage."""
    found = await db_read(projects.all)
    shown, behind = page_of(found, lambda each: (each[0].name,), cursor, limit)
    return Page(
        items=tuple(_project_answer(row, usage) for row, usage in shown), next_cursor=behind
    )


@router.get("/projects/{project}", summary="One project", responses=problem_answers(403, 404, 422))
async def get_project(_caller: Administrator, project: ProjectPath, projects: Projects) -> Project:
    return await _project(projects, project)


@router.delete(
    "/projects/{project}",
    status_code=204,
    summary="Delete a project",
    responses=problem_answers(403, 404, 409, 422),
)
async def delete_project(_caller: Administrator, project: ProjectPath, projects: Projects) -> None:
    """Only projects without runs and tokens."""
    note_target(project)
    if not await db_write(projects.delete, project):
        raise not_found(f"project {project} does not exist")


async def _project(projects: ProjectStore, name: str) -> Project:
    for row, usage in await db_read(projects.all):
        if row.name == name:
            return _project_answer(row, usage)
    raise not_found(f"project {name} does not exist")


def _project_answer(row: ProjectRow, usage: ProjectLoad) -> Project:
    return answer_of(Project, row, quotas=quotas_of(row), usage=answer_of(ProjectUsage, usage))


# ---------------------------------------------------------------- tokens


@router.post(
    "/tokens",
    status_code=201,
    summary="Create a token",
    responses={
        201: followed_by("token_id", "id", "revoke_token"),
        **problem_answers(400, 403, 413, 415, 422),
    },
)
async def create_token(
    _caller: Administrator,
    wanted: TokenBody,
    response: Response,
    tokens: Tokens,
    settings: TheSettings,
    create_project: CreateProject = False,
) -> NewToken:
    """The secret is only in this response; the service stores its hash."""
    if wanted.role == "admin" and wanted.project is not None:
        raise invalid_request(
            "project",
            msg="an admin has access to every project; omit project, or choose another role",
        )
    if wanted.all_projects and (wanted.role != "viewer" or wanted.project is not None):
        raise invalid_request(
            "all_projects",
            msg="is for a viewer without a project; an admin has access to all, and a submitter "
            "belongs to one",
        )
    if wanted.role != "admin" and wanted.project is None and not wanted.all_projects:
        also = ", or all_projects" if wanted.role == "viewer" else ""
        raise invalid_request(
            "project", msg=f"a {wanted.role} belongs to a project; set project{also}"
        )
    expires_at = None if wanted.expires_at is None else wanted.expires_at.timestamp()
    if expires_at is not None and expires_at <= tokens.clock():
        raise invalid_request("expires_at", msg="is in the past; use a future time, or omit it")
    row, secret = await db_write(
        tokens.create,
        wanted.name,
        wanted.role,
        wanted.project,
        expires_at=expires_at,
        create_project=create_project,
    )
    response.headers["Cache-Control"] = "no-store"
    warning = EMBEDDED_TRUST if settings.embedded and row.role == "submitter" else None
    return answer_of(NewToken, row, token=secret, warning=warning)


@router.get("/tokens", summary="Tokens", responses=problem_answers(403, 422))
async def list_tokens(
    _caller: Administrator, tokens: Tokens, limit: Limit = 50, cursor: Cursor = None
) -> Page[Token]:
    """Every token that is not revoked, including expired ones, oldest first; without secrets."""
    found = await db_read(tokens.valid)
    shown, behind = page_of(found, lambda row: (row.created_at, row.id), cursor, limit)
    return Page(items=tuple(answer_of(Token, row) for row in shown), next_cursor=behind)


@router.delete(
    "/tokens/{token_id}",
    status_code=204,
    summary="Revoke a token",
    responses=problem_answers(403, 404, 422),
)
async def revoke_token(_caller: Administrator, token_id: TokenPath, tokens: Tokens) -> None:
    """Effective on every replica as soon as this returns."""
    note_target(token_id)
    if not await db_write(tokens.revoke, token_id):
        raise not_found(f"token {token_id} does not exist, or is already revoked")


# ---------------------------------------------------------------- audit log


@router.get("/audit", summary="Who changed what", responses=problem_answers(403, 422))
async def list_audit(
    _caller: Administrator,
    log: AuditLog,
    token_id: Annotated[
        str | None, Query(max_length=32, description="Only calls of this token.")
    ] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[AuditEntry]:
    """Every call that changed something or was refused, newest first."""
    before = None if cursor is None else position(cursor, 0)
    found = await db_read(log.page, limit + 1, before, token_id)
    items = tuple(answer_of(AuditEntry, row) for row in found[:limit])
    return Page(items=items, next_cursor=str(items[-1].seq) if len(found) > limit else None)


# ---------------------------------------------------------------- sessions

# Routes of browser sessions: a caller's own, and for administrators everybody's.

SessionPath = Annotated[str, Path(max_length=32, description="The session's id: `ses_…`.")]


def _reached(caller: Principal) -> Holder | None:
    """Return whose sessions the caller reaches; None for everybody's."""
    return None if caller.may("admin") else caller.holder


@router.get("/sessions", summary="Log-ins of browsers", responses=problem_answers(422))
async def list_sessions(
    caller: Caller, sessions: Sessions, limit: Limit = 50, cursor: Cursor = None
) -> Page[Session]:
    """Sessions that have not ended, newest first: the caller's own, or everybody's for an
    administrator. A user's own are those of all their log-ins."""
    found = await db_read(sessions.valid, _reached(caller))
    shown, behind = page_of(found, lambda row: (-row.created_at, row.sha256), cursor, limit)
    return Page(items=tuple(answer_of(Session, row) for row in shown), next_cursor=behind)


@router.delete(
    "/sessions/{session_id}",
    status_code=204,
    summary="End a session",
    responses=problem_answers(404, 422),
)
async def revoke_session(caller: Caller, session_id: SessionPath, sessions: Sessions) -> None:
    """Effective on every replica as soon as this returns."""
    if not await db_write(sessions.end_by_id, session_id, _reached(caller)):
        raise not_found(f"session {session_id} does not exist, or has ended")
