"""Authentication: bearer tokens, roles, and the local admin token. There is no anonymous access.

Routes name the role that they need as a dependency: a caller without it is refused before the
request is checked.
"""

from __future__ import annotations

import os
import pathlib
from typing import Annotated, Final

from fastapi import Depends, Path, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from service.api.blocking import db_read
from service.api.callers import Door, Principal
from service.api.dependencies import Runs
from service.api.problems import not_found
from service.db.tokens import TokenStore
from service.model.run_rows import RunRow
from service.parts import parts_of
from storage.files.protocol import draft_beside

LOCAL_TOKEN_ID: Final = "tok_local"
METRICS_TOKEN_ID: Final = "tok_metrics"
EMBEDDED_TRUST: Final = (
    "the embedded cluster runs user code as the service's own user, so everyone who may submit a "
    "run is effectively an administrator. For people whom you trust less, use a cluster that runs "
    "as another user: --ray-address (docs/security.md)"
)
bearer = HTTPBearer(
    auto_error=False,
    description="A token, for example from `$EVERSTEP_HOME/token` on the service's machine.",
)


async def authenticated(request: Request) -> None:
    """Find the caller of a request, for ``Caller``. Raises 401 without a valid token, 429 above the
    rate limit."""
    given = await bearer(request)
    secret = "" if given is None else given.credentials
    request.state.caller = await parts_of(request)[Door].by_token(request, secret)


async def principal(
    request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]
) -> Principal:
    """Return the caller, whom the route has authenticated."""
    caller: Principal = request.state.caller
    return caller


Caller = Annotated[Principal, Depends(principal)]


async def submitter(caller: Caller) -> Principal:
    """Return the caller. Raises 403 for viewers."""
    caller.require("submitter")
    return caller


Submitter = Annotated[Principal, Depends(submitter)]


async def administrator(caller: Caller) -> Principal:
    """Return the caller. Raises 403 if it is not an administrator."""
    caller.require("admin")
    return caller


Administrator = Annotated[Principal, Depends(administrator)]


RunPath = Annotated[str, Path(description="The run's id: `run_…`.")]


async def visible_run(run_id: RunPath, runs: Runs, caller: Caller) -> RunRow:
    """Return the run in the path. Runs of other projects do not exist for this caller: 404."""
    run = await db_read(runs.get, run_id)
    if run is None or not caller.reaches(run.project):
        raise not_found(f"run {run_id} does not exist")
    return run


VisibleRun = Annotated[RunRow, Depends(visible_run)]


async def controlled_run(run: VisibleRun, caller: Caller) -> RunRow:
    """Return the run in the path, for an action on it. Raises 403 for viewers."""
    caller.require("submitter")
    return run


ControlledRun = Annotated[RunRow, Depends(controlled_run)]


def ensure_local_token(
    tokens: TokenStore, path: pathlib.Path, token_id: str = LOCAL_TOKEN_ID
) -> str:
    """Ensure that ``path`` contains a valid admin token, readable only by its owner; return its id.

    If the file is missing or has no valid token, a new token is created; the old one with id
    ``token_id`` is revoked.
    """
    try:
        secret = path.read_text().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        secret = ""
    found = tokens.find(secret) if secret else None
    if found is not None and found.role == "admin":
        path.chmod(0o600)
        return found.id
    _, secret = tokens.create("local admin", "admin", None, token_id=token_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    with draft_beside(path) as draft:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(secret + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        pathlib.Path(draft).replace(path)
    return token_id


def ensure_metrics_token(tokens: TokenStore, secret: str) -> None:
    """Make ``secret`` the metrics token: a viewer with access to all projects. Earlier ones are
    revoked."""
    found = tokens.find(secret)
    if found is None or found.role != "viewer":
        tokens.put(secret, "metrics", "viewer", None, None, METRICS_TOKEN_ID)
