"""Which packages the runs of which project may bring (``runtime_env.pip``), by the operator's
word."""

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
    "is denied by this service; leave it out or set it to null, and have packages installed on "
    "the nodes or put them into your "
    "code. The operator allows it by EVERSTEP_ALLOW_PIP"
)


@dataclass(frozen=True)
class PipRule:
    """(project, package) that are allowed; ``*`` stands for any.

    >>> PipRule.of("einops, vision:timm, lab:*").allowed("vision")
    ('einops', 'timm')
    """

    pairs: frozenset[tuple[str, str]] = frozenset()

    @classmethod
    def of(cls, text: str) -> PipRule:
        """From ``PACKAGE`` and ``PROJECT:PACKAGE``, separated by commas; ``1`` is any package for
        all, ``0`` or nothing is none.

        Raises ValueError for another word.
        """
        if text.strip() in ("", "0"):
            return NO_PACKAGES
        if text.strip() == "1":
            return ANY_PACKAGE
        return cls(frozenset(_pair(word.strip()) for word in text.split(",")))

    def allowed(self, project: str) -> tuple[str, ...]:
        """The packages that a project's runs may bring, in order."""
        return tuple(sorted(package for owner, package in self.pairs if owner in ("*", project)))

    def check(self, spec: RunSpec) -> None:
        """Raises InvalidSpec naming every requirement that the run may not bring."""
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
    """As package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()
