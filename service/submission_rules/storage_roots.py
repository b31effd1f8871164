"""Below which directories and object stores' prefixes the operator lets storage and the data of
runs lie."""

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
    """Roots that the operator allows; without any, everything is.

    Paths of data are those of the nodes, and compared as they are written; the storage is on this
    machine too, and compared with its links followed.

    >>> roots = StorageRoots(["/data"])
    >>> roots.admits("/data/imagenet"), roots.admits("/database")
    (True, False)
    """

    def __init__(self, roots: Sequence[str] = ()) -> None:
        """Raises InvalidStorage for a root that is no place of storage."""
        self._roots = tuple(open_storage(root).uri for root in roots)

    def admits(self, place: str) -> bool:
        """Whether a path or URI is one of the roots or lies below one; what is relative, of a home
        or goes up, does not."""
        if not self._roots:
            return True
        parts = _parts(place)
        return ".." not in parts and any(
            parts[: len(root)] == root for root in map(_parts, self._roots)
        )

    def problem_of_storage(self, storage: Storage) -> str | None:
        """Why the service's storage may not lie where it does; None where it may."""
        followed = StorageRoots([_followed(root) for root in self._roots])
        if followed.admits(_followed(storage.uri)):
            return None
        return f"{storage.uri} lies below none of the allowed roots: {', '.join(self._roots)}"

    def check_data(self, spec: RunSpec) -> None:
        """Raises InvalidSpec naming every field with a path on the nodes that lies below no
        root."""
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
    """What a place is called by, outermost first: scheme, bucket, names; of a path '/' and
    names."""
    if "://" not in place:
        return PurePosixPath(place).parts
    try:
        split = urlsplit(place)
    except ValueError:  # as for "s3://[": it lies below nothing
        return (place,)
    return (split.scheme, split.netloc, *PurePosixPath(split.path.lstrip("/")).parts)


def _followed(uri: str) -> str:
    return str(Path(uri).resolve()) if uri.startswith("/") else uri


def _node_paths(model: BaseModel, loc: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every path on the nodes that a spec holds, and its field."""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _node_paths(value, (*loc, name))
        elif isinstance(value, str) and any(isinstance(mark, NodePath) for mark in field.metadata):
            yield (*loc, name), value
