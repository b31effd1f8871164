"""Static files: read and compressed once, with their hash in the URL so that browsers can cache
them for ever.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import anyio.to_thread
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from everstep.spec.run_spec import spec_schema
from service.api.blocking import storage_call
from service.api.problems import not_found
from service.model.run_rows import RunRow
from storage.errors import StorageError
from storage.filesystem import Storage
from storage.run_dir import RunDir

router: Final = APIRouter(include_in_schema=False)

_DIRECTORY: Final = Path(__file__).parent / "static"
_MEDIA_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff": "font/woff",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
    "": "text/plain; charset=utf-8",
}
_A_YEAR_S: Final = 365 * 24 * 3600


@dataclass(frozen=True)
class Asset:
    """A file as it is served."""

    body: bytes
    compressed: bytes
    media_type: str
    version: str
    """First digits of its SHA-256."""


@cache
def _names() -> frozenset[str]:
    """Return the names of all files. Other paths are never opened."""
    return frozenset(
        path.relative_to(_DIRECTORY).as_posix() for path in _DIRECTORY.rglob("*") if path.is_file()
    )


@cache
def asset(name: str) -> Asset:
    """Return the file with this name below ``static/``. Raises 404."""
    if name not in _names():
        raise not_found(f"file {name[:80]!r} does not exist")
    return read_asset(_DIRECTORY / name)


def read_asset(path: Path) -> Asset:
    """Read a file whose type is in the table of media types."""
    body = path.read_bytes()
    return Asset(
        body,
        gzip.compress(body, 9, mtime=0),
        _MEDIA_TYPES[path.suffix],
        hashlib.sha256(body).hexdigest()[:12],
    )


def asset_url(name: str) -> str:
    """Return the URL of a file, which changes with its content."""
    return f"/static/{name}?v={asset(name).version}"


@router.get("/static/spec.schema.json")
async def get_schema() -> Response:
    """Return the JSON schema of a spec. It needs no log-in: editors have none."""
    return JSONResponse(spec_schema(), headers={"Cache-Control": "no-cache"})


@router.get("/static/{name:path}")
async def get_asset(name: str, request: Request) -> Response:
    if name not in _names():
        raise not_found(f"file {name[:80]!r} does not exist")
    found = await anyio.to_thread.run_sync(asset, name)
    return asset_response(found, request, is_final=request.query_params.get("v") == found.version)


def asset_response(found: Asset, request: Request, *, is_final: bool) -> Response:
    """Return the response with a file.

    Args:
        found: the file.
        request: the request, which may have the file already.
        is_final: whether the content behind this URL never changes.
    """
    headers = {
        "ETag": f'"{found.version}"',
        "Vary": "Accept-Encoding",
        "X-Content-Type-Options": "nosniff",
    }
    headers["Cache-Control"] = f"public, max-age={_A_YEAR_S}, immutable" if is_final else "no-cache"
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(
            found.compressed,
            media_type=found.media_type,
            headers=headers | {"Content-Encoding": "gzip"},
        )
    return Response(found.body, media_type=found.media_type, headers=headers)


# ---------------------------------------------------------------- wandb link

# Where a run is recorded at Weights & Biases, for its page.


async def wandb_place(storage: Storage, run: RunRow) -> dict[str, Any] | None:
    """Return what the run's driver has noted: ``url``, ``files`` and ``problem``; None if the run
    is not recorded there, or nothing is noted yet."""
    if run.stored_spec.wandb is None:
        return None
    run_dir = RunDir(storage, run.id)
    try:
        data = await storage_call(run_dir.files.read, run_dir.wandb_path("run.json"))
        noted = json.loads(data)
    except (StorageError, ValueError):
        return None
    if not isinstance(noted, dict):
        return None
    url = str(noted.get("url") or "")
    # User code can write the file: nothing but an address of the web becomes a link.
    shown = url if url.startswith(("https://", "http://")) else None
    return {"url": shown, "files": noted.get("files"), "problem": noted.get("problem")}
