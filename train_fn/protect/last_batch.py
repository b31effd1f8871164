"""The newest batch of Everstep's own loader: part of the state, and compared after a restart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from train_fn.errors import DataChanged
from train_fn.protect.batch_marks import Taken, differing
from train_fn.protect.batches import Batches
from train_fn.state.contents import DRAW_ALIKE, Contents, few
from train_fn.state.same_data import require_same_contents
from train_fn.step.peers import Peers


class LastBatch:
    """The newest batch that a rank got of Everstep's loader, to be compared after a restart."""

    def __init__(self, rank: int, world_size: int, taken: Taken | dict[str, int]) -> None:
        self._place, self._taken = (rank, world_size), taken
        self._contents: str | None = None

    @classmethod
    def loaded(cls, dumped: Mapping[str, Any] | None, contents: str | None) -> LastBatch | None:
        if dumped is None:
            return None
        found = cls(dumped["rank"], dumped["world_size"], dict(dumped["marks"]))
        found._contents = contents
        return found

    @property
    def marks(self) -> dict[str, int]:
        return self._taken.marks if isinstance(self._taken, Taken) else self._taken

    def dump(self) -> dict[str, Any]:
        rank, world_size = self._place
        return {"rank": rank, "world_size": world_size, "marks": self.marks}

    def require_same(self, data: Batches, contents: Contents, step: int, peers: Peers) -> None:
        """Raise DataChanged if the batch of the last step is another one now; on other ranks than
        the one that noted it, if samples are."""
        name = "the data of es.loader"
        if self._contents is not None and self._place[1] != peers.world_size:
            require_same_contents(self._contents, step, name, contents)
        if self._place != (peers.rank, peers.world_size):
            return
        found = data.marks_of(step - 1, *self._place)
        if other := differing(self.marks, found):
            drawn = differing(found, data.marks_of(step - 1, *self._place))
            if changed := [place for place in other if place not in drawn]:
                raise DataChanged(
                    f"{name} changed since step {step}: not the same: {few(changed)} of its last "
                    "batch. Put the data back as it was, or start a new run. If nothing was "
                    f"changed, each process builds other data: {DRAW_ALIKE}"
                )
