"""What the operator allows a run to name: packages, storage roots and webhooks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel

from everstep.errors import FieldError, InvalidSpec
from everstep.spec.run_spec import RunSpec
from everstep.spec.sections import NodePath
from storage.filesystem import Storage, open_storage

_WORD: Final = re.compile(
    r"(?:(?P<project>[A-Za-z0-9][A-Za-z0-9._-]*):)?(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\*)"
)
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_DENIED: Final = (
    "is not allowed by this service. Leave it out, and put the packages into your code or have "
    "them installed on the nodes. An operator allows packages by EVERSTEP_ALLOW_PIP"
)


@dataclass(frozen=True)
class PipRule:
    """The allowed pairs of project and package; ``*`` stands for any.

    >>> PipRule.of("einops, vision:timm, lab:*").allowed("vision")
    ('einops', 'timm')
    """

    pairs: frozenset[tuple[str, str]] = frozenset()

    @classmethod
    def of(cls, text: str) -> PipRule:
        """Return the rule from ``PACKAGE`` and ``PROJECT:PACKAGE``, separated by commas.

        ``1`` allows all packages to all projects, ``0`` or no text none. Raises ValueError for
        anything else.
        """
        if text.strip() in ("", "0"):
            return NO_PACKAGES
        if text.strip() == "1":
            return ANY_PACKAGE
        return cls(frozenset(_pair(word.strip()) for word in text.split(",")))

    def allowed(self, project: str) -> tuple[str, ...]:
        """Return the packages that a project's runs may bring, sorted."""
        return tuple(sorted(package for owner, package in self.pairs if owner in ("*", project)))

    def check(self, spec: RunSpec) -> None:
        """Raise InvalidSpec that names every requirement that the run may not bring."""
        if spec.runtime_env is None:
            return
        allowed = self.allowed(spec.project)
        if not allowed:
            raise InvalidSpec((FieldError(("runtime_env",), _DENIED),))
        if "*" in allowed:
            return
        words = (
            f"is not among the packages that project {spec.project!r} may bring: "
            f"{', '.join(allowed)}"
        )
        faults = _refused(spec.runtime_env.pip, allowed, words)
        if faults:
            raise InvalidSpec(faults)


NO_PACKAGES: Final = PipRule()
ANY_PACKAGE: Final = PipRule(frozenset({("*", "*")}))


def _pair(word: str) -> tuple[str, str]:
    found = _WORD.fullmatch(word)
    if found is None:
        raise ValueError(f"{word[:80]!r} is neither PACKAGE nor PROJECT:PACKAGE")
    return found["project"] or "*", _canonical(found["package"])


def _refused(
    requirements: Sequence[str], allowed: Sequence[str], words: str
) -> tuple[FieldError, ...]:
    found = []
    for index, requirement in enumerate(requirements):
        name = _NAME.match(requirement)
        if name is None or _canonical(name[0]) not in allowed:
            found.append(FieldError(("runtime_env", "pip", index), f"{requirement!r} {words}"))
    return tuple(found)


def _canonical(name: str) -> str:
    """Return a name in the form in which package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


# ---------------------------------------------------------------- storage roots

# The roots below which the operator lets storage and the data of runs lie.


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


# ---------------------------------------------------------------- webhooks

# The origins that webhooks may call: those that the operator allows.


@dataclass(frozen=True)
class NotifyRule:
    """The origins that webhooks may call, and the key of the signatures."""

    origins: frozenset[str] = frozenset()
    """``https://hooks.example.org``, with the port if it is not the scheme's default."""
    secret: str = ""

    def allows(self, url: str) -> bool:
        """Return whether this service may call ``url``. A URL with a user name is never allowed."""
        try:
            return origin_of(url) in self.origins
        except httpx.InvalidURL:
            return False


NOBODY: Final = NotifyRule()


def origin_of(url: str) -> str:
    """Return scheme, host and port in the form that is compared. Raises httpx.InvalidURL."""
    parsed = httpx.URL(url)
    if parsed.userinfo or parsed.scheme not in ("http", "https") or not parsed.host:
        raise httpx.InvalidURL(f"{url!r} has no origin that can be allowed")
    return f"{parsed.scheme}://{parsed.host.lower()}" + (
        f":{parsed.port}" if parsed.port is not None else ""
    )
