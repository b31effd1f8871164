"""The files of Ray's dashboard, from the ``ray`` package of this service's own environment.

They are not read from the cluster: code of a run can change what the cluster's head serves, and a
script from there would act on this service's pages as the person who is logged in.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from service.api.problems import not_found, unavailable
from service.web.assets import Asset, asset_url, read_asset

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
