"""The packages that runs of a project may bring (``runtime_env.pip``), as the operator allows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from everstep.errors import FieldError, InvalidSpec
from everstep.spec.run_spec import RunSpec

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
