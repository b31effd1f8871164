"""Check relative file names: one rule for manifests, code archives and downloads."""

from __future__ import annotations

_MAX_PATH_BYTES = 1024
_MAX_PART_BYTES = 255


def fault_of(name: str) -> str | None:
    """Return what is wrong with a relative file name that uses ``/``; None if it is safe.

    >>> fault_of("ranks/model-0.pt")
    >>> fault_of("../../other/spec.json")
    "leads out of its directory: use a relative name without '.' and '..'"
    """
    parts = name.split("/")
    if name.startswith("/") or ".." in name.replace("\\", "/").split("/"):
        return "leads out of its directory: use a relative name without '.' and '..'"
    if "" in parts or "." in parts:
        return "is not a plain relative name: use one without '.', '//' and a trailing '/'"
    if "\\" in name or "\0" in name:
        return "contains a backslash or a NUL: use a name without"
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        return "cannot be encoded as UTF-8: use another name"
    if max(sizes) > _MAX_PART_BYTES or sum(sizes) + len(sizes) - 1 > _MAX_PATH_BYTES:
        return (
            f"exceeds {_MAX_PATH_BYTES} bytes, or one of its parts {_MAX_PART_BYTES}: use a "
            "shorter name"
        )
    return None
