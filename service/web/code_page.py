"""The code of a run: the files of its archive, and how they differ from another run's."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import unified_diff
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response

from service.api.auth import visible_run
from service.api.context import ApiContext, Context
from service.api.problems import not_found
from service.model.run_rows import RunRow
from service.web.compare import suggested
from service.web.rendering import PageRoute
from service.web.run_page import run_page
from service.web.session import WebCaller, WebRun
from storage.code import CodeStore, read_members
from storage.errors import StorageNotFound

router: Final = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute, include_in_schema=False)

_MOST_BYTES: Final = 200_000
"""Of a file that is shown or compared."""


@router.get("/code")
async def get_code(
    request: Request,
    run: WebRun,
    context: Context,
    caller: WebCaller,
    file: Annotated[str, Query(max_length=1000)] = "",
    against: Annotated[str, Query(max_length=64)] = "",
) -> Response:
    """Show the files of a run's code and one of them; with ``against`` what differs from the code
    of that run."""
    other = await visible_run(against.strip(), context, caller) if against.strip() else None
    mine = await _files(context, run)
    theirs = await _files(context, other) if other else mine
    if file and file not in mine | theirs:
        raise not_found(f"the code has no file {file[:200]!r}; choose one of the list")
    return await run_page(
        request,
        "code.html",
        context,
        caller,
        run,
        files=[
            (path, len(mine.get(path, b"")), _change(path, mine, theirs))
            for path in sorted(mine | theirs)
        ],
        file=file,
        text=await context.storage_call(_text, file, mine, theirs if other else None)
        if file
        else "",
        other=other,
        suggested=[
            each
            for each in await suggested(context, caller)
            if each.id != run.id and each.stored_spec.code is not None
        ],
    )


async def _files(context: ApiContext, run: RunRow) -> dict[str, bytes]:
    """Return the files of a run's archive by path. Raises 404 for a run without one."""
    archive = (run.spec.get("code") or {}).get("archive")
    if archive is None:
        raise not_found(f"run {run.id} trains a task of Everstep's own and has no code to show")

    def read() -> dict[str, bytes]:
        data = CodeStore(context.storage).read(archive)
        return {member.path: member.data for member in read_members(data)}

    try:
        return await context.storage_call(read)
    except StorageNotFound as exc:
        raise not_found(f"the storage no longer has the code of run {run.id}") from exc


def _change(path: str, mine: Mapping[str, bytes], theirs: Mapping[str, bytes]) -> str:
    if path not in theirs:
        return "only here"
    if path not in mine:
        return "only there"
    return "" if mine[path] == theirs[path] else "differs"


def _text(path: str, mine: Mapping[str, bytes], theirs: Mapping[str, bytes] | None) -> str:
    """Return a file's text, or the lines in which the other run's file differs."""
    files = [mine.get(path, b""), *([theirs.get(path, b"")] if theirs is not None else [])]
    if any(b"\0" in data or len(data) > _MOST_BYTES for data in files):
        return "binary, or too large to be shown here"
    texts = [data.decode(errors="replace") for data in files]
    if theirs is None:
        return texts[0]
    here, there = (text.splitlines() for text in texts)
    return "\n".join(unified_diff(there, here, "there", "here", lineterm="")) or "equal"
