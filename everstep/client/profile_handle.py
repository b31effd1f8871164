"""A profile of a rank: wait for it and download its trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from everstep.client.order_handle import OrderHandle
from everstep.wire.profiles import AllReduce, Profile, ProfileState


class ProfileFields:
    """The fields of a profile, for type checkers."""

    if TYPE_CHECKING:
        rank: int
        steps: int
        state: ProfileState
        problem: str | None
        first_step: int | None
        all_reduces: tuple[AllReduce, ...]


class ProfileHandle(ProfileFields, OrderHandle[Profile]):
    """One profile. Its fields (``profile.state``, ``profile.all_reduces``, …) are those of the last
    response, which ``profile.profile`` holds. ``wait`` returns when the trace is ready, or will
    never be.

    >>> run.profile(rank=0, steps=10).wait().download("trace.json.gz")   # doctest: +SKIP
    PosixPath('trace.json.gz')
    """

    _noun = "profile"
    _fields = frozenset(Profile.model_fields)

    def __repr__(self) -> str:
        return f"<profile {self.id} of rank {self.profile.rank}, {self.profile.state}>"

    @property
    def profile(self) -> Profile:
        return self._order

    def download(self, path: str | Path) -> Path:
        """Download the trace: gzipped JSON, which https://ui.perfetto.dev opens. Return the path.
        Raise NotFound if there is no trace, OSError if it cannot be written."""
        answer = self._transport.send("GET", f"{self._path}/trace", repeatable=True)
        Path(path).write_bytes(answer.content)
        return Path(path)
