"""How a Dockerfile is read where no container engine reads it."""

from __future__ import annotations

import pytest

from scripts.try_dockerfile import REPOSITORY, read_stages


def test_stages_are_read_with_their_arguments() -> None:
    stages = read_stages(
        "ARG BASE=debian\nFROM ${BASE} AS a\nRUN one \\\n  && two\nFROM a AS b\nARG X=1\nRUN say "
        "${X}\n",
        {"X": "2"},
    )
    assert stages["a"].instructions == [("RUN", "one  && two")] and stages["a"].base == "debian"
    assert stages["b"].instructions == [("RUN", "say 2")]
    with pytest.raises(ValueError, match="ONBUILD"):
        read_stages("FROM a AS b\nONBUILD RUN x\n", {})


def test_both_targets_of_ours_copy_what_their_own_build_installed() -> None:
    stages = read_stages((REPOSITORY / "Dockerfile").read_text(), {})
    for target in ("cpu", "cuda"):
        assert stages[target].base == "runtime"
        assert ("COPY", f"--from=build-{target} /opt/everstep /opt/everstep") in stages[
            target
        ].instructions
        assert stages[target].instructions[-1] == ("USER", "everstep"), (
            "the image runs as nobody else"
        )
    assert stages["runtime"].base == stages["build"].base, (
        "a virtual environment moves only to the same Python"
    )
