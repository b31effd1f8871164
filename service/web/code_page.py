"""The code of a run: the files of its archive, and how they differ from another run's."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from difflib import unified_diff
from typing import Annotated, Final

from fastapi import APIRouter, Query, Response

from everstep.code import is_secret
from service.api.auth import visible_run
from service.api.blocking import long_storage_call
from service.api.dependencies import Runs
from service.api.problems import not_found
from service.model.run_rows import RunRow
from service.web.compare import suggested
from service.web.rendering import PageRoute
from service.web.run_page import Pages
from service.web.session import WebCaller, WebRun
from storage.code import CodeStore, read_members
from storage.errors import StorageNotFound
from storage.filesystem import Storage

router: Final = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute, include_in_schema=False)

_MOST_BYTES: Final = 200_000
"""Of a file that is shown or compared."""
_MOST_LINES: Final = 2_000
"""Of a file that is compared: the time grows with their square."""


@router.get("/code")
async def get_code(
    run: WebRun,
    pages: Pages,
    runs: Runs,
    caller: WebCaller,
    file: Annotated[str, Query(max_length=1000)] = "",
    against: Annotated[str, Query(max_length=64)] = "",
) -> Response:
    """Show the files of a run's code; with ``against`` which differ from the code of that run. Who
    may submit runs reads one of them, or what differs in it."""
    if file:
        caller.require("submitter")
    other = await visible_run(against.strip(), runs, caller) if against.strip() else None

    def read() -> tuple[list[tuple[str, int, str]], str]:
        mine = _Code.of(pages.storage, run, file)
        theirs = _Code.of(pages.storage, other, file) if other else mine
        paths = sorted(mine.files | theirs.files)
        if file and file not in paths:
            raise not_found(f"the code has no file {file[:200]!r}; choose one of the list")
        return [
            (path, mine.files.get(path, _NONE)[0], _change(path, mine, theirs)) for path in paths
        ], _text(file, mine, theirs if other else None)

    # Archives take memory and time: two are read at a time.
    files, text = await long_storage_call(read)
    return await pages.page(
        "code.html",
        run,
        files=files,
        file=file,
        text=text,
        may_read=caller.may("submitter"),
        other=other,
        suggested=[
            each
            for each in await suggested(runs, caller)
            if each.id != run.id and each.stored_spec.code is not None
        ],
    )


_NONE: Final = (0, b"", False)


@dataclass
class _Code:
    """What is kept of an archive."""

    files: dict[str, tuple[int, bytes, bool]] = field(default_factory=dict)
    """Path -> size in bytes, digest, and whether it is executable."""
    chosen: bytes = b""
    """Of the chosen file, so much that it is known whether it is too large."""

    @classmethod
    def of(cls, storage: Storage, run: RunRow, file: str) -> _Code:
        """Read a run's archive. Raises 404 for a run without one."""
        archive = (run.spec.get("code") or {}).get("archive")
        if archive is None:
            raise not_found(f"run {run.id} trains a task of Everstep's own and has no code to show")
        found = cls()
        try:
            for member in read_members(CodeStore(storage).read(archive)):
                digest = hashlib.sha256(member.data).digest()
                found.files[member.path] = len(member.data), digest, member.executable
                if member.path == file:
                    found.chosen = member.data[: _MOST_BYTES + 1]
        except StorageNotFound as exc:
            raise not_found(f"the storage no longer has the code of run {run.id}") from exc
        return found


def _change(path: str, mine: _Code, theirs: _Code) -> str:
    if path not in theirs.files:
        return "only here"
    if path not in mine.files:
        return "only there"
    return "" if mine.files[path] == theirs.files[path] else "differs"


def _text(path: str, mine: _Code, theirs: _Code | None) -> str:
    """Return a file's text, or the lines in which the other run's file differs."""
    if is_secret(path):
        return "not shown, since its name says that it holds passwords or keys"
    datas = [code.chosen for code in (mine, theirs) if code]
    if theirs and path in mine.files and not _change(path, mine, theirs):
        return "equal"
    if any(b"\0" in data or len(data) > _MOST_BYTES for data in datas):
        return "binary, or too large to be shown here"
    if theirs is None:
        return mine.chosen.decode(errors="replace")
    if any(data.count(b"\n") >= _MOST_LINES for data in datas):
        return f"too long to be compared here: more than {_MOST_LINES} lines"
    # Each byte that is no text stays another one than all others, and line ends are seen.
    here, there = (data.decode(errors="surrogateescape").split("\n") for data in datas)
    lines = "\n".join(unified_diff(there, here, "there", "here", lineterm=""))
    shown = lines.encode(errors="surrogateescape").decode(errors="backslashreplace")
    return shown.replace("\r", "↵") or "equal, but executable in one of the two only"
