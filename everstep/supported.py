"""Versions of Python, torch and Ray that Everstep runs on, and what is said of another.

pyproject.toml has the same ranges (``tests/unit/repository/test_versions.py`` compares them).
docs/decisions/0015-versions-are-those-that-were-run.md says what was run on which.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

Release = tuple[int, int]


@dataclass(frozen=True)
class Supported:
    """A range of releases, each as major and minor; both ends belong to it."""

    name: str
    first: Release
    last: Release
    way_out: str
    """What to do, with ``{range}`` for the range as pip understands it."""

    def __str__(self) -> str:
        return f"{self.name} {_dotted(self.first)} to {_dotted(self.last)}"

    @property
    def specifier(self) -> str:
        """The range as pip understands it, for example ``>=2.58,<2.61``."""
        return f">={_dotted(self.first)},<{_dotted((self.last[0], self.last[1] + 1))}"

    def problem(self, version: str, where: str) -> str | None:
        """Return why ``version`` is refused and what to do, or None if it is in the range.

        Args:
            version: for example ``2.60.0`` or ``2.13.0+cpu``.
            where: what has this version, to begin the sentence with.
        """
        found = re.match(r"(\d+)\.(\d+)", version)
        if found and self.first <= (int(found[1]), int(found[2])) <= self.last:
            return None
        remedy = self.way_out.format(range=self.specifier)
        return f"{where} has {self.name} {version}, and Everstep needs {self}; {remedy}"


def _dotted(release: Release) -> str:
    return ".".join(map(str, release))


PYTHON = Supported(
    "Python", (3, 11), (3, 14), "make the environment with one of these, and install again"
)
RAY = Supported(
    "ray", (2, 58), (2, 60), "install one of these there: pip install 'ray[default,train]{range}'"
)
TORCH = Supported(
    "torch",
    (2, 13),
    (2, 15),
    "install one of these there, with its torchvision: pip install 'torch{range}' torchvision",
)


def problem_here(where: str, *names: str) -> str | None:
    """Return why an installed package is refused, without importing it; None if all are supported.

    Args:
        where: what has these packages, to begin the sentence with.
        names: ``ray``, ``torch``. One that is not installed is left out.
    """
    for supported in (RAY, TORCH):
        if supported.name not in names:
            continue
        try:
            version = importlib.metadata.version(supported.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if problem := supported.problem(version, where):
            return problem
    return None


def install_command(extra: str) -> str:
    """Return the command that installs Everstep again with an extra, from where it came: a clone, a
    wheel, a repository, or an index."""
    # a clone has a second one, which setuptools leaves there
    found = importlib.metadata.distributions(name="everstep")
    sources = (each.read_text("direct_url.json") for each in found)
    origin = json.loads(next((each for each in sources if each), "{}"))
    url = urlsplit(str(origin.get("url", "")))
    what = f"everstep[{extra}]"
    if url.scheme == "file" and "vcs_info" not in origin:
        what = f"{unquote(url.path)}[{extra}]"
    elif origin:  # what an index has under this name may be another's
        place = re.sub(r"//(?!git@)[^/]*@", "//", url.geturl())
        vcs = origin.get("vcs_info")
        what += f" @ {vcs['vcs']}+{place}@{vcs['commit_id']}" if vcs else f" @ {place}"
    option = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {option}{shlex.quote(what)}"
