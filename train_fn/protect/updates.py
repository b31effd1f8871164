"""How many optimizer steps a loop makes, and whether a commit made as many as the others."""

from __future__ import annotations


class Updates:
    """Count the optimizer steps of this attempt, and those of each commit.

    A commit is regular if it made as many as the first one that the ranks agreed on. If a peer dies
    before it can say that it made the same step, a rank keeps the state of a regular commit only.
    """

    def __init__(self, *, may_skip: bool) -> None:
        """``may_skip``: a commit without an optimizer step is regular, too. A gradient scaler makes
        such ones."""
        self._may_skip = may_skip
        self._num_committed = 0
        self.num = 0
        """Optimizer steps since the attempt began."""
        self.of_commit = 0
        """Those of the newest commit."""
        self.usual: int | None = None
        """Those of the first commit that the ranks agreed on; None before."""
        self.is_regular = True
        """Whether the newest commit is one like the others."""

    def count(self) -> None:
        """Count an optimizer step."""
        self.num += 1

    @property
    def since_commit(self) -> int:
        """Return the steps since the newest commit."""
        return self.num - self._num_committed

    def commit(self) -> None:
        """Take the steps since the commit before as those of the newest one."""
        self.of_commit = self.num - self._num_committed
        self._num_committed = self.num
        usual = self.of_commit if self.usual is None else self.usual
        self.is_regular = self.of_commit == usual or (self._may_skip and not self.of_commit)

    def agree(self) -> None:
        """Note that the ranks agreed on the newest commit."""
        if self.usual is None and self.of_commit:
            self.usual = self.of_commit
