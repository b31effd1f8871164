"""The roots below which the operator lets storage and the data of runs lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import urlsplit

from pydantic import BaseModel

from everstep.errors import FieldError, InvalidSpec
from everstep.spec.field_types import NodePath
from everstep.spec.run_spec import RunSpec
from storage.filesystem import Storage, open_storage


class StorageRoots:
    """The roots that the operator allows. Without roots every place is allowed.

    Paths of data are paths on the nodes and are compared as written. The storage is on this machine
    too, so its links are followed first.

    >>> roots = StorageRoots(["/data"])
    >>> roots.admits("/data/imagenet"), roots.admits("/database")
    (True, False)
    """

    def __init__(self, roots: Sequence[str] = ()) -> None:
        """Raise InvalidStorage for a root that cannot be a storage."""
        self._roots = tuple(open_storage(root).uri for root in roots)

    def admits(self, place: str) -> bool:
        """Return whether a path or URI is a root or lies below one.

        False for a relative path, one that begins with ``~``, and one with ``..``.
        """
        if not self._roots:
            return True
        parts = _parts(place)
        return ".." not in parts and any(
            parts[: len(root)] == root for root in map(_parts, self._roots)
        )

    def problem_of_storage(self, storage: Storage) -> str | None:
        """Return why the service's storage is not allowed, or None if it is."""
        followed = StorageRoots([_followed(root) for root in self._roots])
        if followed.admits(_followed(storage.uri)):
            return None
        return f"{storage.uri} lies below none of the allowed roots: {', '.join(self._roots)}"

    def check_data(self, spec: RunSpec) -> None:
        """Raise InvalidSpec that names every field with a path outside of the roots."""
        if not self._roots:
            return
        allowed = ", ".join(self._roots)
        faults = [
            FieldError(
                loc, f"{path!r} lies below none of the roots that the operator allows: {allowed}"
            )
            for loc, path in _node_paths(spec, ())
            if not self.admits(path)
        ]
        if faults:
            raise InvalidSpec(tuple(faults))


ANYWHERE: Final = StorageRoots()


def _parts(place: str) -> tuple[str, ...]:
    """Return the parts of a place, outermost first: scheme, bucket, names; of a path '/', names."""
    if "://" not in place:
        return PurePosixPath(place).parts
    try:
        split = urlsplit(place)
    except ValueError:  # For example "s3://[", which lies below no root.
        return (place,)
    return (split.scheme, split.netloc, *PurePosixPath(split.path.lstrip("/")).parts)


def _followed(uri: str) -> str:
    return str(Path(uri).resolve()) if uri.startswith("/") else uri


def _node_paths(model: BaseModel, loc: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every path on the nodes in a spec, with its field."""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _node_paths(value, (*loc, name))
        elif isinstance(value, str) and any(isinstance(mark, NodePath) for mark in field.metadata):
            yield (*loc, name), value
