"""How a Dockerfile is read where no container engine reads it."""

from __future__ import annotations

from scripts.try_dockerfile import REPOSITORY, read_stages


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
