"""A profile as an object: asked for, waited for, downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from everstep.follow import Patience, wait_until
from everstep.profiles import AllReduce, Profile, ProfileState
from everstep.transport import Transport


class ProfileHandle:
    """One profile. Its fields (``profile.state``, ``profile.all_reduces``, …) are those of the last answer, kept whole in
    ``profile.profile``.

    >>> run.profile(rank=0, steps=10).wait().download("trace.json.gz")   # doctest: +SKIP
    PosixPath('trace.json.gz')
    """

    if TYPE_CHECKING:
        rank: int
        steps: int
        state: ProfileState
        problem: str | None
        first_step: int | None
        all_reduces: tuple[AllReduce, ...]
    else:

        def __getattr__(self, name: str) -> Any:
            if name in Profile.model_fields:
                return getattr(self.profile, name)
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __init__(self, transport: Transport, run_id: str, profile: Profile, patience: Patience) -> None:
        self.run_id = run_id
        self.profile = profile
        self._transport = transport
        self._patience = patience
        self._path = f"/v1/runs/{quote(run_id, safe='')}/profiles/{quote(profile.id, safe='')}"

    def __repr__(self) -> str:
        return f"<profile {self.id} of rank {self.profile.rank}, {self.profile.state}>"

    @property
    def id(self) -> str:
        return self.profile.id

    def refresh(self) -> ProfileHandle:
        """Ask the service how far the profile is; returns itself."""
        self.profile = self._transport.get(self._path, Profile)
        return self

    def wait(self, timeout_s: float = 600.0) -> ProfileHandle:
        """Wait until the trace is there, or will not come: ``state`` tells. Returns itself.

        Raises WaitTimeout after ``timeout_s`` seconds; Unavailable if the service stays away.
        """
        wait_until(
            lambda: self.profile.complete,
            self.refresh,
            lambda: f"profile {self.id} of run {self.run_id} is still {self.profile.state} after {timeout_s:g} s",
            self._transport.timing,
            self._patience,
            timeout_s=timeout_s,
        )
        return self

    def download(self, path: str | Path) -> Path:
        """Fetch the trace, gzipped JSON that https://ui.perfetto.dev opens as it is. Returns the path; raises NotFound where there
        is none, and OSError where the disk does not take it."""
        answer = self._transport.send("GET", f"{self._path}/trace", repeatable=True)
        Path(path).write_bytes(answer.content)
        return Path(path)
