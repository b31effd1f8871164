"""The commands of docs/operations.md, as an operator copies them."""

from __future__ import annotations

import re
import shlex

from tests.compose.base_images import REPOSITORY

_EXPLANATION = re.compile(r"\s{2,}|\s+# ")


def command(heading: str, part: str, **values: str) -> list[str]:
    """Return the one command of a section of the page that has ``part`` in it.

    ``values`` take the place of words in capitals. Raises AssertionError if the section has no
    such command, or several.
    """
    page = (REPOSITORY / "docs/operations.md").read_text()
    assert f"\n### {heading}\n" in page, f"docs/operations.md has no section {heading}"
    section = page.split(f"\n### {heading}\n")[1].split("\n##")[0]
    lines = [line[4:] for line in section.splitlines() if line.startswith("    ")]
    commands = [_EXPLANATION.split(line)[0] for line in lines]
    (found,) = [each for each in commands if part in each]
    return [values.get(word, word) for word in shlex.split(found)]
