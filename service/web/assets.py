"""Static files: read and compressed once, with their hash in the URL so that browsers can cache
them for ever."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import anyio.to_thread
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from everstep.spec.json_schema import spec_schema
from service.api.problems import not_found

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
